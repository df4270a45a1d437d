# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shapeagent.kernel import cgroup, probe
from shapeagent.model.errors import FailedError, InputError, PrivilegeError, UnsupportedError

# Cgroups


@pytest.fixture
def own_cgroup() -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("needs root to make a cgroup")
    folder = cgroup.find_cgroup_mount().folder / f"shp-{secrets.token_hex(4)}"
    (folder / "pod").mkdir(parents=True)
    yield folder
    for path in (folder / "pod", folder):
        if path.exists():
            path.rmdir()


def test_cgroup_has_the_inode_as_id_and_its_depth_as_level(own_cgroup: Path) -> None:
    for path, folder, level in (
        (own_cgroup.name, own_cgroup, 1),
        (f"/{own_cgroup.name}/pod/", own_cgroup / "pod", 2),
        (str(own_cgroup / "pod"), own_cgroup / "pod", 2),
    ):
        got = cgroup.resolve_cgroup(path)
        assert (got.id, got.level) == (folder.stat().st_ino, level), f"{path}: got {got}"


def test_cgroup_made_again_has_another_id(own_cgroup: Path) -> None:
    first = cgroup.resolve_cgroup(f"{own_cgroup.name}/pod")
    (own_cgroup / "pod").rmdir()
    with pytest.raises(InputError):
        cgroup.resolve_cgroup(f"{own_cgroup.name}/pod")
    (own_cgroup / "pod").mkdir()
    second = cgroup.resolve_cgroup(f"{own_cgroup.name}/pod")
    assert first.id != second.id, f"got {second.id} again"


@pytest.mark.parametrize("path", ["shp-not-there", "../..", "a/../../etc"])
def test_unknown_cgroup_is_named(path: str) -> None:
    with pytest.raises(InputError) as caught:
        cgroup.resolve_cgroup(path)
    assert caught.value.reference == "no-such-cgroup"


def test_mount_is_found_on_hybrid_and_unified_hosts(tmp_path: Path) -> None:
    mountinfo = tmp_path / "mountinfo"
    v1 = "30 25 0:26 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    mountinfo.write_text(v1 + "31 25 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n")
    got = cgroup.find_cgroup_mount(mountinfo)
    assert got == cgroup.CgroupMount(Path("/sys/fs/cgroup/unified"), 0)
    mountinfo.write_text("31 25 0:27 /a/b /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n")
    assert cgroup.find_cgroup_mount(mountinfo).root_level == 2
    mountinfo.write_text(v1)
    with pytest.raises(UnsupportedError) as caught:
        cgroup.find_cgroup_mount(mountinfo)
    assert caught.value.reference == "no-cgroup2"


# CPUs


@pytest.mark.parametrize(
    ("text", "want"), [("0-11,16-27\n", 24), ("0\n", 1), ("0-127\n", 128), ("0,2,4-5\n", 4)]
)
def test_holes_between_possible_cpus_are_not_counted(tmp_path: Path, text: str, want: int) -> None:
    path = tmp_path / "possible"
    path.write_text(text)
    got = probe.read_possible_cpus(path)
    assert got == want, f"C102: got {got}, want {want}"


def test_bad_cpu_list_is_named(tmp_path: Path) -> None:
    path = tmp_path / "possible"
    path.write_text("zero\n")
    with pytest.raises(FailedError) as caught:
        probe.read_possible_cpus(path)
    assert caught.value.reference == "bad-cpu-list"


# Privileges


@pytest.mark.parametrize(
    ("effective", "want"),
    [
        (0x1FFFFFFFFFF, ()),
        (0, ("CAP_BPF", "CAP_PERFMON", "CAP_NET_ADMIN")),
        (0x1FFFFFFFFFF & ~(1 << 12), ("CAP_NET_ADMIN",)),
        (0x1FFFFFFFFFF & ~(1 << 21), ()),
        (1 << 12 | 1 << 21, ()),  # CAP_SYS_ADMIN includes CAP_BPF and CAP_PERFMON
        (1 << 12 | 1 << 38, ("CAP_BPF",)),
    ],
)
def test_missing_capabilities_are_named(effective: int, want: tuple[str, ...]) -> None:
    got = probe.missing_capabilities(f"Name:\tx\nCapEff:\t{effective:016x}\n")
    assert got == want, f"C119: got {got}, want {want}"


def test_process_without_privileges_is_told_which(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("CapEff:\t0000000000000000\n")
    with pytest.raises(PrivilegeError) as caught:
        probe.require_privileges(status)
    assert caught.value.reference == "missing-privilege"
    assert "CAP_NET_ADMIN" in caught.value.message
    assert caught.value.exit_code == 3


# bpffs, in a mount namespace of its own


def test_bpffs_is_mounted_where_it_is_missing(tmp_path: Path) -> None:
    # F6
    if os.geteuid() != 0:
        pytest.skip("needs root to mount bpffs")
    program = (
        "import sys; from pathlib import Path; from shapeagent.kernel import probe\n"
        "folder = Path(sys.argv[1])\n"
        "print(probe.is_bpffs(folder), probe.ensure_bpffs(folder), probe.is_bpffs(folder),"
        " probe.ensure_bpffs(folder), oct(folder.stat().st_mode & 0o777))"
    )
    done = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={**os.environ, "PYTHONPATH": "agent"},
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.split() == ["False", "True", "True", "False", "0o700"], done.stderr
    assert not probe.is_bpffs(tmp_path), "it leaked out of the mount namespace"


def test_folder_that_cannot_be_mounted_on_is_named(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to mount bpffs")
    with pytest.raises(UnsupportedError) as caught:
        probe.ensure_bpffs(tmp_path / "missing")
    assert caught.value.reference == "no-bpffs"
    assert "mount -t bpf" in (caught.value.hint or "")
