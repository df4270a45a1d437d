# SPDX-License-Identifier: Apache-2.0
"""Kernels found and missing, kernel complaints, reports and their sums."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from shapeagent.lab import vm
from shapeagent.lab.vm import KernelImage, VmLostError, VmSpec, find_kernel, find_splats
from shapeagent.model.errors import ShapeError
from tests.vm.report import Counts, read_report, sum_line
from tests.vm.run import LOCKDOWN, Outcome, merge, parts_of, pytest_argv, worst

SERIES, RELEASE = "6.12", "6.12.107+deb12-amd64"


def add_kernel(root: Path, release: str, *, modules: bool = True) -> None:
    (root / "boot").mkdir(parents=True, exist_ok=True)
    (root / "boot" / f"vmlinuz-{release}").touch()
    if modules:
        folder = root / "lib/modules" / release
        folder.mkdir(parents=True)
        (folder / "modules.dep").touch()


def test_the_newest_plain_kernel_of_a_series_is_taken(tmp_path: Path) -> None:
    host, unpacked = tmp_path / "host", tmp_path / "unpacked"
    for release in ("6.12.9+deb12-amd64", "6.1.0-57-amd64", "6.12.200+deb12-cloud-amd64"):
        add_kernel(host, release)
    add_kernel(host, "6.12.201+deb12-rt-amd64")
    add_kernel(unpacked, RELEASE)
    add_kernel(unpacked, "6.12.117+deb12-amd64", modules=False)
    found = find_kernel(SERIES, [host, unpacked])
    assert found.release == RELEASE, f"got {found.release}, want {RELEASE}"
    assert found.path == unpacked / "boot" / f"vmlinuz-{RELEASE}"
    assert found.modules == unpacked / "lib/modules" / RELEASE
    assert find_kernel("6.1", [host, unpacked]).release == "6.1.0-57-amd64"


@pytest.mark.parametrize(
    ("series", "reference", "exit_code"),
    [
        ("6.12", "kernel-image-missing", 4),
        ("latest", "unknown-kernel", 2),
        ("", "unknown-kernel", 2),
    ],
)
def test_a_missing_kernel_is_named_with_the_next_command(
    tmp_path: Path, series: str, reference: str, exit_code: int
) -> None:
    with pytest.raises(ShapeError) as caught:
        find_kernel(series, [tmp_path])
    assert caught.value.reference == reference, f"got {caught.value.reference}, want {reference}"
    assert caught.value.exit_code == exit_code
    assert caught.value.hint


@pytest.fixture
def spec(tmp_path: Path) -> VmSpec:
    image = KernelImage(SERIES, RELEASE, tmp_path / "vmlinuz", tmp_path / "modules")
    return VmSpec(image, tmp_path)


def test_missing_programs_and_room_are_named(
    spec: VmSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))

    def reference_of(error_spec: VmSpec = spec) -> str:
        with pytest.raises(ShapeError) as caught:
            vm.require_host(error_spec, tmp_path)
        assert caught.value.hint, f"got no hint for {caught.value.reference}"
        return caught.value.reference

    for program, reference in (
        ("qemu-system-x86_64", "qemu-missing"),
        ("busybox", "busybox-missing"),
        ("kmod", "tool-missing"),
        ("zstd", "tool-missing"),
        ("setpriv", "tool-missing"),
        ("unshare", "tool-missing"),
    ):
        got = reference_of()
        assert got == reference, f"got {got} without {program}, want {reference}"
        (tmp_path / program).write_text("#!/bin/sh\n")
        (tmp_path / program).chmod(0o755)
    real = shutil.disk_usage
    if importlib.util.find_spec("virtme") is None:
        assert reference_of() == "vng-missing"
        monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    usage = real(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2**20))
    assert reference_of() == "no-disk-space"
    monkeypatch.setattr(shutil, "disk_usage", real)
    monkeypatch.setattr(vm, "MIN_FREE_DISK_MB", 0)
    huge = VmSpec(spec.kernel, spec.tree, memory_mb=10**9)
    assert reference_of(huge) == "no-memory"


def test_only_root_starts_machines(
    spec: VmSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ShapeError) as caught:
        vm.require_host(spec, tmp_path)
    assert (caught.value.reference, caught.value.exit_code) == ("need-root", 3)


@pytest.mark.parametrize(
    "line",
    [
        "[   12.3] WARNING: CPU: 1 PID: 88 at net/sched/sch_htb.c:321 htb_dequeue+0x1/0x2",
        "[   12.3] BUG: kernel NULL pointer dereference, address: 0000000000000008",
        "[   12.3] WARNING: possible circular locking dependency detected",
        "[  250.1] INFO: task python:432 blocked for more than 241 seconds.",
        "[   60.0] rcu: INFO: rcu_preempt self-detected stall on CPU",
        "[   60.0] watchdog: BUG: soft lockup - CPU#0 stuck for 26s! [swapper/0:0]",
        "[    3.0] Oops: 0000 [#1] PREEMPT SMP",
        "[    3.0] refcount_t: underflow; use-after-free.",
        "[    3.0] unregister_netdevice: waiting for lo to become free. Usage count = 2",
    ],
)
def test_a_complaint_of_the_kernel_is_found(line: str) -> None:
    assert find_splats(f"harmless\n{line}\nharmless") == (line,)


def test_harmless_kernel_lines_are_no_complaints() -> None:
    lines = (
        "[    0.9] amd_pstate: the _CPC object is not present in SBIOS or ACPI disabled",
        "[    1.9] Invalid ELF header magic: != ELF",
        "[    2.1] rcu: Hierarchical RCU implementation.",
        "[    2.2] debug: unmapping init memory",
        "[    2.3] ata3.00: LPM support broken, forcing max_power",
    )
    assert find_splats("\n".join(lines)) == ()


def test_the_commands_words_reach_the_guest_unchanged(spec: VmSpec, tmp_path: Path) -> None:
    argv = ["printf", "%s|", "a b", "it's", "$HOME", ""]
    share = tmp_path / "sh are"
    text = vm._command_script(spec, argv, share, {"NAME": "two words"})
    assert shlex.join(argv) in text.splitlines()
    assert "export NAME='two words'" in text
    done = subprocess.run(["sh", "-n"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"got {done.stderr}, want a script that sh can read"
    text = vm._guest_script(spec, share)
    done = subprocess.run(["sh", "-n"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"got {done.stderr}, want a script that sh can read"


# --- the runner


def outcome(**changes: object) -> Outcome:
    values: dict[str, object] = {
        "series": SERIES,
        "release": RELEASE,
        "counts": Counts(5, 0, 0, 1, 2.5),
        "rc": 0,
        "splats": (),
        "wall_s": 61.0,
        "error": None,
        **changes,
    }
    return Outcome(**values)  # type: ignore[arg-type]


def test_exit_statuses_tell_what_went_wrong() -> None:
    lost = VmLostError("vm-lost", "gone")
    cases = (
        (outcome(), 0),
        (outcome(rc=1, counts=Counts(4, 1, 0, 0, 1.0)), 1),
        (outcome(counts=Counts(0, 0, 0, 6, 1.0)), 1),
        (outcome(counts=None), 1),
        (outcome(error=lost, rc=None), 3),
        (outcome(splats=("WARNING: ",)), 4),
    )
    for one, want in cases:
        assert one.exit_status == want, f"got {one.exit_status} of {one}, want {want}"
    assert worst([0, 0]) == 0
    assert worst([4, 0]) == 4
    assert worst([1, 4]) == 1
    assert worst([0, 1, 3]) == 3


def test_the_summary_names_kernel_counts_and_splats() -> None:
    got = outcome(counts=Counts(5, 1, 1, 2, 2.5), splats=("a", "b")).summary()
    want = f"kernel {RELEASE}: 5 passed, 2 failed, 2 skipped, 61 s, 2 splats"
    assert got == want, f"got {got!r}, want {want!r}"
    lost = outcome(counts=None, error=VmLostError("vm-deadline", "late"), rc=None).summary()
    assert lost == f"kernel {RELEASE}: LOST (vm-deadline), no report, 61 s, 0 splats"


def test_the_machines_of_one_kernel_are_one_line() -> None:
    good, bad = outcome(), outcome(rc=1, counts=Counts(1, 2, 0, 0, 1.0), splats=("a",), wall_s=9.0)
    got = merge([good, bad])
    assert got.counts == Counts(6, 2, 0, 1, 3.5), f"got {got.counts}"
    assert (got.rc, got.splats, got.wall_s, got.exit_status) == (1, ("a",), 70.0, 1)
    lost = outcome(error=VmLostError("vm-lost", "gone"), rc=None, counts=None)
    assert merge([good, lost]).exit_status == 3
    assert merge([good, lost]).counts is None


def test_only_the_machine_with_two_cpus_is_locked_down() -> None:
    """C118: the tests of a lockdown run there, and nowhere else; by path, too."""
    args = argparse.Namespace(cpus=None, clock=None)
    main, rest, cpus = parts_of("all", args)
    lockdown = "tests/netns/test_vm_lockdown.py"
    for one in (main, rest):
        assert (one.kernel_words, f"--ignore={lockdown}" in one.words) == ((), True), f"got {one}"
    assert (cpus.kernel_words, lockdown in cpus.words) == (LOCKDOWN, True), f"got {cpus}"
    assert parts_of(lockdown, args)[0].kernel_words == LOCKDOWN
    assert parts_of("tests/netns/test_vm_rates.py", args)[0].kernel_words == ()


def test_every_test_runs_in_one_machine_of_a_kernel_and_rates_in_virtual_time() -> None:
    main, rest, _ = parts_of("all", argparse.Namespace(cpus=None, clock=None))
    assert (main.virtual_time, rest.virtual_time) == (True, False)
    chosen = [one.words[one.words.index("-m") + 1] for one in (main, rest)]
    assert "and (rates or " in chosen[0], f"got {chosen}"
    assert chosen[1] == chosen[0].replace("and (", "and not ("), f"got {chosen}, want the rest"


def test_a_choice_of_tests_is_paths_or_an_expression() -> None:
    assert pytest_argv("tests/unit/test_vm.py::test_x")[0] == "tests/unit/test_vm.py::test_x"
    assert pytest_argv("prio and not ifb")[-2:] == ["-k", "prio and not ifb"]
    assert "smoke" in pytest_argv("smoke")


def test_a_report_is_counted_and_half_of_one_is_none(tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    assert read_report(path) is None
    path.write_text(
        '<?xml version="1.0"?><testsuites><testsuite name="pytest" errors="1" failures="2" '
        'skipped="3" tests="10" time="12.5"></testsuite></testsuites>'
    )
    assert read_report(path) == Counts(4, 2, 1, 3, 12.5)
    path.write_text('<?xml version="1.0"?><testsuites><testsuite name="pytest"')
    assert read_report(path) is None


def test_the_closing_line_is_a_sum_in_pytests_form() -> None:
    line = "===== 1 failed, 812 passed, 3 skipped, 20 deselected in 400.12s (0:06:40) ====="
    got = sum_line(line, [Counts(4, 0, 0, 1, 10.0), Counts(3, 1, 0, 0, 20.0)])
    assert "2 failed, 819 passed, 4 skipped, 20 deselected in 430.12s" in got, f"got {got}"
    lost = sum_line("== 1 passed in 0.10s ==", [None])
    assert lost.strip("=") == " 1 passed, 1 error in 0.10s ", f"got {lost}"
