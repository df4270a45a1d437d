# SPDX-License-Identifier: Apache-2.0
"""The two sides of `abi.h` and `codes.h` agree, and the check would notice if not."""

from __future__ import annotations

import ctypes
from types import ModuleType

from shapeagent.kernel import abi
from shapeagent.kernel.source import source_dir
from shapeagent.model.codes import Code
from tests.check.check_abi import (
    Layout,
    c_constants,
    c_layouts,
    constant_differences,
    differences,
    python_layouts,
)


def test_every_struct_has_a_mirror_with_the_same_offsets() -> None:
    got = differences(c_layouts(source_dir() / "abi.h"), python_layouts(abi))
    assert got == [], f"got {got}, want no difference"


def test_constants_and_codes_have_the_same_numbers() -> None:
    bpf = source_dir()
    got = constant_differences(c_constants(bpf / "abi.h", bpf / "codes.h"), abi)
    assert got == [], f"got {got}, want no difference"


def test_codes_lie_outside_the_tc_actions_and_labels_are_kebab_case() -> None:
    for code in Code:
        assert 16 <= code < 64, f"got {code.name} = {int(code)}, want 16..63"
        assert code.label == code.label.lower().replace("_", "-").strip("-")


def test_check_names_a_moved_field_a_lost_struct_and_a_changed_number() -> None:
    class Moved(ctypes.Structure):
        _c_name_ = "shp_one"
        _fields_ = (("b", ctypes.c_uint32), ("a", ctypes.c_uint32))

    python = ModuleType("mirror")
    python.__dict__.update(Moved=Moved, SHP_EGRESS=7)
    c = {
        "shp_one": Layout(8, {"a": (0, 4), "b": (4, 4)}),
        "shp_two": Layout(4, {"a": (0, 4)}),
    }
    assert differences(c, python_layouts(python)) == [
        "shp_one.a: C (offset, size) (0, 4), Python (4, 4)",
        "shp_one.b: C (offset, size) (4, 4), Python (0, 4)",
        "struct shp_two: has no mirror in Python",
    ]
    bpf = source_dir()
    numbers = c_constants(bpf / "abi.h", bpf / "codes.h")
    assert constant_differences(numbers, python) == ["SHP_EGRESS: C 0, Python 7"]
    del numbers["SHP_V_PORT"]
    assert "code PORT: C None, Python 21" in constant_differences(numbers, python)
