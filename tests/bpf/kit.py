# SPDX-License-Identifier: Apache-2.0
"""One attachment's maps and the loaded programs, without a device: packets by BPF_PROG_TEST_RUN.

What a test run cannot show is left to tests/netns: non-linear skbs (C10, C11: the kernel refuses
data_end in the context) and packets without a socket (a test run always has one).
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shapeagent.kernel import abi, bpf, maps
from shapeagent.kernel import compile as compiler
from shapeagent.kernel.cgroup import CgroupRef
from shapeagent.kernel.clock import JiffiesClock
from shapeagent.kernel.datapath import Answer, Control, Datapath
from shapeagent.kernel.listbuild import build_tables
from shapeagent.kernel.probe import read_jiffy_ns, read_possible_cpus
from shapeagent.model.codes import Code
from shapeagent.model.schema import load_policy
from shapeagent.model.types import (
    DeviceFacts,
    Direction,
    IngressMode,
    KernelFacts,
    Match,
    Policy,
    Profile,
    TrafficClass,
    TreePlan,
    WhitelistEntry,
)
from shapeagent.policy.rules import RuleTables, compile_rules
from shapeagent.service.records import Ceilings, class_record, config_record, rule_write
from tests.bpf import frames

EGRESS, INGRESS = Direction.EGRESS, Direction.INGRESS
UNSPEC, SHOT = -1, 2  # TC_ACT_*
LINK_BITS_PER_S = 1_000_000_000
CLASSES = ("signal", "stream", "normal", "bulk")
SIGNAL, STREAM, NORMAL, BULK = range(4)

HEAD = """
version = 1
default_class = "normal"
control_class = "signal"
"""
CLASS_TABLES = """
[classes.signal]
priority = 0
guarantee = "10%"
[classes.stream]
priority = 1
guarantee = "20%"
[classes.normal]
priority = 2
guarantee = "20%"
[classes.bulk]
priority = 3
guarantee = "10%"
safe_ceiling = "50%"
"""
PORT_RULES = """
[[rules]]
name = "beat"
class = "signal"
protocol = ["tcp", "udp"]
port = 7000
[[rules]]
name = "tokens"
class = "stream"
protocol = "tcp"
local_port = 8443
[[rules]]
name = "weights"
class = "bulk"
protocol = ["tcp", "udp"]
remote_port = "9000-9099"
[[rules]]
name = "sctp"
class = "bulk"
protocol = 132
"""
FIELD_RULES = """
[[rules]]
name = "urgent-mark"
class = "stream"
mark = "0x10/0xf0"
[[rules]]
name = "scavenger"
class = "bulk"
dscp = "cs1"
"""
POLICY = HEAD + CLASS_TABLES + PORT_RULES

# struct __sk_buff: name -> offset of the u32 (include/uapi/linux/bpf.h)
_CONTEXT = {"mark": 8, "priority": 32, "ifindex": 40, "wire_len": 160, "gso_segs": 164}
_CONTEXT |= {"gso_size": 176, **{f"cb{n}": 48 + 4 * n for n in range(5)}}
_CONTEXT_TSTAMP = 152  # u64
_CONTEXT_BYTES = 192
_PROGRAMS = {EGRESS: ("shp_egress", "shp_explain_out"), INGRESS: ("shp_ingress", "shp_explain_in")}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a program did to one packet."""

    returned: int
    priority: int
    mark: int
    frame: bytes
    cb: tuple[int, ...]
    tstamp: int


def context(**fields: int) -> bytes:
    """Return a struct __sk_buff with some fields set."""
    raw = bytearray(_CONTEXT_BYTES)
    for name, value in fields.items():
        if name == "tstamp":
            struct.pack_into("=Q", raw, _CONTEXT_TSTAMP, value)
        else:
            struct.pack_into("=I", raw, _CONTEXT[name], value)
    return bytes(raw)


def run(fd: int, frame: bytes, **fields: int) -> Outcome:
    """Run a program once on a frame."""
    done = bpf.run_program(fd, frame, context=context(**fields))
    return Outcome(
        done.returned,
        struct.unpack_from("=I", done.context, _CONTEXT["priority"])[0],
        struct.unpack_from("=I", done.context, _CONTEXT["mark"])[0],
        done.data,
        struct.unpack_from("=5I", done.context, _CONTEXT["cb0"]),
        struct.unpack_from("=Q", done.context, _CONTEXT_TSTAMP)[0],
    )


def make_policy(text: str = POLICY) -> Policy:
    """Return a policy on a 1 Gbit/s link."""
    return load_policy(text, "test", link_rate_bits_per_s=LINK_BITS_PER_S)


