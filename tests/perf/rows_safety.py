# SPDX-License-Identifier: Apache-2.0
"""What an operator relies on: adopting, hot swaps, kills, and an attach that undoes itself."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from netlab_perf import SHAPECTL, BulkLoad, Pair, attached, bulk_packets, pair, shapectl
from perflib import ROOT, Options, Result, median, row

from shapeagent.kernel import bpf, maps, tcx
from shapeagent.kernel import compile as kernel_compile
from shapeagent.kernel.cgroup import find_cgroup_mount
from shapeagent.kernel.link import read_device
from shapeagent.kernel.netns import open_rtnl
from shapeagent.model.errors import UnsupportedError
from shapeagent.model.types import Hook
from shapeagent.service.engine import BPFFS_DIR
from shapeagent.service.hook import PROGRAMS, Place
from shapeagent.service.state import RUN_DIR

SWAPS = 1_000
SENDS_PER_S = 5_000
CONFIRM_S = 5.0
_BETWEEN_SWAPS_S = 0.001  # so that several packets meet each program


# --- adopt


@row("adopt")
def adopt(options: Options) -> Sequence[Result]:
    """Commands on what another process attached, start of Python to its end."""
    commands = {
        "attach": ("attach", "DEVICE", "--link-rate", "100mbit"),
        "status": ("status",),
        "class set": ("class", "set", "bulk", "--ceiling", "50mbit"),
    }
    spent: dict[str, list[float]] = {name: [] for name in commands}
    with pair() as ends:
        device = ends.near.device
        shapectl(ends, "attach", device, "--link-rate", "100mbit")
        try:
            for _ in range(options.pick(10, 3)):
                for name, words in commands.items():
                    arguments = [device if word == "DEVICE" else word for word in words]
                    started = time.perf_counter()
                    shapectl(ends, *arguments)
                    spent[name].append(time.perf_counter() - started)
        finally:
            shapectl(ends, "detach", device)
    return [
        Result(
            f"adopt pinned state: {'attach again' if name == 'attach' else name}, median",
            median(times), "s", target=0.2, note=f"{min(times):.2f} to {max(times):.2f} s",
        )
        for name, times in spent.items()
    ]  # fmt: skip


# --- hot swap


@row("swap")
def hot_swap(options: Options) -> Sequence[Result]:
    """Programs in the place of programs, in both directions, while bulk passes."""
    swaps = options.pick(SWAPS, 100)
    results = []
    for hook in Hook if tcx.is_supported() else (Hook.CLSACT,):
        shape: dict[str, object] = {"profile": "police", "hook": hook.value}
        with pair() as ends, attached(ends, link_rate_bits_per_s=10_000_000_000, **shape):
            load, times = _swap_under_load(ends, swaps)
            counted = bulk_packets(ends)
        results.append(
            Result(
                f"hot swap under load, {swaps:,} times, {hook.value}: packets missed",
                abs(load.sent - counted),
                "packets",
                target=0,
                note=f"{load.sent:,} sent at {SENDS_PER_S:,}/s, {load.received:,} arrived; "
                f"both directions in {median(times) * 1e3:.2f} ms",
                failure="" if load.received == load.sent else "not all that was sent arrived",
            )
        )
    return results


def _swap_under_load(ends: Pair, swaps: int) -> tuple[BulkLoad, list[float]]:
    times = []
    with open_rtnl(ends.near.namespace) as rtnl:
        key = next(path.name for path in ends.engine.bpffs_dir.iterdir())
        store, pins = ends.engine.store(key), ends.engine.bpffs_dir / key
        state = store.read()
        assert state is not None
        image, _ = kernel_compile.find_image()
        pinned = maps.PinnedMaps(pins)
        sets = [
            kernel_compile.load_image(image, pinned, begin_anew=False) for _ in range(2)
        ]  # the maps that are there, as a swap takes them up
        ours = (*state.our_ids, *(program.id for each in sets for program in each.values()))
        store.write(dataclasses.replace(state, spare_ids=ours))  # so that detach knows them
        place = Place.of(rtnl, state, pins)
        try:
            with BulkLoad(ends, SENDS_PER_S) as load:
                for number in range(swaps):
                    started = time.perf_counter()
                    for direction, name in PROGRAMS.items():
                        place.swap(direction, sets[number % 2][name].fd, ours)
                    times.append(time.perf_counter() - started)
                    time.sleep(_BETWEEN_SWAPS_S)
        finally:
            bpf.close_all([program.fd for each in sets for program in each.values()])
            pinned.close()
    return load, times


# --- kill


_SUMMARY = re.compile(
    r"^\.?(?P<way>[\w, ]+), kill in (?P<operation>\w+): (?P<steps>\d+) steps, .*"
    r"lost (?P<signal>-?\d+) signal, (?P<bulk>-?\d+) bulk$",
    re.MULTILINE,
)


@row("kill")
def kill_matrix(options: Options) -> Sequence[Result]:
    """kill -9 at every step of every operation: the test itself, its lines added up."""
    only = ["-k", "police and attach and not clsact"] if options.quick else []
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider"),
            *("tests/netns/test_kill_matrix.py", *only),
        ],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = list(_SUMMARY.finditer(done.stdout))
    failed = re.search(r"(\d+) (?:failed|error)", done.stdout)
    wrong = int(failed[1]) if failed else 0 if found else 1

    def total(name: str, ways: Callable[[str], bool] = lambda _: True) -> int:
        return sum(int(one[name]) for one in found if ways(one["way"]))

    in_police = sum(total(name, lambda way: way == "police") for name in ("signal", "bulk"))
    by_way = ", ".join(
        f"{way} {total('signal', lambda one, way=way: one == way)}"  # type: ignore[misc]
        for way in dict.fromkeys(one["way"] for one in found)
    )
    operations = ", ".join(dict.fromkeys(one["operation"] for one in found))
    return [
        Result(
            "kill at every step: ways and operations not recovered or undone", wrong, "", target=0,
            note=f"{total('steps')} kills in {len(found)} ways × operations ({operations})",
            failure="" if done.returncode == 0 else done.stdout[-500:],
        ),
        Result(
            "kill at every step: signal lost", total("signal"), "packets", target=0,
            note=f"{by_way}; the kernel takes the queue away while a root qdisc or clsact "
            "comes or goes (qdisc_graft)",
        ),
        Result(
            "kill at every step: lost in police", in_police, "packets", target=0,
            note=f"bulk lost in all ways, in replaced qdiscs: {total('bulk')}",
        ),
    ]  # fmt: skip


# --- confirm


@contextlib.contextmanager
def _scope() -> Iterator[Path | None]:
    """Give a cgroup as a login session has one, None where cgroup v2 cannot be had."""
    try:
        folder = find_cgroup_mount().folder / f"shp-perf-{os.getpid()}.scope"
        folder.mkdir()
    except (OSError, UnsupportedError):
        yield None
        return
    try:
        yield folder
    finally:
        _wait_for(lambda: not (folder / "cgroup.procs").read_text(), 5.0)
        folder.rmdir()


def _wait_for(condition: Callable[[], bool], limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"not true within {limit_s} s"
        time.sleep(0.005)


def _tree(ends: Pair) -> str:
    """Return the qdiscs of the near end as tc prints them: its own root has no handle."""
    words = ["tc", "-n", ends.near.namespace, "-j", "qdisc", "show", "dev", ends.near.device]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


@row("confirm")
def confirm_killed(options: Options) -> Sequence[Result]:
    """`attach --confirm 5s` by a shell whose whole session is killed then."""
    spent = []
    failure = ""
    for _ in range(options.pick(3, 1)):
        with pair() as ends, _scope() as scope:
            before = _tree(ends)
            spent.append(_killed_session(ends, scope))
            after = _tree(ends)
            if after != before:
                failure = f"got {after}, want {before}"
    return [
        Result(
            f"--confirm {CONFIRM_S:g}s, session scope killed: restored after the attach",
            max(spent),
            "s",
            target=6.0,
            note=f"worst of {len(spent)}",
            failure=failure,
        )
    ]


def _killed_session(ends: Pair, scope: Path | None) -> float:
    """Return the seconds from the attach's end until all is as before."""

    def enter() -> None:
        os.setsid()
        if scope is not None:
            (scope / "cgroup.procs").write_text("0")

    attach = [str(SHAPECTL), "--netns", ends.near.namespace, "attach", ends.near.device]
    attach += ["--link-rate", "100mbit", "--confirm", f"{CONFIRM_S:g}s"]
    shell = subprocess.Popen(
        ["/bin/sh", "-c", f"{shlex.join(attach)} >/dev/null && echo attached; sleep 600"],
        stdout=subprocess.PIPE, text=True, preexec_fn=enter,
    )  # fmt: skip
    assert shell.stdout is not None
    try:
        assert shell.stdout.readline() == "attached\n", "attach failed"
        attached_s = time.monotonic()
        with open_rtnl(ends.near.namespace) as rtnl:
            key = ends.engine.key_of(rtnl, read_device(rtnl, ends.near.device).index)
    finally:
        if scope is not None and (scope / "cgroup.kill").exists():
            (scope / "cgroup.kill").write_text("1")
        else:
            os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()
        shell.stdout.close()
    folders = (RUN_DIR / key, BPFFS_DIR / key)
    assert all(folder.exists() for folder in folders), "got it undone at once"
    _wait_for(lambda: not any(folder.exists() for folder in folders), CONFIRM_S + 10.0)
    return time.monotonic() - attached_s
