# SPDX-License-Identifier: Apache-2.0
"""What is shipped: the wheel carries the kernel program, and every file its licence."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Folders that hold no source of ours.
_SKIPPED = {".git", ".venv", "build", "dist", "LICENSES", "__pycache__"}
_SOURCE_SUFFIXES = {".py", ".c", ".h", ".sh", ".toml", ".proto", ".yml", ".yaml", ".service"}
_SOURCE_NAMES = {"Makefile", "Vagrantfile", "run"}


def sources() -> list[Path]:
    """Return every source file of the checkout."""
    found = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [
            name
            for name in folders
            if name not in _SKIPPED and not name.endswith((".egg-info", "_cache"))
        ]
        here = Path(folder)
        if "data" in here.relative_to(ROOT).parts:
            continue
        found += [
            here / name
            for name in names
            if Path(name).suffix in _SOURCE_SUFFIXES or name in _SOURCE_NAMES
        ]
    return found


def test_every_source_file_names_its_licence() -> None:
    files = sources()
    assert len(files) > 20, f"got {len(files)} files, want the whole checkout"
    for path in files:
        head = "\n".join(path.read_text(encoding="utf-8").splitlines()[:3])
        name = path.relative_to(ROOT)
        # what runs in the kernel, wherever it stands, is GPL: the helpers ask for it
        want = "GPL-2.0-only" if name.parts[0] == "bpf" or path.suffix == ".c" else "Apache-2.0"
        assert "SPDX-License-Identifier: " in head, f"got no SPDX line in {name}"
        assert want in head, f"got {head!r} in {name}, want {want}"


@pytest.mark.slow
def test_wheel_installed_elsewhere_finds_the_kernel_program(tmp_path: Path) -> None:
    run = [sys.executable, "-I", "-m"]
    subprocess.run(
        [*run, "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)],
        check=True,
        capture_output=True,
        timeout=300,
    )
    (wheel,) = tmp_path.glob("shapectl-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    program = {
        f"shapeagent/bpf/{path.relative_to(ROOT / 'bpf')}"
        for path in (ROOT / "bpf").rglob("*")
        if path.is_file()
    }
    assert program <= names, f"got no {program - names} in the wheel"
    assert not {name for name in names if name.startswith("tests/")}
    (script,) = (name for name in names if name.endswith(".data/scripts/shapectl-panic-off"))
    assert zipfile.ZipFile(wheel).read(script).startswith(b"#!/bin/sh\n"), "got no shell script"

    site = tmp_path / "site"
    pip = [*run, "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run(
        [*pip, "--target", str(site), str(wheel)], check=True, capture_output=True, timeout=300
    )
    ask = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "from shapeagent.kernel.source import MAIN_FILE, flatten, source_dir\n"
        "print(source_dir()); print(len(flatten(source_dir() / MAIN_FILE)))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", ask],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    folder, size = done.stdout.split()
    assert Path(folder) == site / "shapeagent" / "bpf"
    assert int(size) > 1000
