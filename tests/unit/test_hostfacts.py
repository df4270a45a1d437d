# SPDX-License-Identifier: Apache-2.0
"""What is read of a host's files, from faked trees."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

import pytest

from shapeagent.kernel import hostfacts
from shapeagent.model.hostfacts import HostFacts, ModuleState
from tests.unit import fakehost

RELEASE = "6.12.107+deb12-amd64"


@pytest.fixture(autouse=True)
def _no_header_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BCC_KERNEL_SOURCE", raising=False)


def read(root: Path, files: dict[str, str], release: str = RELEASE) -> HostFacts:
    fakehost.write_tree(root, files)
    return hostfacts.read_host(root, release=release, python_path=[])


def test_empty_tree_is_no_fault(tmp_path: Path) -> None:
    host = hostfacts.read_host(tmp_path, release=RELEASE, python_path=[])
    assert host.header_trees == ()
    assert host.bcc.path is None
    assert host.bpffs == ""
    assert host.lockdown is None
    assert set(host.modules.values()) == {ModuleState.UNKNOWN}
    assert hostfacts.read_interfaces(tmp_path / "sys") == ()
    assert hostfacts.read_rdma(tmp_path / "sys") == ()


def test_modules_are_told_apart_without_loading_one(tmp_path: Path) -> None:
    files = fakehost.modules(
        RELEASE,
        builtin=("sch_fq_codel",),
        loaded=("cls_bpf",),
        loadable=("sch_htb", "sch_prio", "sch_fq"),
    )
    files["etc/modprobe.d/x.conf"] = "install sch_prio /bin/true\n# blacklist sch_htb"
    files["lib/modprobe.d/y.conf"] = "blacklist sch-fq"
    got = read(tmp_path, files).modules
    assert got == {
        "sch_fq_codel": ModuleState.BUILTIN,
        "cls_bpf": ModuleState.LOADED,
        "sch_htb": ModuleState.LOADABLE,
        "sch_prio": ModuleState.BLOCKED,
        "sch_fq": ModuleState.BLOCKED,
        "sch_tbf": ModuleState.ABSENT,
        "sch_ingress": ModuleState.ABSENT,
        "act_mirred": ModuleState.ABSENT,
        "ifb": ModuleState.ABSENT,
    }


def test_kernel_that_loads_no_more_modules_has_only_what_is_there(tmp_path: Path) -> None:
    files = fakehost.modules(RELEASE, loaded=("sch_htb",))
    host = read(tmp_path, {**files, "proc/sys/kernel/modules_disabled": "1"})
    assert not host.loads_modules
    assert host.modules["sch_htb"] is ModuleState.LOADED
    assert host.modules["sch_fq"] is ModuleState.BLOCKED


def test_kernel_without_modules_is_read_by_its_configuration(tmp_path: Path) -> None:
    config = "CONFIG_NET_SCH_HTB=y\n# CONFIG_NET_SCH_FQ is not set"
    host = read(tmp_path, {f"boot/config-{RELEASE}": config})
    assert host.modules["sch_htb"] is ModuleState.BUILTIN
    assert host.modules["sch_fq"] is ModuleState.ABSENT


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ("30 20 0:27 / /sys/fs/bpf rw,nosuid - bpf bpf rw,mode=700", "rw"),
        ("30 20 0:27 / /sys/fs/bpf ro,nosuid - bpf bpf rw,mode=700", "ro"),
        ("30 20 0:27 / /sys/fs/bpf rw,nosuid shared:9 - bpf bpf ro", "ro"),
        ("30 20 0:27 / /sys/fs/bpf rw - tmpfs tmpfs rw", ""),
        ("30 20 0:27 / /sys/fs/bpf/x rw - bpf bpf rw", ""),
    ],
)
def test_bpffs_is_the_last_mount_on_its_folder(tmp_path: Path, line: str, want: str) -> None:
    first = "29 20 0:26 / /sys/fs rw - bpf bpf rw\n"
    assert read(tmp_path, {"proc/self/mountinfo": first + line}).bpffs == want


def test_least_memory_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a/b",
        "sys/fs/cgroup/a/memory.max": "1000000",
        "sys/fs/cgroup/a/b/memory.max": "max",
    }
    assert read(tmp_path, files).memory_limit_bytes == 1_000_000


def test_headers_are_found_and_no_tree_is_merged(tmp_path: Path) -> None:
    src = "usr/src/linux-headers-6.1.0-57"
    files = {
        f"{src}-common/include/linux/kconfig.h": "",
        f"{src}-amd64/include/generated/autoconf.h": "",
    }
    before = sorted(tmp_path.rglob("*"))
    host = read(tmp_path, files)
    assert host.header_trees == (f"/{src}-amd64", f"/{src}-common")
    after = [path for path in tmp_path.rglob("*") if "usr" not in str(path.relative_to(tmp_path))]
    assert sorted(after) == before, "got files made by looking"


def test_bcc_is_found_without_import_and_another_program_is_told_apart(tmp_path: Path) -> None:
    fakehost.write_tree(tmp_path, fakehost.bcc())
    packages = tmp_path / "usr/lib/python3/dist-packages"
    got = hostfacts.read_bcc([str(packages)], tmp_path)
    assert (got.version, got.is_compiler, got.library_version) == ("0.26.0", True, "0.26.0")
    fakehost.write_tree(tmp_path, {"venv/bcc/__init__.py": ""})
    got = hostfacts.read_bcc([str(tmp_path / "venv"), str(packages)], tmp_path)
    assert (got.path, got.is_compiler) == ("/venv/bcc", False), "the first on the path counts"


def test_device_is_read_with_its_neighbours(tmp_path: Path) -> None:
    fakehost.mess(tmp_path)
    found = {one.name: one for one in hostfacts.read_interfaces(tmp_path / "sys", "bond0.7")}
    assert found["bond0.7"].kind == "vlan"
    assert found["bond0"].kind == "bond"
    assert found["bond0"].lowers == ("enx0123456789ab", "eth1.5")
    nic = found["enx0123456789ab"]
    assert (nic.hardware, nic.driver, nic.master) == (True, "ixgbe", "bond0")
    physical = {one.name for one in hostfacts.read_interfaces(tmp_path / "sys") if one.hardware}
    assert physical == {"enx0123456789ab", "eth1.5"}
    assert hostfacts.read_interfaces(tmp_path / "sys", "bonding_masters") == ()


def test_broken_files_are_as_good_as_missing(tmp_path: Path) -> None:
    tree = fakehost.device("eth0", 2, driver="x", mtu=1500)
    tree |= {
        "sys/class/net/eth0/mtu": "many",
        "sys/class/net/eth0/flags": "what",
        "sys/class/net/eth0/speed": "",
        "proc/self/status": "Uid:\tx",
        "proc/self/mountinfo": "x\n - \n",
        "proc/self/cgroup": "0::/../../..",
        "run/NetworkManager/devices/2": "\x00\xff",
    }
    fakehost.write_tree(tmp_path, tree)
    (one,) = hostfacts.read_interfaces(tmp_path / "sys")
    assert (one.mtu, one.up, one.speed_bits_per_s) == (0, False, None)
    host = hostfacts.read_host(tmp_path, release="odd", python_path=["", str(tmp_path)])
    assert host.missing_capabilities, "what cannot be read is not there"


def test_what_may_not_be_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read every file, so the refusal is made here."""
    plain = Path.open

    def refuse(self: Path, *arguments: Any, **options: Any) -> IO[Any]:
        if self.name == "bpf_jit_enable":
            raise PermissionError(13, "Permission denied")
        opened: IO[Any] = plain(self, *arguments, **options)
        return opened

    fakehost.write_tree(tmp_path, {"proc/sys/net/core/bpf_jit_enable": "1"})
    monkeypatch.setattr(Path, "open", refuse)
    host = hostfacts.read_host(tmp_path, release=RELEASE, python_path=[])
    assert host.jit_sysctl is None
    assert host.unseen == ("/proc/sys/net/core/bpf_jit_enable",)
