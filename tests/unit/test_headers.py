# SPDX-License-Identifier: Apache-2.0
"""Which kernel headers are taken, and the merged tree of Debian's two parts."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from shapeagent.kernel.headers import find_kernel_headers, header_package
from shapeagent.model.errors import UnsupportedError


class Host:
    """A host's header folders under a temporary root."""

    def __init__(self, root: Path) -> None:
        self.modules = root / "modules"
        self.src = root / "src"
        self.cache = root / "cache"
        self.modules.mkdir()
        self.src.mkdir()

    def put(self, path: str, text: str = "") -> None:
        file = self.src / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    def debian(self, version: str) -> None:
        """Install headers as Debian does: an arch tree and a common tree."""
        arch, common = f"linux-headers-{version}-amd64", f"linux-headers-{version}-common"
        self.put(f"{arch}/include/generated/autoconf.h", "arch")
        self.put(f"{arch}/include/config/auto.conf")
        self.put(f"{arch}/arch/x86/include/generated/asm/x.h")
        self.put(f"{common}/include/linux/kconfig.h", "common")
        self.put(f"{common}/include/uapi/linux/bpf.h")
        self.put(f"{common}/arch/x86/include/asm/y.h")

    def find(self, release: str = "6.18.44-odd") -> Path:
        return find_kernel_headers(
            release=release, modules_dir=self.modules, src_dir=self.src, cache_dir=self.cache
        )


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.delenv("BCC_KERNEL_SOURCE", raising=False)
    return Host(tmp_path)


def test_split_tree_is_merged_in_the_cache_and_reused(host: Host) -> None:
    host.debian("6.1.0-57")
    tree = host.find()
    assert tree == host.cache / "6.1.0-57-amd64"
    for name in (
        "include/generated/autoconf.h",
        "include/linux/kconfig.h",
        "include/uapi/linux/bpf.h",
        "arch/x86/include/generated/asm/x.h",
        "arch/x86/include/asm/y.h",
    ):
        assert (tree / name).is_file(), f"got no {name}, want it in the merged tree"
    before = tree.stat().st_ino
    assert host.find().stat().st_ino == before, "got a new tree, want the cached one"
    assert [path.name for path in host.cache.iterdir()] == [tree.name], "got leftovers"


def test_tree_is_made_anew_after_its_headers_moved(host: Host) -> None:
    host.debian("6.1.0-57")
    tree = host.find()
    moved = host.src.rename(host.src.with_name("elsewhere"))
    host.src = moved
    assert host.find() == tree
    assert (tree / "include/linux/kconfig.h").read_text(encoding="utf-8") == "common"


def test_running_kernels_own_build_tree_wins(host: Host) -> None:
    host.debian("6.1.0-57")
    host.put("whole/include/linux/kconfig.h")
    host.put("whole/include/generated/autoconf.h")
    (host.modules / "6.18.44-odd").mkdir()
    (host.modules / "6.18.44-odd" / "build").symlink_to(host.src / "whole")
    assert host.find() == host.src / "whole"
    assert not host.cache.exists(), "got a cache, want none where the build tree is whole"


def test_debian_build_and_source_links_are_merged(host: Host) -> None:
    host.debian("6.1.0-57")
    folder = host.modules / "6.1.0-57-amd64"
    folder.mkdir()
    (folder / "build").symlink_to(host.src / "linux-headers-6.1.0-57-amd64")
    (folder / "source").symlink_to(host.src / "linux-headers-6.1.0-57-common")
    assert host.find("6.1.0-57-amd64") == host.cache / "6.1.0-57-amd64"


@pytest.mark.parametrize(
    ("release", "want"),
    [("6.18.44-odd", "6.12.9"), ("6.2.0", "6.1.0-57"), ("5.15.0", "6.1.0-9")],
)
def test_nearest_older_headers_are_taken_else_the_oldest_newer(
    host: Host, release: str, want: str
) -> None:
    for version in ("6.1.0-9", "6.1.0-57", "6.12.9"):
        host.debian(version)
    got = host.find(release).name
    assert got == f"{want}-amd64", f"got {got}, want {want}-amd64"


def test_half_installed_headers_are_passed_over(host: Host) -> None:
    host.debian("6.1.0-57")
    host.put("linux-headers-6.12.9-amd64/include/generated/autoconf.h")
    assert host.find().name == "6.1.0-57-amd64"


def test_no_headers_names_the_package_to_install(host: Host) -> None:
    with pytest.raises(UnsupportedError) as caught:
        host.find("6.1.0-57-amd64")
    assert caught.value.reference == "no-kernel-headers"
    assert caught.value.exit_code == 4
    assert caught.value.hint == "apt-get install linux-headers-6.1.0-57-amd64"


def test_package_of_a_kernel_without_one_is_the_distributions_newest() -> None:
    got = header_package("6.18.44-fc-v669")
    assert got.startswith("linux-headers-")
    assert "6.18" not in got, f"got {got}, want a package that exists"


def test_bcc_kernel_source_is_taken_or_refused_by_name(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.put("own/include/linux/kconfig.h")
    host.put("own/include/generated/autoconf.h")
    monkeypatch.setenv("BCC_KERNEL_SOURCE", str(host.src / "own"))
    assert host.find() == host.src / "own"
    monkeypatch.setenv("BCC_KERNEL_SOURCE", str(tmp_path / "none"))
    with pytest.raises(UnsupportedError, match="BCC_KERNEL_SOURCE=") as caught:
        host.find()
    assert caught.value.reference == "no-kernel-headers"


def test_concurrent_finders_get_one_whole_tree(host: Host) -> None:
    host.debian("6.1.0-57")
    start = threading.Barrier(8)
    found: list[bool] = []

    def find() -> None:
        start.wait(timeout=10)
        tree = host.find()
        found.append((tree / "include/linux/kconfig.h").is_file())

    threads = [threading.Thread(target=find) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert found == [True] * 8
    assert [path.name for path in host.cache.iterdir()] == ["6.1.0-57-amd64"]
