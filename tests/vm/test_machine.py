# SPDX-License-Identifier: Apache-2.0
"""Machines that hang, die or are abandoned: a named error, and no part of them stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shapeagent.lab.vm import SERIES as SERIES_OF_ALL
from shapeagent.lab.vm import KernelImage, VmLostError, VmSpec, boot, find_kernel
from shapeagent.model.errors import ShapeError

TREE = Path(__file__).resolve().parents[2]
SERIES = "6.12"


@pytest.fixture
def kernel() -> KernelImage:
    if os.geteuid() != 0:
        pytest.skip("needs root: the guest sees the host's files as root")
    try:
        return find_kernel(SERIES)
    except ShapeError as error:
        pytest.skip(f"{error.message} {error.hint}")


@pytest.fixture
def small_tree(tmp_path: Path) -> Path:
    """Give a tree that is packed at once."""
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "hello").write_text("hello from the tree\n")
    return tree


def processes_of(share: Path) -> list[str]:
    """Return the command lines that name a machine's folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(share) in words and "qemu" in words:
            found.append(words[:120])
    return found


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"got no end of waiting, want {what}"
        signal.sigtimedwait([], 0.05)


def test_a_machine_past_its_deadline_is_ended_and_named(
    kernel: KernelImage, small_tree: Path, tmp_path: Path
) -> None:
    share = tmp_path / "share"
    spec = VmSpec(kernel, small_tree, memory_mb=512, deadline_s=2.0)
    begin_s = time.monotonic()
    with pytest.raises(VmLostError) as caught:
        boot(spec, ["sleep", "1000000"], share)
    took_s = time.monotonic() - begin_s
    assert caught.value.reference == "vm-deadline", f"got {caught.value.reference}"
    assert took_s < 30, f"got {took_s:.1f} s until the end, want about 2"
    assert processes_of(share) == [], f"got {processes_of(share)}, want none left"


def test_a_machine_ends_with_the_process_that_started_it(
    kernel: KernelImage, small_tree: Path, tmp_path: Path
) -> None:
    """After kill -9, which no clean-up of ours sees."""
    share = tmp_path / "share"
    words = (
        "import sys; from pathlib import Path; from shapeagent.lab.vm import *; "
        f"boot(VmSpec(find_kernel({SERIES!r}), Path(sys.argv[1]), memory_mb=512), "
        "['sleep', '1000000'], Path(sys.argv[2]))"
    )
    child = subprocess.Popen([sys.executable, "-c", words, str(small_tree), str(share)])
    try:
        wait_for(lambda: bool(processes_of(share)), "QEMU to run")
    finally:
        child.kill()
        child.wait()
    wait_for(lambda: not processes_of(share), "QEMU to be gone")


@pytest.mark.slow
def test_a_command_brings_back_its_status_and_a_panic_does_not(
    kernel: KernelImage, small_tree: Path, tmp_path: Path
) -> None:
    share = tmp_path / "share"
    spec = VmSpec(kernel, small_tree, memory_mb=512, deadline_s=600.0)
    lines: list[str] = []
    words = "cat hello; uname -r; echo kept >$1/kept; exit 7"
    result = boot(spec, ["sh", "-c", words, "-", str(share)], share, on_output=lines.append)
    assert result.rc == 7, f"got {result.rc}, want the command's 7"
    assert lines == ["hello from the tree", kernel.release], f"got {lines}"
    assert (share / "kept").read_text() == "kept\n"
    assert result.splats == (), f"got {result.splats}, want none"
    assert not (small_tree / "kept").exists()

    with pytest.raises(VmLostError) as caught:
        boot(spec, ["sh", "-c", "echo c >/proc/sysrq-trigger"], share)
    assert caught.value.reference == "vm-lost", f"got {caught.value.reference}"
    details = caught.value.details
    panic = [line for line in details if "Kernel panic - not syncing: sysrq" in line]
    assert panic, f"got {details}, want what the kernel said last"
    assert details[-1].startswith("console: "), f"got {details[-1]}, want the console's tail"
    assert processes_of(share) == [], f"got {processes_of(share)}, want none left"


@pytest.mark.slow
@pytest.mark.parametrize("series", SERIES_OF_ALL)
def test_each_kernel_finds_its_modules(series: str, small_tree: Path, tmp_path: Path) -> None:
    """Also where the host has a folder of that name without any: that of its headers' package."""
    if os.geteuid() != 0:
        pytest.skip("needs root: the guest sees the host's files as root")
    kernel = find_kernel(series)
    spec = VmSpec(kernel, small_tree, memory_mb=512, deadline_s=600.0)
    lines: list[str] = []
    words = "modprobe --show-depends ifb && ls -d /lib/modules/$(uname -r)/kernel"
    result = boot(spec, ["sh", "-c", words], tmp_path / "share", on_output=lines.append)
    assert result.rc == 0, f"got {result.rc}: {lines}"
    assert any("ifb.ko" in line for line in lines), f"got {lines}, want the module's file"
