# SPDX-License-Identifier: Apache-2.0
"""Runs the tests in virtual machines, one for each kernel: `make test-vm`.

Exit status: 0 all passed; 1 a test failed, or none was executed; 2 usage; 3 a machine was lost
(no exit status came back, or not in time); 4 the kernel complained about itself; else the exit
code of the error that is named.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from shapeagent.lab.vm import SERIES, KernelImage, Vm, VmLostError, VmSpec, find_kernels
from shapeagent.model.errors import ShapeError
from tests.vm.report import Counts, read_report, sum_counts

TREE = Path(__file__).resolve().parents[2]
REPORTS = TREE / "build" / "vm"
SUITES = ("tests/bpf", "tests/netns")
NOT_IN_VM = "not perf and not host"
# Virtual time costs an emulated CPU 2.5 times as much (measured: 29 tests, kernel 6.1). It is for
# what looks at rates and times; the rest waits for conditions, as in Vagrant, on the real clock.
TIMED = "(rates or vm or slow or bpf)"
SMOKE = "tests/netns/test_vm_*.py"
# Needs two CPUs, with which 6.1 hangs at boot in virtual time: a machine of its own, real clock.
TWO_CPUS = "tests/netns/test_vm_cpus.py"
# Needs a kernel that is locked down from its start: the machine with two CPUs is that too.
LOCKED_DOWN = "tests/netns/test_vm_lockdown.py"
LOCKDOWN = ("lockdown=confidentiality",)
SMOKE_DEADLINE_S, DEADLINE_S = 1200.0, 5400.0
EXIT_OK, EXIT_FAILED, EXIT_LOST, EXIT_SPLAT = 0, 1, 3, 4


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one machine gave back; `counts` is None where there is no report."""

    series: str
    release: str
    counts: Counts | None
    rc: int | None
    splats: tuple[str, ...]
    wall_s: float
    error: VmLostError | None

    @property
    def exit_status(self) -> int:
        """Return what this machine alone would end the run with."""
        if self.error is not None:
            return EXIT_LOST
        if self.rc != 0 or self.counts is None or not self.counts.passed:
            return EXIT_FAILED
        return EXIT_SPLAT if self.splats else EXIT_OK

    def summary(self) -> str:
        """Return the one line for a person."""
        words = [f"kernel {self.release}:"]
        if self.error is not None:
            words.append(f"LOST ({self.error.reference}),")
        counts = self.counts
        if counts is None:
            words.append("no report,")
        else:
            words.append(
                f"{counts.passed} passed, {counts.failed + counts.errors} failed, "
                f"{counts.skipped} skipped,"
            )
        words.append(f"{self.wall_s:.0f} s, {len(self.splats)} splats")
        return " ".join(words)


def pytest_argv(tests: str) -> list[str]:
    """Return pytest's words for a choice of tests: `smoke`, paths, or an expression."""
    if tests == "smoke":
        return [*(str(path.relative_to(TREE)) for path in sorted(TREE.glob(SMOKE))), "-m", "smoke"]
    words = tests.split()
    if all((TREE / word.split("::", 1)[0]).exists() for word in words):
        return [*words, "-m", NOT_IN_VM]
    return [*SUITES, "-m", NOT_IN_VM, "-k", tests]


def guest_argv(words: Sequence[str], share: Path, more: Sequence[str]) -> list[str]:
    """Return the command that runs in the guest."""
    return [
        *(str(TREE / ".venv/bin/python"), "-m", "pytest", "-p", "no:cacheprovider"),
        *("--color=no", "--durations=15", f"--junitxml={share / 'report.xml'}"),
        *words,
        *more,
    ]


@dataclass(frozen=True, slots=True)
class Part:
    """What one machine runs."""

    name: str
    words: tuple[str, ...]
    cpus: int
    virtual_time: bool
    kernel_words: tuple[str, ...] = ()


def parts_of(tests: str, args: argparse.Namespace) -> list[Part]:
    """Return the machines that each kernel needs for a choice of tests, as `Part`s."""
    words = [] if tests == "all" else pytest_argv(tests)
    alone = words[:1] == [TWO_CPUS]
    cpus = args.cpus or (2 if alone else 1)
    virtual_time = (args.clock or ("real" if cpus > 1 else "virtual")) == "virtual"
    if tests != "all":
        kernel_words = LOCKDOWN if words[:1] == [LOCKED_DOWN] else ()
        return [Part("", tuple(words), cpus, virtual_time, kernel_words)]
    elsewhere = (f"--ignore={TWO_CPUS}", f"--ignore={LOCKED_DOWN}")
    timed = ("-m", f"{NOT_IN_VM} and {TIMED}", *elsewhere)
    rest = ("-m", f"{NOT_IN_VM} and not {TIMED}", *elsewhere)
    return [
        Part("", (*SUITES, *timed), cpus, virtual_time),
        Part("real-clock", (*SUITES, *rest), cpus, virtual_time=False),
        Part("two-cpus", (TWO_CPUS, LOCKED_DOWN, "-m", "vm"), 2, False, LOCKDOWN),
    ]


