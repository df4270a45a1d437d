# SPDX-License-Identifier: Apache-2.0
"""Compare `bpf/abi.h` and `bpf/codes.h` with their Python mirrors, by clang's record layouts.

Needs no privilege. `make test` repeats it with the BTF of the loaded program.
"""

from __future__ import annotations

import ctypes
import importlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from shapeagent.kernel.source import source_dir
from shapeagent.model.codes import CODE_FIRST, CODE_SLOTS, Code
from tests.check.check_c import clang

# abi.h includes nothing; these are the kernel's fixed-width types.
_TYPES = """\
typedef unsigned char __u8; typedef unsigned short __u16;
typedef unsigned int __u32; typedef unsigned long long __u64;
"""
_SIZES = {"__u8": 1, "__u16": 2, "__u32": 4, "__u64": 8}
_STRUCT = re.compile(r"^struct\s+(shp_\w+)\s*\{", re.MULTILINE)
_DEFINE = re.compile(r"^#define[ \t]+(SHP_\w+)[ \t]+(\S.*?)[ \t]*(?:/\*.*)?$", re.MULTILINE)
_FIELD = re.compile(r"^\s*(\d+) \|   (\w+)\s?(?:\[(\d+)\])? (\w+)$")
_TOTAL = re.compile(r"^\s*\| \[sizeof=(\d+), align=(\d+)\]")


@dataclass(frozen=True, slots=True)
class Layout:
    """Size of a struct and its fields as name: (offset, size), all in bytes."""

    size: int
    fields: Mapping[str, tuple[int, int]]


def c_layouts(header: Path) -> dict[str, Layout]:
    """Return the layout that clang gives each `struct shp_*` of `header`."""
    names = _STRUCT.findall(header.read_text(encoding="utf-8"))
    uses = "\n".join(f"int use_{name}[sizeof(struct {name})];" for name in names)
    dump = _clang(
        f'{_TYPES}#include "{header}"\n{uses}\n',
        "-fsyntax-only",
        "-Xclang",
        "-fdump-record-layouts",
    )
    layouts: dict[str, Layout] = {}
    name = ""
    fields: dict[str, tuple[int, int]] = {}
    for line in dump.splitlines():
        if match := re.match(r"^\s*0 \| struct (\w+)$", line):
            name, fields = match[1], {}
        elif match := _FIELD.match(line):
            offset, kind, count, field = match.groups()
            fields[field] = (int(offset), _SIZES[kind] * int(count or 1))
        elif (match := _TOTAL.match(line)) and name:
            layouts[name] = Layout(int(match[1]), fields)
            name = ""
        elif name and "|" in line:
            sys.exit(f"struct {name}: cannot read {line!r}")
    if missing := set(names) - set(layouts):
        sys.exit(f"clang shows no layout of {', '.join(sorted(missing))}")
    return layouts


def c_constants(*headers: Path) -> dict[str, int]:
    """Return each `#define SHP_* value` of the headers, as the compiler evaluates it."""
    names = [
        name for path in headers for name, _ in _DEFINE.findall(path.read_text(encoding="utf-8"))
    ]
    includes = "".join(f'#include "{path}"\n' for path in headers)
    enums = "".join(f"long long value_{name} = {name};\n" for name in names)
    dump = _clang(f"{_TYPES}{includes}{enums}", "-S", "-emit-llvm", "-O0", "-o", "-")
    return {
        name: int(value)
        for name, value in re.findall(r"^@value_(\w+) = .*?global i64 (-?\d+)", dump, re.MULTILINE)
    }


def python_layouts(abi: ModuleType) -> dict[str, Layout]:
    """Return the layout of each ctypes mirror in `abi`, by its C name."""
    layouts = {}
    for mirror in vars(abi).values():
        if not (isinstance(mirror, type) and issubclass(mirror, ctypes.Structure)):
            continue
        c_name = mirror.__dict__.get("_c_name_")
        if not c_name:  # a base class
            continue
        fields = {}
        for entry in getattr(mirror, "_fields_", ()):
            descriptor = getattr(mirror, entry[0])
            fields[entry[0].rstrip("_")] = (descriptor.offset, descriptor.size)
        layouts[c_name] = Layout(ctypes.sizeof(mirror), fields)
    return layouts


def differences(c: Mapping[str, Layout], python: Mapping[str, Layout]) -> list[str]:
    """Return what differs between the two sides, in words; nothing if they agree."""
    found = [f"struct {name}: has no mirror in Python" for name in c.keys() - python.keys()]
    found += [f"struct {name}: is not in C" for name in python.keys() - c.keys()]
    for name in c.keys() & python.keys():
        if c[name].size != python[name].size:
            found.append(f"struct {name}: C {c[name].size} bytes, Python {python[name].size}")
        for field in sorted({*c[name].fields, *python[name].fields}):
            here, there = c[name].fields.get(field), python[name].fields.get(field)
            if here != there:
                found.append(f"{name}.{field}: C (offset, size) {here}, Python {there}")
    return sorted(found)


def constant_differences(c: Mapping[str, int], abi: ModuleType) -> list[str]:
    """Return the constants of `abi` and the codes that do not agree with the C side."""
    found = []
    for name, value in vars(abi).items():
        if not name.startswith("SHP_") or not isinstance(value, int):
            continue
        if name not in c:
            found.append(f"{name}: is not in C")
        elif c[name] != value:
            found.append(f"{name}: C {c[name]}, Python {value}")
    codes = {
        re.sub(r"^SHP_[VND]_", "", name): value
        for name, value in c.items()
        if re.match(r"SHP_[VND]_", name)
    }
    mirror = {code.name: int(code) for code in Code}
    found += [
        f"code {name}: C {codes.get(name)}, Python {mirror.get(name)}"
        for name in sorted({*codes, *mirror})
        if codes.get(name) != mirror.get(name)
    ]
    for name, value in (("SHP_CODE_FIRST", CODE_FIRST), ("SHP_CODE_SLOTS", CODE_SLOTS)):
        if c.get(name) != value:
            found.append(f"{name}: C {c.get(name)}, Python {value}")
    labels = [code.label for code in Code]
    found += [f"label {label!r} is used twice" for label in set(labels) if labels.count(label) > 1]
    return found


def _clang(text: str, *flags: str) -> str:
    with tempfile.TemporaryDirectory(prefix="shapectl-check-") as folder:
        path = Path(folder) / "abi.c"
        path.write_text(text, encoding="utf-8")
        command = [clang(), "-target", "bpf", "-Wall", "-Wpadded", "-Werror", *flags, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def main() -> int:
    """Print the differences; return the exit status."""
    bpf = source_dir()
    abi = importlib.import_module("shapeagent.kernel.abi")
    layouts = c_layouts(bpf / "abi.h")
    found = differences(layouts, python_layouts(abi))
    found += constant_differences(c_constants(bpf / "abi.h", bpf / "codes.h"), abi)
    for line in found:
        sys.stderr.write(f"{line}\n")
    if not found:
        sys.stdout.write(f"{len(layouts)} structs and {len(Code)} codes agree\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