def make_entry(
    match: str,
    traffic_class: str,
    *,
    source: tuple[bytes, int] | None = None,
    destination: tuple[bytes, int] | None = None,
    expires_unix_s: float | None = None,
) -> WhitelistEntry:
    """Return a whitelist entry."""
    return WhitelistEntry(
        Match(match), traffic_class, source, destination, expires_unix_s=expires_unix_s
    )


def many_lengths() -> list[WhitelistEntry]:
    """Return prefixes of five lengths per family, around no address that tests send to or from.

    With them in the list the kernel keeps prefixes in tries, without them in hashes (fixture rig).
    """
    bases = ((frames.packed("100.64.0.0"), 11), (frames.packed("64:ff9b::"), 32))
    return [
        make_entry("either", "signal", destination=(base, shortest + more))
        for base, shortest in bases
        for more in range(5)
    ]


class Wrapper:
    """A program that cuts the packet and pushes VLAN tags, then runs another (bpf-facts 2.6).

    cb[0] = bytes that stay (0 = all), cb[1] and cb[2] = TPIDs pushed one after the other
    (0 = none), so that the last one lies in the metadata and the one before in the bytes.
    """

    FAILED = -99

    def __init__(self) -> None:
        self._programs = bpf.create_map("t_jump", bpf.MapShape(3, 4, 4, 1, 0))
        self.fd, _ = bpf.load_program("t_wrapper", self._code())

    def _code(self) -> bytes:
        def op(code: int, registers: int = 0, offset: int = 0, immediate: int = 0) -> bytes:
            return struct.pack("=BBhi", code, registers, offset, immediate)

        cb = _CONTEXT["cb0"]
        out = [op(0xBF, 0x16)]  # r6 = r1
        out += [op(0x61, 0x67 + n, cb + 4 * n) for n in range(3)]  # r7, r8, r9 = cb[0..2]
        # if r7 == 0 skip; bpf_skb_change_tail(r6, r7, 0); if r0 != 0 fail
        out += [op(0x15, 0x07, 5), op(0xBF, 0x61), op(0xBF, 0x72), op(0xB7, 0x03)]
        out += [op(0x85, 0, 0, 38), op(0x55, 0x00, 19)]
        for register, fail in ((8, 12), (9, 5)):
            # if r == 0 skip; bpf_skb_vlan_push(r6, r, 4); if r0 != 0 fail
            out += [op(0x15, register, 6), op(0xBF, 0x61), op(0xBF, register << 4 | 2)]
            out += [op(0xDC, 0x02, 0, 16), op(0xB7, 0x03, 0, 4), op(0x85, 0, 0, 18)]
            out += [op(0x55, 0x00, fail)]
        out += [op(0xBF, 0x61), op(0x18, 0x12, 0, self._programs), op(0)]
        out += [op(0xB7, 0x03), op(0x85, 0, 0, 12)]  # tail call; it returns only when it fails
        out += [op(0xB7, 0x00, 0, self.FAILED), op(0x95)]
        return b"".join(out)

    def run(
        self, program_fd: int, frame: bytes, *, cut: int = 0, push: tuple[int, ...] = ()
    ) -> Outcome:
        """Run a program on what is left of the frame."""
        bpf.update(self._programs, bytes(4), program_fd.to_bytes(4, "little"))
        first, second = (*push, 0, 0)[:2]
        done = run(self.fd, frame, cb0=cut, cb1=first, cb2=second)
        assert done.returned != self.FAILED, f"wrapper failed: cut {cut}, push {push}"
        return done

    def close(self) -> None:
        """Close the descriptors."""
        bpf.close_all([self.fd, self._programs])


