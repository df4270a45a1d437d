# SPDX-License-Identifier: Apache-2.0
"""Cells in virtual time: spread over machines, restartable, with an estimate of the time left."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from shapeagent.kernel.compile import find_image, image_path
from shapeagent.kernel.processes import process_start_ticks
from shapeagent.kernel.signals import InterruptGuard
from shapeagent.lab.bench.catalog import IDLE, Cell
from shapeagent.lab.bench.guest import Guest, build_initrd
from shapeagent.lab.vm import KernelImage, find_kernel
from shapeagent.model.errors import FailedError

MACHINES = 2
# Seconds of one CPU of a 2-core EPYC machine: to boot, for a cell's processes, for a second of
# guest time, and for a thousand frames.
BOOT_S = 15.0
CELL_S = 11.0
GUEST_S = 1.2
KILOFRAME_S = 0.21
CELL_DEADLINE_S = 1_200.0
POLL_S = 0.5
_FOLDER_PREFIX = "shapectl-bench-"
CURVES_MEMORY_MB = 4608
CURVES_DEADLINE_S = 5_400.0
ETCD_PROGRAMS = ("etcd",)


def cost_s(cell: Cell) -> float:
    """Return about how many CPU seconds of the host a cell takes."""
    frames = 0.0 if cell.queue == IDLE else cell.link_bits_per_s / 8_000 / cell.mtu
    return CELL_S + (cell.warm_up_s + cell.duration_s) * (GUEST_S + KILOFRAME_S * frames)


def spread_cells(cells: Sequence[Cell], machines: int) -> list[list[Cell]]:
    """Return one list of cells per machine, in order, all about equally long."""
    shares: list[list[Cell]] = [[] for _ in range(machines)]
    loads = [0.0] * machines
    for cell in cells:
        number = loads.index(min(loads))
        shares[number].append(cell)
        loads[number] += cost_s(cell)
    return [share for share in shares if share]


def estimate_s(cells: Sequence[Cell], machines: int = MACHINES) -> float:
    """Return about how many seconds the cells take on a 2-core machine that has nothing to do."""
    shares = spread_cells(cells, machines)
    return BOOT_S + max((sum(map(cost_s, share)) for share in shares), default=0.0)


def run_virtual(
    cells: Sequence[Cell],
    *,
    series: str,
    tree: Path,
    samples_dir: Path,
    on_row: Callable[[dict[str, Any]], None],
    progress: Callable[[str], None],
    machines: int = MACHINES,
) -> None:
    """Run the cells in machines with a kernel of `series`; `on_row` gets each row as it comes.

    Args:
        tree: the checkout whose code runs in the guest.
        samples_dir: gets the samples of each row, and after a failure keeps what the
            machines said.

    Raises, after the other cells have run:
        UnsupportedError: no QEMU, no kernel image (qemu-missing, kernel-image-missing).
        FailedError: cells failed (bench-cell-failed, bench-guest-failed), or the kernel
            complained (vm-splat).
        VmLostError: a machine went away or hung (vm-lost, vm-deadline).

    Effects: machines and a temporary folder, both gone on return.
    """
    programs = ETCD_PROGRAMS if any(cell.scenario == "lease-storm" for cell in cells) else ()
    shares = samples_dir / "machines"
    shutil.rmtree(shares, ignore_errors=True)
    with (
        _packed(series, tree, programs, progress) as (kernel, initrd),
        contextlib.ExitStack() as stack,
    ):
        running = []
        for number, share in enumerate(spread_cells(cells, machines)):
            where = shares / str(number)
            where.mkdir(parents=True)
            (where / "cells.json").write_text(
                json.dumps([dataclasses.asdict(cell) for cell in share])
            )
            words = ["python3", "-m", "shapectl", "bench", "cells"]
            words += ["/share/cells.json", "/share/rows.jsonl", "--clock", "virtual"]
            words += ["--keep-samples", "/share/samples"]
            guest = stack.enter_context(Guest(kernel, initrd, where, f"exec {shlex.join(words)}\n"))
            running.append(_Machine(guest, where, share))
        lost: list[FailedError] = []
        while any(machine.alive for machine in running):
            time.sleep(POLL_S)
            for machine in running:
                try:
                    for row in machine.poll(samples_dir):
                        on_row(row)
                except FailedError as error:
                    lost.append(error)
                    progress(f"a machine was lost ({error.reference}); the others go on")
        if lost:
            raise lost[0]
        failed = [one for machine in running for one in machine.failed]
        if failed:
            raise FailedError(
                "bench-cell-failed",
                f"{len(failed)} of {len(cells)} cells failed: "
                f"{', '.join(one['key'] for one in failed)}.",
                details=failed[0]["failed"],
                hint="The other rows are kept; --resume runs what is missing.",
            )
    shutil.rmtree(shares)


def run_curves_virtual(
    *, series: str, tree: Path, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Return the scale curves of a machine in virtual time, as `curves.run_curves` does.

    Raises: as `run_virtual`; FailedError (bench-curves-failed).

    Effects: a machine and a temporary folder, both gone on return.
    """
    with _packed(series, tree, (), progress) as (kernel, initrd):
        where = initrd.parent / "share"
        command = (
            "exec python3 -m shapectl -v bench curves --here virtual --output /share/out.json\n"
        )
        with Guest(kernel, initrd, where, command, memory_mb=CURVES_MEMORY_MB) as guest:
            progress("measuring the curves (ten minutes and more)")
            end_s = time.monotonic() + CURVES_DEADLINE_S
            while guest.is_running():
                if time.monotonic() > end_s:
                    raise guest.lost("vm-deadline", f"took over {CURVES_DEADLINE_S:.0f} s")
                time.sleep(POLL_S)
            result = guest.result()
            words = result.output.read_text(errors="replace").splitlines()
            if result.rc != 0:
                raise FailedError(
                    "bench-curves-failed",
                    f"The guest ended with status {result.rc}.",
                    details=words[-20:],
                )
            curves: dict[str, Any] = json.loads((where / "out.json").read_text())
            return curves


