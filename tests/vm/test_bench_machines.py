# SPDX-License-Identifier: Apache-2.0
"""The benchmark's machines: one that dies, and a cell that fails, cost no other cell."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from shapeagent.lab.bench.catalog import IDLE, Cell
from shapeagent.lab.bench.virtual import run_virtual
from shapeagent.lab.vm import find_kernel
from shapeagent.model.errors import FailedError, ShapeError

TREE = Path(__file__).resolve().parents[2]
SERIES = "6.12"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="reading a kernel image needs root"),
]


@pytest.fixture(autouse=True)
def needs_kernel() -> None:
    try:
        find_kernel(SERIES)
    except ShapeError as error:
        pytest.skip(f"{error.message} {error.hint}")


def cell(queue: str, repeat: int) -> Cell:
    return Cell("signal-under-bulk", queue, 100_000_000, 1500, repeat, 1.0, warm_up_s=0.2)


def run(cells: list[Cell], folder: Path, machines: int) -> tuple[list[Any], FailedError]:
    """Return the rows that came, and the error at the end."""
    rows: list[Any] = []
    with pytest.raises(FailedError) as caught:
        run_virtual(
            cells,
            series=SERIES,
            tree=TREE,
            samples_dir=folder,
            on_row=rows.append,
            progress=lambda _: None,
            machines=machines,
        )
    return [row["key"] for row in rows], caught.value


def pid_of_machine(share: Path) -> int | None:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"path={share}," in words and "qemu" in words.split(" ")[0]:
            return int(path.parent.name)
    return None


def kill_machine(share: Path) -> None:
    end_s = time.monotonic() + 120
    while time.monotonic() < end_s:
        pid = pid_of_machine(share)
        if pid is not None and (share / "console.log").exists():
            os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.1)


def test_the_other_machine_goes_on_and_the_lost_ones_words_are_kept(tmp_path: Path) -> None:
    cells = [cell(IDLE, 1), cell(IDLE, 2)]
    killer = threading.Thread(target=kill_machine, args=(tmp_path / "machines" / "0",))
    killer.start()
    keys, error = run(cells, tmp_path, machines=2)
    killer.join()
    assert keys == [cells[1].key], f"got {keys}, want the cell of the other machine"
    assert error.reference == "vm-lost", f"got {error.reference}: {error.message}"
    console = tmp_path / "machines" / "0" / "console.log"
    assert console.exists(), "got no console, want what the hint names"
    assert str(console) in (error.hint or ""), f"got {error.hint}"


def test_a_cell_that_fails_is_named_after_the_others_have_run(tmp_path: Path) -> None:
    cells = [cell("nonsense", 1), cell(IDLE, 1)]
    keys, error = run(cells, tmp_path, machines=1)
    assert keys == [cells[1].key], f"got {keys}, want the other cell"
    assert error.reference == "bench-cell-failed", f"got {error.reference}: {error.message}"
    assert cells[0].key in error.message, f"got {error.message}"
    assert any("bench-queue-unknown" in line for line in error.details), f"got {error.details}"