class Rig:
    """Maps, programs and the calls of the engine that fill them."""

    def __init__(self, image: compiler.Image) -> None:
        self._folder = Path(f"/sys/fs/bpf/shp_test_{secrets.token_hex(4)}")
        self.maps = maps.create_pinned(self._folder)
        self._loaded: Mapping[str, compiler.LoadedProgram] = {}
        try:
            self._loaded = compiler.load_image(image, self.maps)
            self.clock = JiffiesClock()
        except BaseException:
            self._close_maps()
            raise
        self.programs = {name: p.fd for name, p in self._loaded.items()}
        self.wrapper = Wrapper()
        self.data = Datapath(self.maps, read_possible_cpus())
        self.kernel = KernelFacts(
            os.uname().release, frozenset(), read_jiffy_ns(), read_possible_cpus()
        )
        self.folder = self._folder
        self.jiffies_per_s = round(1e9 / self.kernel.jiffy_ns)
        self.policy = make_policy()
        self.tables: RuleTables = compile_rules(self.policy)
        self.apply(self.policy)

    def close(self) -> None:
        """Close every descriptor and remove the pins."""
        self.wrapper.close()
        self.clock.close()
        bpf.close_all([p.fd for p in self._loaded.values()])
        self._close_maps()

    def _close_maps(self) -> None:
        bpf.close_all(list(self.maps.values()))
        maps.remove_pins(self._folder)

    # --- filling

    def apply(
        self,
        policy: Policy | str,
        *,
        profile: Profile = Profile.HTB,
        ingress: IngressMode = IngressMode.COUNT,
        l3_only: bool = False,
        segment_limit_bytes: int = 0,
        resolve: Callable[[str], CgroupRef | None] = lambda _path: None,
        metered: bool | None = None,
        ceilings: Mapping[str, Ceilings] | None = None,
        tree: TreePlan | None = None,
        **config: int,
    ) -> None:
        """Put a policy in force from a clean state: no flows, no lists, counters as they are."""
        self.policy = make_policy(policy) if isinstance(policy, str) else policy
        self.tables = compile_rules(self.policy)
        write, levels, _ = rule_write(self.tables, resolve)
        device = DeviceFacts("none", 1, "", l3_only, 1500, 1, True, None, 65536, 65535, None)
        record = config_record(
            self.policy,
            device,
            self.kernel,
            profile=profile,
            ingress=ingress,
            segment_limit_bytes=segment_limit_bytes,
            cgroup_levels=levels,
            tree=tree,
        )
        for name, value in config.items():
            setattr(record, name, value)
        self.data.write_config(record)
        if profile is Profile.HTB:
            tree = self.tree()
        for direction in (EGRESS, INGRESS):
            for traffic_class in self.policy.classes:
                self.data.write_class(
                    direction.number,
                    traffic_class.number,
                    class_record(
                        self.policy,
                        traffic_class,
                        direction,
                        (ceilings or {}).get(traffic_class.name, _ceilings(traffic_class)),
                        kernel=self.kernel,
                        link_rate_bits_per_s=LINK_BITS_PER_S,
                        tree=tree if direction is EGRESS or ingress is IngressMode.IFB else None,
                        metered=profile is not Profile.HTB if metered is None else metered,
                    ),
                )
        self.data.replace_rules(write)
        self.data.write_control(
            dataclasses.replace(self.data.read_control(), shadow=self.policy.shadow)
        )
        self.clear()
        self.set_list(())

    def tree(self) -> TreePlan:
        """Return a tree whose leaves are 1:10 + class, twins 1:20 + class."""
        names = [c.name for c in self.policy.classes]
        return TreePlan(
            Profile.HTB,
            1,
            0x12,
            priorities={name: 0x10010 + n for n, name in enumerate(names)},
            safe_priorities={name: 0x10020 + n for n, name in enumerate(names)},
        )

    def set_list(
        self,
        entries: Iterable[WhitelistEntry],
        expiry: Callable[[float | None], int] | None = None,
    ) -> None:
        """Replace the whitelist. `expiry`: Unix seconds → jiffies, by the clock unless given."""
        numbers = {c.name: c.number for c in self.policy.classes}
        self.data.replace_lists(build_tables(entries, numbers, expiry or self.expiry))

    def expiry(self, unix_s: float | None) -> int:
        """Return Unix seconds as jiffies, 0 for None."""
        if unix_s is None:
            return 0
        return self.clock.read() + round((unix_s - time.time()) * self.jiffies_per_s)

    def add(self, entry: WhitelistEntry, *, expires_jiffies: int = 0) -> None:
        """Add one entry in place, or by a new list where the map in force has no room."""
        numbers = {c.name: c.number for c in self.policy.classes}
        self.data.add_entry(entry, numbers[entry.traffic_class], expires_jiffies)

    def clear(self) -> None:
        """Forget flows, moves, fragments, budgets, meters, inserts and manual entries."""
        hashes = ("flows4", "flows6", "moved4", "moved6", "frags", "budgets", "manual", "spared")
        for name in hashes:
            shape = maps.SHAPES[name]
            for key, _ in list(bpf.iterate(self.maps[name], shape.key_bytes, shape.value_bytes)):
                bpf.delete(self.maps[name], key)
        for slot in range(abi.SHP_METER_SLOTS):
            maps.write_array(self.maps["meters"], slot, abi.Meter())
        bpf.update(self.maps["inserts"], bytes(4), bytes(16 * self.kernel.possible_cpus))

    # --- asking

    def send(self, frame: bytes, direction: Direction = EGRESS, **fields: int) -> Outcome:
        """Run the shaping program on one frame; wire_len is the frame's length unless given."""
        return run(self.programs[_PROGRAMS[direction][0]], frame, **fields)

    def classify(
        self, frame: bytes, direction: Direction = EGRESS, **fields: int
    ) -> tuple[int, Code]:
        """Return (class, code) that the shaping program counted one frame under."""
        before = self.totals(direction)
        done = self.send(frame, direction, **fields)
        assert done.returned == UNSPEC, f"got {done.returned}, want TC_ACT_UNSPEC"
        return verdict_between(before, self.totals(direction))

    def explain(self, frame: bytes, direction: Direction = EGRESS, *, mark: int = 0) -> Answer:
        """Return what the explaining program says."""
        return self.data.explain(self.programs[_PROGRAMS[direction][1]], frame, mark=mark)

    def verdict(
        self, frame: bytes, direction: Direction = EGRESS, *, mark: int = 0
    ) -> tuple[int, Code]:
        """Return (class, code) by the explaining program."""
        answer = self.explain(frame, direction, mark=mark)
        return answer.class_number, Code(answer.code)

    def cut(
        self, frame: bytes, length: int, direction: Direction = EGRESS, *, explain: bool = False
    ) -> Outcome:
        """Run on the first `length` bytes of a frame."""
        return self.wrapper.run(self.programs[_PROGRAMS[direction][explain]], frame, cut=length)

    def pushed(self, frame: bytes, *tpids: int, direction: Direction = EGRESS) -> tuple[int, Code]:
        """Return (class, code) of a frame with tags pushed, the last one into the metadata."""
        done = self.wrapper.run(self.programs[_PROGRAMS[direction][1]], frame, push=tpids)
        return done.cb[0], Code(done.cb[1] & 0xFF)

    def totals(self, direction: Direction = EGRESS) -> dict[object, int]:
        """Return class number → packets and code → packets."""
        found: dict[object, int] = {}
        for number in range(abi.SHP_MAX_CLASSES):
            count = self.data.count(direction.number, number)
            found[number] = count.packets + count.drops
        reasons = self.data.reasons(direction.number)
        return found | {code: reasons.get(code.label, 0) for code in Code}

    def reason(self, code: Code, direction: Direction = EGRESS) -> int:
        """Return how often a code was counted."""
        return self.data.reasons(direction.number).get(code.label, 0)

    def control(self) -> Control:
        """Return the control word."""
        return self.data.read_control()

    def flow4(
        self, source: int, destination: int, protocol: int = 6, direction: Direction = EGRESS
    ) -> abi.Flow | None:
        """Return the cached flow between the usual IPv4 hosts, or None."""
        key = (
            frames.packed(frames.HOST4)
            + frames.packed(frames.PEER4)
            + struct.pack("!HHBBxx", source, destination, protocol, direction.number)
        )
        raw = bpf.lookup(self.maps["flows4"], key, 16)
        return abi.Flow.from_buffer_copy(raw) if raw is not None else None

    def entries(self, name: str) -> int:
        """Return how many entries a hash has."""
        shape = maps.SHAPES[name]
        return len(list(bpf.iterate(self.maps[name], shape.key_bytes, shape.value_bytes)))

    def wait(self, condition: Callable[[], bool], what: str, limit_s: float = 5.0) -> None:
        """Return once the condition holds."""
        end = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < end, f"{what}: not within {limit_s} s"

    def next_jiffy(self) -> None:
        """Return when the clock has ticked."""
        now = self.clock.read()
        self.wait(lambda: self.clock.read() > now, "next jiffy")


def _ceilings(traffic_class: TrafficClass) -> Ceilings:
    return Ceilings(traffic_class.ceiling_bits_per_s, traffic_class.safe_ceiling_bits_per_s)


def verdict_between(before: Mapping[object, int], after: Mapping[object, int]) -> tuple[int, Code]:
    """Return (class, code) of the one packet between two totals; notes are left out."""
    grown = [key for key, value in after.items() if value != before[key]]
    classes = [key for key in grown if not isinstance(key, Code)]
    codes = [key for key in grown if isinstance(key, Code) and not key.is_note]
    assert len(classes) == 1, f"got classes {classes} counted, want one"
    assert len(codes) == 1, f"got codes {codes} counted, want one"
    number = classes[0]
    assert isinstance(number, int)
    return number, codes[0]


def flow_word(flow: abi.Flow) -> tuple[int, Code, int]:
    """Return class, code and reference of a cached flow."""
    word = flow.word
    return word & 0xF, Code(16 + (word >> 4 & 0xF)), word >> 8 & 0xFFF
