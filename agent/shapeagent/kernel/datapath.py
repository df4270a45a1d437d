# SPDX-License-Identifier: Apache-2.0
"""What an attached interface's maps hold, and every write to them.

One object per attachment. All switches go through the control word, one
aligned u64: which half of lists and rules is in force, shadow, which lists
have entries, generation and epoch (abi.h). Callers hold the interface's lock.
"""

from __future__ import annotations

import ctypes
import dataclasses
import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shapeagent.kernel import abi, bpf, lists
from shapeagent.kernel.maps import (
    CODE_SLOTS,
    read_all_percpu_u64,
    read_array,
    read_percpu_u64,
    reason_counts,
    write_array,
)
from shapeagent.model.types import WhitelistEntry

_LIST_FLAGS = lists.ALL_FLAGS
_RULE_FLAGS = (
    abi.SHP_F_RULE_MARK | abi.SHP_F_RULE_CGROUP | abi.SHP_F_RULE_DSCP | abi.SHP_F_DGRAM_LOOK
)
_RULES_MASK = (1 << abi.SHP_RULES_BITS) - 1
_LISTS_MASK = (1 << abi.SHP_LISTS_BITS) - 1
_EPOCH_MASK = (1 << abi.SHP_EPOCH_BITS) - 1
_COUNT_FIELDS = 8
_CB = 48  # offset of cb[] in struct __sk_buff
_CONTEXT_BYTES = 192
_CONTEXT_MARK = 8


@dataclass(frozen=True, slots=True)
class Control:
    """The control word, taken apart."""

    active_lists: int = 0
    active_rules: int = 0
    shadow: bool = False
    list_flags: int = 0
    rule_flags: int = 0
    rules_generation: int = 0
    lists_generation: int = 0
    epoch: int = 0

    def word(self) -> int:
        """Return the u64 that the program reads."""
        return (
            self.active_lists
            | self.active_rules << abi.SHP_F_ACTIVE_RULES_SHIFT
            | (abi.SHP_F_SHADOW if self.shadow else 0)
            | self.list_flags
            | self.rule_flags
            | (self.rules_generation & _RULES_MASK) << abi.SHP_RULES_SHIFT
            | (self.lists_generation & _LISTS_MASK) << abi.SHP_LISTS_SHIFT
            | (self.epoch & _EPOCH_MASK) << abi.SHP_EPOCH_SHIFT
        )

    @property
    def lists_mark(self) -> int:
        """What tells one state of the lists from the next: which half, generation and epoch."""
        mark = self.active_lists | (self.lists_generation & _LISTS_MASK) << 1
        return mark | (self.epoch & _EPOCH_MASK) << 1 + abi.SHP_LISTS_BITS

    def after_replacing(self, flags: int) -> Control:
        """Return the control word that puts the lists of the idle half in force."""
        return dataclasses.replace(
            self,
            active_lists=1 - self.active_lists,
            list_flags=flags,
            lists_generation=self.lists_generation + 1,
        )

    def after_changing(self, *, is_prefix: bool, flags: int = 0) -> Control:
        """Return the control word after a change in place: of a prefix, or of an exact entry."""
        return dataclasses.replace(
            self,
            list_flags=self.list_flags | flags,
            lists_generation=self.lists_generation + is_prefix,
            epoch=self.epoch + (not is_prefix),
        )

    @classmethod
    def from_word(cls, word: int) -> Control:
        """Take a control word apart."""
        return cls(
            active_lists=word & abi.SHP_F_ACTIVE,
            active_rules=word >> abi.SHP_F_ACTIVE_RULES_SHIFT & 1,
            shadow=bool(word & abi.SHP_F_SHADOW),
            list_flags=word & _LIST_FLAGS,
            rule_flags=word & _RULE_FLAGS,
            rules_generation=word >> abi.SHP_RULES_SHIFT & _RULES_MASK,
            lists_generation=word >> abi.SHP_LISTS_SHIFT & _LISTS_MASK,
            epoch=word >> abi.SHP_EPOCH_SHIFT & _EPOCH_MASK,
        )


@dataclass(frozen=True, slots=True)
class RuleWrite:
    """Rules in the form in which the maps take them.

    ports: 2 × 65,536 × 4 u16, as `struct shp_port_rules[2 * 65536]`.
    fields: (direction, slot) → rule number.
    marks: (value, mask, rule, directions), at most 8.
    cgroups: (cgroup id, rule, directions).
    rules: (rule number, class number, code).
    """

    ports: array[int]
    fields: Mapping[tuple[int, int], int]
    marks: Sequence[tuple[int, int, int, int]]
    cgroups: Sequence[tuple[int, int, int]]
    rules: Sequence[tuple[int, int, int]]
    flags: int