def sweep_folders(where: Path | None = None) -> list[Path]:
    """Return the folders of runs that were killed, after removing them."""
    removed = []
    for path in sorted((where or Path(tempfile.gettempdir())).glob(f"{_FOLDER_PREFIX}*")):
        pid = path.name.removeprefix(_FOLDER_PREFIX).partition("-")[0]
        about = path.lstat()
        if not pid.isdigit() or not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
            continue
        if process_start_ticks(int(pid)) is None:
            shutil.rmtree(path)
            removed.append(path)
    return removed


@contextlib.contextmanager
def _packed(
    series: str, tree: Path, programs: Sequence[str], progress: Callable[[str], None]
) -> Iterator[tuple[KernelImage, Path]]:
    """Give a kernel and an initrd that lies in a private folder."""
    kernel = find_kernel(series)
    progress("compiling the classifier")
    image, _ = find_image()
    sweep_folders()
    prefix = f"{_FOLDER_PREFIX}{os.getpid()}-"
    with InterruptGuard(), tempfile.TemporaryDirectory(prefix=prefix) as name:
        images = Path(name) / "images"
        images.mkdir()
        shutil.copy(image_path(image.digest), images)
        initrd = Path(name) / "initrd"
        build_initrd(initrd, kernel, tree, images=images, programs=programs)
        yield kernel, initrd


class _Machine:
    """One guest and how far it has come."""

    def __init__(self, guest: Guest, where: Path, cells: list[Cell]) -> None:
        self.alive = True
        self.failed: list[dict[str, Any]] = []
        self._guest = guest
        self._where = where
        self._cells = cells
        self._taken = 0
        self._last_s = time.monotonic()

    def poll(self, samples_dir: Path) -> list[dict[str, Any]]:
        """Return the rows that came since the last call. Raises as `run_virtual`."""
        if not self.alive:
            return []
        ended = not self._guest.is_running()
        rows = self._new_rows()
        if rows:
            self._last_s = time.monotonic()
        self.failed += [row for row in rows if "failed" in row]
        rows = [row for row in rows if "failed" not in row]
        for row in rows:
            shutil.copy(self._where / "samples" / f"{row['key']}.json.gz", samples_dir)
        if ended:
            self.alive = False
            self._check_end()
        elif time.monotonic() - self._last_s > CELL_DEADLINE_S:
            self.alive = False
            raise self._guest.lost("vm-deadline", f"gave no row for {CELL_DEADLINE_S:.0f} s")
        return rows

    def _new_rows(self) -> list[dict[str, Any]]:
        path = self._where / "rows.jsonl"
        if not path.exists():
            return []
        whole = path.read_text().split("\n")[:-1]
        new, self._taken = whole[self._taken :], len(whole)
        return [json.loads(line) for line in new]

    def _check_end(self) -> None:
        result = self._guest.result()
        if result.splats:
            raise FailedError(
                "vm-splat", "The guest's kernel complained.", details=result.splats[:20]
            )
        if result.rc != 0 or self._taken < len(self._cells):
            words = result.output.read_text(errors="replace").splitlines()
            raise FailedError(
                "bench-guest-failed",
                f"The guest ended with status {result.rc} after {self._taken} of "
                f"{len(self._cells)} cells.",
                hint="The rows so far are kept; --resume runs what is missing.",
                details=words[-20:],
            )
