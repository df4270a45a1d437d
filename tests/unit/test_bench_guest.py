# SPDX-License-Identifier: Apache-2.0
"""The guest's root file system, and what a run in virtual time plans and leaves behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shapeagent.lab.bench import guest
from shapeagent.lab.bench.catalog import headline_cells
from shapeagent.lab.bench.virtual import cost_s, estimate_s, spread_cells, sweep_folders
from shapeagent.lab.vm import KernelImage
from shapeagent.model.errors import UnsupportedError

ROOT = Path(__file__).parents[2]


def unpack(archive: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return name → (mode, mtime, data), read by the format's own rules."""
    raw, at = archive.read_bytes(), 0
    found: dict[str, tuple[int, int, bytes]] = {}
    while True:
        assert raw[at : at + 6] == b"070701", f"got {raw[at : at + 6]!r} at {at}, want a header"
        fields = [int(raw[at + 6 + 8 * n : at + 14 + 8 * n], 16) for n in range(13)]
        mode, mtime, size, name_size = fields[1], fields[5], fields[6], fields[11]
        name = raw[at + 110 : at + 110 + name_size - 1].decode()
        at += (110 + name_size + 3) & ~3
        data = raw[at : at + size]
        at += (size + 3) & ~3
        if name == "TRAILER!!!":
            return found
        found[name] = (mode, mtime, data)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, int, bytes]]:
    """Give the content of an initrd of this checkout."""
    if shutil.which("busybox") is None or shutil.which("tc") is None:
        pytest.skip("no busybox or no tc here (sudo make setup-vm)")
    folder = tmp_path_factory.mktemp("initrd")
    (folder / "images").mkdir()
    (folder / "images" / "digest.json").write_text("{}")
    kernel = KernelImage("0.0", "0.0.0-none", Path("/nowhere"), Path("/no/lib/modules/0.0.0-none"))
    guest.build_initrd(folder / "initrd", kernel, ROOT, images=folder / "images")
    return unpack(folder / "initrd")


def test_folders_come_before_what_is_in_them(files: dict[str, tuple[int, int, bytes]]) -> None:
    seen: set[str] = set()
    for name in files:
        above = name.rpartition("/")[0]
        assert not above or above in seen, f"got {name} before {above}"
        seen.add(name)


def test_sources_and_classifier_travel(files: dict[str, tuple[int, int, bytes]]) -> None:
    want = ROOT / "bpf" / "classifier.c"
    assert files["opt/shapectl/agent/shapeagent/bpf/classifier.c"][2] == want.read_bytes()
    assert "opt/shapectl/ctl/shapectl/commands/bench.py" in files
    assert "var/cache/shapectl/images/digest.json" in files
    assert files["init"][0] & 0o111, f"got mode {files['init'][0]:o}, want it executable"


def test_times_of_sources_are_kept_for_their_compiled_files(
    files: dict[str, tuple[int, int, bytes]],
) -> None:
    source = Path("/usr/lib/python3.11/json/__init__.py")
    if not source.exists():
        pytest.skip(f"no {source} here")
    assert files[str(source)[1:]][1] == int(source.stat().st_mtime)


def test_every_library_of_the_programs_is_there(files: dict[str, tuple[int, int, bytes]]) -> None:
    tc = shutil.which("tc")
    assert tc is not None
    done = subprocess.run(["ldd", tc], capture_output=True, text=True, check=True)
    names = [word for word in done.stdout.split() if word.startswith("/")]
    assert names, f"got {done.stdout}, want libraries"
    missing = [name for name in names if name[1:] not in files]
    assert not missing, f"got no {missing} in the guest"


def test_missing_program_is_named(tmp_path: Path) -> None:
    if shutil.which("busybox") is None:
        pytest.skip("no busybox here (sudo make setup-vm)")
    kernel = KernelImage("0.0", "0.0.0-none", Path("/nowhere"), Path("/no/lib/modules/0.0.0-none"))
    (tmp_path / "images").mkdir()
    with pytest.raises(UnsupportedError) as caught:
        guest.build_initrd(
            tmp_path / "initrd", kernel, ROOT, images=tmp_path / "images",
            programs=["no-such-program"],
        )  # fmt: skip
    assert caught.value.reference == "tool-missing"


def test_machines_get_about_the_same_and_all_of_it() -> None:
    cells = headline_cells()
    shares = spread_cells(cells, 2)
    assert sorted(cell.key for share in shares for cell in share) == sorted(c.key for c in cells)
    loads = [sum(map(cost_s, share)) for share in shares]
    assert max(loads) - min(loads) <= max(map(cost_s, cells)), f"got {loads}"
    assert spread_cells(cells[:1], 2) == [list(cells[:1])], "got a machine with nothing to do"


def test_headline_is_planned_to_take_under_40_minutes() -> None:
    got = estimate_s(headline_cells())
    assert got < 40 * 60, f"got {got:.0f} s"


def test_only_folders_of_runs_that_ended_are_swept(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    dead = tmp_path / f"shapectl-bench-{child.pid}-abc"
    alive = tmp_path / f"shapectl-bench-{os.getpid()}-abc"
    other = tmp_path / "shapectl-bench-notes"
    for path in (dead, alive, other):
        path.mkdir()
    (tmp_path / f"shapectl-bench-{child.pid}-link").symlink_to(other)
    assert sweep_folders(tmp_path) == [dead]
    assert alive.exists()
    assert other.exists()
