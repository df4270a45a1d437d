# SPDX-License-Identifier: Apache-2.0
"""What the kernel says about the loaded programs: layouts, size, licence to be replaced."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import pytest

from shapeagent.kernel import abi, bpf, maps
from shapeagent.kernel.compile import find_image
from shapeagent.model.codes import CODE_SLOTS, Code
from shapeagent.model.errors import UnsupportedError
from tests.bpf.kit import Rig
from tests.check.check_abi import Layout, differences, python_layouts

MAX_VERIFIED_INSTRUCTIONS = 20_000
_BUILD = Path(__file__).parents[2] / "build"

# Kinds of the BTF format (include/uapi/linux/btf.h) and what follows each struct btf_type.
_INT, _PTR, _ARRAY, _STRUCT, _TYPEDEF = 1, 2, 3, 4, 8
_EXTRA = {1: 4, 3: 12, 14: 4, 17: 4}
_PER_MEMBER = {4: 12, 5: 12, 6: 8, 13: 8, 15: 12, 19: 12}
_QUALIFIERS = (_TYPEDEF, 9, 10, 11, 18)


class Btf:
    """The types of a raw BTF blob."""

    def __init__(self, raw: bytes) -> None:
        _magic, _v, _f, head, type_at, type_bytes, text_at, text_bytes = struct.unpack_from(
            "=HBBIIIII", raw
        )
        self._text = raw[head + text_at : head + text_at + text_bytes]
        self.types: list[tuple[str, int, int, bytes]] = [("", 0, 0, b"")]
        at, end = head + type_at, head + type_at + type_bytes
        while at < end:
            name, info, size = struct.unpack_from("=III", raw, at)
            kind, count = info >> 24 & 0x1F, info & 0xFFFF
            extra = _EXTRA.get(kind, 0) + _PER_MEMBER.get(kind, 0) * count
            self.types.append((self.text(name), kind, size, raw[at + 12 : at + 12 + extra]))
            at += 12 + extra

    def text(self, offset: int) -> str:
        """Return a string of the string section."""
        return self._text[offset : self._text.index(b"\0", offset)].decode()

    def size_of(self, number: int) -> int:
        """Return the size of a type in bytes."""
        _name, kind, size, extra = self.types[number]
        if kind in _QUALIFIERS:
            return self.size_of(size)
        if kind == _ARRAY:
            element, _index, count = struct.unpack("=III", extra)
            return self.size_of(int(element)) * int(count)
        return 8 if kind == _PTR else int(size)

    def structs(self, prefix: str) -> Mapping[str, Layout]:
        """Return the layouts of the named structs."""
        found = {}
        for name, kind, size, extra in self.types:
            if kind != _STRUCT or not name.startswith(prefix):
                continue
            members = struct.iter_unpack("=III", extra)
            fields = {self.text(text): (bits // 8, self.size_of(of)) for text, of, bits in members}
            found[name] = Layout(size, fields)
        return found


@pytest.mark.parametrize("program", ["shp_egress", "shp_ingress", "shp_explain_out"])
def test_struct_layouts_in_the_loaded_btf_are_those_of_python(rig: Rig, program: str) -> None:
    facts = bpf.program_facts(rig.programs[program])
    assert facts.btf_id, f"got no BTF on {program}, want it loaded with the program"
    loaded = Btf(bpf.btf_of(facts.btf_id)).structs("shp_")
    inside = {"shp_verdict", "shp_packet"}  # the program's own, not shared
    loaded = {name: layout for name, layout in loaded.items() if name not in inside}
    mirrors = {name: m for name, m in python_layouts(abi).items() if name in loaded}
    assert differences(loaded, mirrors) == []
    # those that only keys and inner maps use may be missing from a program's BTF
    needed = {"shp_config", "shp_class", "shp_flow", "shp_flow4_key", "shp_flow6_key"}
    needed |= {"shp_count", "shp_rule", "shp_port_rules", "shp_host", "shp_listed"}
    needed |= {"shp_moved", "shp_budget", "shp_manual", "shp_lpm4", "shp_lpm6", "shp_meter"}
    assert needed <= set(loaded), f"got no {needed - set(loaded)} in BTF"


def test_every_program_stays_within_20000_verified_instructions(rig: Rig) -> None:
    got = {name: bpf.program_facts(fd).verified_instructions for name, fd in rig.programs.items()}
    print("verified instructions:", got)
    if _BUILD.is_dir():
        (_BUILD / "verified-instructions.json").write_text(json.dumps(got) + "\n")
    assert all(0 < n <= MAX_VERIFIED_INSTRUCTIONS for n in got.values()), (
        f"got {got}, want at most {MAX_VERIFIED_INSTRUCTIONS} each"
    )


def test_no_program_reads_kernel_memory() -> None:
    """C118: what a lockdown (confidentiality) forbids: probe_read and its kin."""
    probes = {4, 45, 112, 113, 114, 115}  # bpf_probe_read, _str, _user, _kernel, _user_str, …
    image, _ = find_image()
    for name, program in image.programs.items():
        code = program.instructions
        calls = {
            int.from_bytes(code[at + 4 : at + 8], "little")
            for at in range(0, len(code), 8)
            if code[at] == 0x85 and code[at + 1] >> 4 == 0  # BPF_CALL of a helper
        }
        assert calls, f"got no call of a helper in {name}, want some"
        assert not calls & probes, f"got helpers {sorted(calls & probes)} in {name}, want none"


def test_pinned_maps_have_the_shapes_that_the_next_process_expects(rig: Rig) -> None:
    opened = maps.PinnedMaps(rig.folder)
    try:
        got = {name: bpf.map_id(fd) for name, fd in opened.items()}
        want = {name: bpf.map_id(fd) for name, fd in rig.maps.items()}
        assert got == want, f"got {got}, want {want}"
    finally:
        opened.close()


def test_all_programs_use_the_same_maps_and_none_of_their_own(rig: Rig) -> None:
    ours = {bpf.map_id(fd) for fd in rig.maps.values()}
    for name, fd in rig.programs.items():
        used = set(bpf.program_facts(fd).map_ids)
        assert used <= ours, f"{name}: got foreign maps {used - ours}"


@pytest.mark.parametrize(
    ("shape", "cause"),
    [
        (bpf.MapShape(bpf.MapType.LPM_TRIE, 8, 16, 4, 0), "without BPF_F_NO_PREALLOC"),
        (bpf.MapShape(bpf.MapType.LPM_TRIE, 4, 16, 4, 1), "key without an address"),
        (bpf.MapShape(bpf.MapType.ARRAY, 8, 8, 4, 0), "array key of 8 bytes"),
        (bpf.MapShape(bpf.MapType.HASH, 4, 8, 0, 0), "no entries"),
    ],
)
def test_c68_a_map_that_the_kernel_refuses_is_named_with_its_shape(
    rig: Rig, shape: bpf.MapShape, cause: str
) -> None:
    with pytest.raises(UnsupportedError) as caught:
        bpf.create_map("t_refused", shape)
    assert caught.value.reference == "map-refused", f"{cause}: got {caught.value.reference}"
    assert "t_refused" in caught.value.message
    assert f"key_bytes={shape.key_bytes}" in caught.value.message


@pytest.mark.parametrize("key_bytes", [8, 20])
def test_c68_trie_keys_of_8_and_20_bytes_are_taken(rig: Rig, key_bytes: int) -> None:
    shape = bpf.MapShape(bpf.MapType.LPM_TRIE, key_bytes, 16, 4, bpf.F_NO_PREALLOC)
    fd = bpf.create_map("t_trie", shape)
    try:
        got = bpf.map_shape(fd)
        assert got == shape, f"got {got}, want {shape}"
    finally:
        bpf.close_all([fd])


def test_c102_per_cpu_counters_are_summed_over_all_possible_cpus(rig: Rig) -> None:
    cpus = rig.kernel.possible_cpus
    slot = CODE_SLOTS - 1
    key = slot.to_bytes(4, "little")
    each = [1 << (8 * (cpu % 7)) for cpu in range(cpus)]
    bpf.update(rig.maps["reasons"], key, struct.pack(f"={cpus}Q", *each))
    got = maps.read_percpu_u64(rig.maps["reasons"], slot, 1, cpus)[0]
    bpf.update(rig.maps["reasons"], key, bytes(8 * cpus))
    assert got == sum(each), f"got {got}, want {sum(each)}"
    fields = [[cpu * 10 + field for field in range(8)] for cpu in range(cpus)]
    key = (abi.SHP_MAX_CLASSES - 1).to_bytes(4, "little")
    bpf.update(rig.maps["counts"], key, b"".join(struct.pack("=8Q", *row) for row in fields))
    count = rig.data.count(0, abi.SHP_MAX_CLASSES - 1)
    bpf.update(rig.maps["counts"], key, bytes(64 * cpus))
    assert count.packets == sum(row[0] for row in fields)
    assert count.over_segment == sum(row[6] for row in fields)


def test_every_verdict_that_the_cache_holds_fits_its_four_bits() -> None:
    cached = [code for code in Code if code <= Code.MOVED]
    assert all(0 <= code - 16 < 16 for code in cached), f"got {cached}, want 16..31"