@dataclass(frozen=True, slots=True)
class ClassCount:
    """Counters of one class in one direction, summed over CPUs."""

    packets: int
    wire_bytes: int
    drops: int
    drop_wire_bytes: int
    ce_marks: int
    no_socket: int
    over_segment: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What the explaining program says about one packet."""

    class_number: int
    code: int
    note: int
    ref: int
    priority: int
    mark: int


class Datapath:
    """The maps of one attachment, open in this process."""

    def __init__(self, maps: Mapping[str, int], possible_cpus: int) -> None:
        self.maps = maps
        self._cpus = possible_cpus

    # --- control word

    def read_control(self) -> Control:
        """Return the control word in force."""
        raw = bpf.lookup(self.maps["ctl"], bytes(4), 8)
        return Control.from_word(int.from_bytes(raw or bytes(8), "little"))

    def write_control(self, control: Control) -> None:
        """Put a control word in force; the next packet sees it."""
        bpf.update(self.maps["ctl"], bytes(4), struct.pack("=Q", control.word()))

    # --- configuration and classes

    def write_config(self, config: abi.Config) -> None:
        """Write the configuration of the interface."""
        write_array(self.maps["config"], 0, config)

    def read_config(self) -> abi.Config:
        """Return the configuration of the interface."""
        found = read_array(self.maps["config"], 0, abi.Config)
        assert isinstance(found, abi.Config)
        return found

    def write_class(self, direction: int, number: int, value: abi.Class) -> None:
        """Write one class of one direction (0 egress, 1 ingress)."""
        write_array(self.maps["classes"], direction * abi.SHP_MAX_CLASSES + number, value)

    def read_class(self, direction: int, number: int) -> abi.Class:
        """Return one class of one direction as the program sees it."""
        slot = direction * abi.SHP_MAX_CLASSES + number
        found = read_array(self.maps["classes"], slot, abi.Class)
        assert isinstance(found, abi.Class)
        return found

    # --- rules and lists

    def replace_rules(self, wanted: RuleWrite) -> None:
        """Put another rule set in force, by one write of the control word."""
        control = self.read_control()
        half = 1 - control.active_rules
        self._fill_rules(wanted, half)
        self.write_control(
            dataclasses.replace(
                control,
                active_rules=half,
                rule_flags=wanted.flags,
                rules_generation=control.rules_generation + 1,
            )
        )
        bpf.wait_for_readers()
        self._drop_cgroups(control.active_rules)

    def _fill_rules(self, wanted: RuleWrite, half: int) -> None:
        _write_slots(self.maps["ports"], half * 2 * 65536, wanted.ports.tobytes(), 8)
        fields = array("I", bytes(4 * 2 * abi.SHP_FIELD_SLOTS))
        for (direction, slot), rule in wanted.fields.items():
            fields[direction * abi.SHP_FIELD_SLOTS + slot] = rule
        _write_slots(self.maps["fields"], half * 2 * abi.SHP_FIELD_SLOTS, fields.tobytes(), 4)
        marks = bytearray(16 * abi.SHP_MAX_MARKS)
        for number, mark in enumerate(wanted.marks):
            struct.pack_into("=4I", marks, 16 * number, *mark)
        _write_slots(self.maps["marks"], half * abi.SHP_MAX_MARKS, bytes(marks), 16)
        table = bytearray(8 * abi.SHP_MAX_RULES)
        for rule, class_number, code in wanted.rules:
            struct.pack_into("=BB", table, 8 * rule, class_number, code)
        _write_slots(self.maps["rules"], half * abi.SHP_MAX_RULES, bytes(table), 8)
        self._drop_cgroups(half)
        for cgroup, rule, directions in wanted.cgroups:
            key = struct.pack("=QII", cgroup, half, 0)
            bpf.update(self.maps["cgroups"], key, struct.pack("=II", rule, directions))

    def _drop_cgroups(self, half: int) -> None:
        fd = self.maps["cgroups"]
        keys = [key for key, _ in bpf.iterate(fd, 16, 8)]
        for key in keys:
            if struct.unpack_from("=QI", key)[1] == half:
                bpf.delete(fd, key)

    def cgroup_rules(self) -> frozenset[tuple[int, int, int]]:
        """Return (cgroup id, rule, directions) of the rules in force."""
        half = self.read_control().active_rules
        found = set()
        for key, value in bpf.iterate(self.maps["cgroups"], 16, 8):
            cgroup, active, _pad = struct.unpack("=QII", key)
            if active == half:
                found.add((cgroup, *struct.unpack("=II", value)))
        return frozenset(found)

    def replace_lists(self, tables: lists.ListTables) -> None:
        """Put another whitelist in force: old or new for each packet, never a mix."""
        control = self.read_control()
        half = 1 - control.active_lists
        filled = [key for key, part in tables.tables.items() if part.entries]
        # what a process that died in the middle may have left in the idle half
        lists.clear_half(self.maps, lists.filled_slots(self.maps, half), half)
        try:
            lists.fill_half(self.maps, tables, half)
        except BaseException:
            lists.clear_half(self.maps, filled, half)
            raise
        self.write_control(control.after_replacing(tables.flags))
        old = lists.kinds_in(control.list_flags)
        if old:
            # a program that has read the old word may still be on its way to the old lists
            bpf.wait_for_readers()
            lists.clear_half(self.maps, old, control.active_lists)

    def add_entry(self, entry: WhitelistEntry, number: int, expires_jiffies: int) -> None:
        """Add or change one entry in place.

        Raises:
            FailedError: "map-full": replace the list instead; nothing changed.
        """
        control = self.read_control()
        flags, is_prefix = lists.add_in_place(
            self.maps, entry, control.active_lists, control.list_flags, number, expires_jiffies
        )
        self.write_control(control.after_changing(is_prefix=is_prefix, flags=flags))

    def remove_entry(self, entry: WhitelistEntry) -> None:
        """Remove one entry in place."""
        self.remove_entries((entry,))

    def remove_entries(self, entries: Iterable[WhitelistEntry]) -> None:
        """Remove entries in place, one after another: only what nobody must see go at once."""
        control = self.read_control()
        found = [
            lists.remove_in_place(self.maps, entry, control.active_lists, control.list_flags)
            for entry in entries
        ]
        self.write_control(control.after_changing(is_prefix=any(found)))

    # --- counters

    def count(self, direction: int, number: int) -> ClassCount:
        """Return the counters of one class in one direction."""
        slot = direction * abi.SHP_MAX_CLASSES + number
        values = read_percpu_u64(self.maps["counts"], slot, _COUNT_FIELDS, self._cpus)
        return ClassCount(*values[:7])

    def counts(self) -> tuple[list[ClassCount], list[ClassCount]]:
        """Return the counters of all classes, egress and ingress, by their numbers."""
        slots = 2 * abi.SHP_MAX_CLASSES
        rows = read_all_percpu_u64(self.maps["counts"], slots, _COUNT_FIELDS, self._cpus)
        found = [ClassCount(*row[:7]) for row in rows]
        return found[: abi.SHP_MAX_CLASSES], found[abi.SHP_MAX_CLASSES :]

    def reasons(self, direction: int) -> dict[str, int]:
        """Return code name → packets in one direction."""
        return self.all_reasons()[direction]

    def all_reasons(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return code name → packets of egress and of ingress."""
        return reason_counts(self.maps["reasons"], self._cpus)

    # --- explain

    def explain(self, program_fd: int, frame: bytes, *, mark: int = 0) -> Answer:
        """Ask the loaded program about one frame; nothing is counted or cached.

        Raises:
            OSError: the kernel does not take such a frame in a test run.
        """
        context = bytearray(_CONTEXT_BYTES)
        struct.pack_into("=I", context, _CONTEXT_MARK, mark)
        run = bpf.run_program(program_fd, frame, context=bytes(context))
        class_number, code, ref, priority, written = struct.unpack_from("=5I", run.context, _CB)
        return Answer(class_number, code & 0xFF, code >> 8, ref, priority, written)


def _write_slots(fd: int, first: int, values: bytes, value_bytes: int) -> None:
    count = len(values) // value_bytes
    keys = array("I", range(first, first + count)).tobytes()
    bpf.update_batch(fd, keys, values, count, key_bytes=4, value_bytes=value_bytes)


def empty_rules() -> RuleWrite:
    """Return a rule set without rules."""
    return RuleWrite(array("H", bytes(2 * 2 * 65536 * 4)), {}, (), (), (), 0)


def close(maps: Iterable[int]) -> None:
    """Close map descriptors."""
    bpf.close_all(list(maps))


assert ctypes.sizeof(abi.Count) == 8 * _COUNT_FIELDS
assert ctypes.sizeof(abi.PortRules) == 8
assert CODE_SLOTS == 64