def run_all(series: Sequence[str], tests: str, args: argparse.Namespace) -> list[Outcome]:
    """Return the outcome for each kernel, in order; `args.at_once` machines run at a time."""
    kernels = find_kernels(series)
    parts = parts_of(tests, args)
    todo = [(kernel, part) for part in parts for kernel in kernels]
    outcomes = []
    for begin in range(0, len(todo), args.at_once):
        with ExitStack() as stack:
            machines = [
                stack.enter_context(_machine(kernel, part, args))
                for kernel, part in todo[begin : begin + args.at_once]
            ]
            outcomes += [_outcome_of(machine) for machine in machines]
    return [merge([one for one in outcomes if one.series == kernel.series]) for kernel in kernels]


def _machine(kernel: KernelImage, part: Part, args: argparse.Namespace) -> Vm:
    """Return the machine that runs a part of the tests under one kernel; it is not started."""
    name = "-".join(word for word in (kernel.series, part.name) if word)
    share = REPORTS / name
    (share / "report.xml").unlink(missing_ok=True)
    spec = VmSpec(
        kernel,
        TREE,
        cpus=part.cpus,
        memory_mb=args.memory,
        virtual_time=part.virtual_time,
        deadline_s=args.deadline,
        kernel_words=part.kernel_words,
    )

    def show(line: str) -> None:
        print(f"[{name}] {line}", flush=True)

    return Vm(spec, guest_argv(part.words, share, args.pytest), share, on_output=show)


def _outcome_of(machine: Vm) -> Outcome:
    kernel = machine.spec.kernel
    rc, error = None, None
    try:
        rc = machine.wait().rc
    except VmLostError as lost:
        error = lost
    return Outcome(
        series=kernel.series,
        release=kernel.release,
        counts=read_report(machine.share / "report.xml"),
        rc=rc,
        splats=machine.splats(),
        wall_s=machine.age_s(),
        error=error,
    )


def merge(outcomes: Sequence[Outcome]) -> Outcome:
    """Return one outcome for the machines of one kernel; a part without report leaves none."""
    first = outcomes[0]
    counts = [one.counts for one in outcomes]
    return Outcome(
        series=first.series,
        release=first.release,
        counts=sum_counts([one for one in counts if one]) if all(counts) else None,
        rc=next((one.rc for one in outcomes if one.rc != 0), 0),
        splats=tuple(line for one in outcomes for line in one.splats),
        wall_s=sum(one.wall_s for one in outcomes),
        error=next((one.error for one in outcomes if one.error), None),
    )


def main() -> int:
    """Run and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernel", action="append", metavar="SERIES", help="6.1 or 6.12; both")
    parser.add_argument("--tests", default="all", help="all, smoke, paths, or a -k expression")
    parser.add_argument("--cpus", type=int, help="of each guest; 1, where the tests need no more")
    parser.add_argument("--memory", type=int, default=2560, help="MB for each guest")
    parser.add_argument("--clock", choices=("virtual", "real"), help="virtual on one CPU")
    parser.add_argument("--at-once", type=int, default=2, metavar="N", help="machines at a time")
    parser.add_argument("--deadline", type=float, metavar="SECONDS")
    parser.add_argument("pytest", nargs="*", help="more words for pytest, after --")
    args = parser.parse_args()
    if args.deadline is None:
        args.deadline = SMOKE_DEADLINE_S if args.tests == "smoke" else DEADLINE_S
    try:
        outcomes = run_all(args.kernel or SERIES, args.tests, args)
    except ShapeError as error:
        _print_error(error)
        return error.exit_code
    for outcome in outcomes:
        if outcome.error is not None:
            _print_error(outcome.error)
        for line in outcome.splats:
            print(f"[{outcome.series}] kernel: {line}", file=sys.stderr)
    print(f"reports: {REPORTS}/<kernel>/report.xml, console.log, output.log")
    for outcome in outcomes:
        print(outcome.summary())
    return worst(outcome.exit_status for outcome in outcomes)


def worst(statuses: Iterable[int]) -> int:
    """Return the status of a run of several machines: a lost one weighs most, then a failure."""
    found = set(statuses)
    ranked = (EXIT_LOST, EXIT_FAILED, EXIT_SPLAT, *sorted(found, reverse=True))
    return next(status for status in ranked if status in found)


def _print_error(error: ShapeError) -> None:
    print(f"error: {error.reference}\n{error.message}", file=sys.stderr)
    for line in error.details:
        print(f"  {line}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
