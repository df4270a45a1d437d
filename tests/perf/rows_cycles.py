# SPDX-License-Identifier: Apache-2.0
"""What many attaches, detaches and looks leave behind in the process and the kernel (C48)."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from netlab_perf import pair
from perflib import Options, Result, row

from shapeagent.kernel import bpf

CYCLES = 200
LOOKS = 5_000
THREADS = 8
_WARM_UP = 20
_SETTLE_S = 5.0
_MEMORY_KIB = 4_096  # the allocator's arenas, not a leak of so much a cycle


def _resident_kib() -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0])


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _new_objects(maps: set[int], programs: set[int]) -> int:
    """Return how many maps and programs are new; the kernel frees old ones in its own time."""
    deadline_s = time.monotonic() + _SETTLE_S
    while True:
        grown = len(set(bpf.map_ids()) - maps) + len(set(bpf.program_ids()) - programs)
        if not grown or time.monotonic() > deadline_s:
            return grown
        time.sleep(0.02)


@row("cycles")
def cycles(options: Options) -> Sequence[Result]:
    """Attach and detach again and again; then status from several threads."""
    count, looks = options.pick(CYCLES, 30), options.pick(LOOKS, 500)
    with pair() as ends:
        request = ends.attach(link_rate_bits_per_s=10_000_000_000, profile="htb")
        device = ends.near.device

        def cycle() -> None:
            ends.engine.attach(request)
            ends.engine.detach(device)

        for _ in range(_WARM_UP):
            cycle()
        maps, programs = set(bpf.map_ids()), set(bpf.program_ids())
        descriptors, memory_kib = _descriptors(), _resident_kib()
        for _ in range(count):
            cycle()
        grown = _new_objects(maps, programs)
        grown_kib = _resident_kib() - memory_kib
        ends.engine.attach(request)
        ends.engine.status(device)
        with ThreadPoolExecutor(THREADS) as pool:
            shown = list(pool.map(lambda _: ends.engine.status(device)[0].problems, range(looks)))
        ends.engine.detach(device)
        new_descriptors = _descriptors() - descriptors
    wrong = sum(1 for problems in shown if problems)
    what = f"{count} attach/detach cycles"
    return [
        Result(f"{what}: new maps and programs", grown, "", target=0),
        Result(f"{what}: memory grown", grown_kib, "KiB", target=_MEMORY_KIB),
        Result(
            f"descriptors after that and {looks} status from {THREADS} threads",
            new_descriptors, "", target=2,
            failure=f"{wrong} of {looks} status with problems" if wrong else "",
        ),
    ]  # fmt: skip
