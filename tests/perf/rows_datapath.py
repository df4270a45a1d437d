# SPDX-License-Identifier: Apache-2.0
"""What the classifier costs per packet: test runs, minus the empty program.

One packet is repeated, so caches are warm, but for the rows that say random.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.synchronize import Event

import perflib
from perflib import (
    HERE,
    NORMAL,
    SIGNAL,
    STREAM,
    Bench,
    Options,
    Result,
    batch_ns,
    compile_text,
    fastest_ns,
    host_entry,
    load_empty,
    row,
    tail_call_to,
)

from shapeagent.kernel import bpf, listbuild
from shapeagent.kernel.compile import load_image
from shapeagent.kernel.datapath import Datapath
from shapeagent.model.types import WhitelistEntry

ROUNDS = 5
HOSTS = 1_000_000
PREFIXES = 100_000
HOST_BASE = 0x0A00_0000  # 10.0.0.0
PREFIX_BASE = 0x0B00_0000  # 11.0.0.0
PREFIX_STEP = 0x9E_3779  # odd: every index another /24, spread over all of IPv4
UPDATES_PER_S = 1_000
FLOWS = 1_024


def _calibration() -> int:
    image = compile_text((HERE / "calibrate.c").read_text(), ("perf_calibrate",))
    maps = {
        "cal_ctl": bpf.create_map("cal_ctl", bpf.MapShape(bpf.MapType.ARRAY, 4, 8, 1, 0)),
        "cal_flows": bpf.create_map(
            "cal_flows", bpf.MapShape(bpf.MapType.LRU_HASH, 16, 16, 131_072, 0)
        ),
    }
    return load_image(image, maps, ("perf_calibrate",))["perf_calibrate"].fd


@row("hit")
def cache_hit(options: Options) -> Sequence[Result]:
    """Flow-cache hits of a normal and a stream packet, and the signal packet with its budget."""
    bench = perflib.open_bench(options.source)
    try:
        runs = {
            "empty": (load_empty(), NORMAL),
            "calibration": (_calibration(), NORMAL),
            "normal": (bench.egress, NORMAL),
            "stream": (bench.egress, STREAM),
            "signal": (bench.egress, SIGNAL),
        }
        for name, code in (("normal", "default"), ("stream", "rule-port"), ("signal", "rule-port")):
            fd, frame = runs[name]
            bench.expect_only(code, partial(batch_ns, fd, frame), class_name=name)
        rounds = []
        for _ in range(ROUNDS):
            best = fastest_ns(runs, batches=options.pick(60, 15))
            rounds.append({name: value - best["empty"] for name, value in best.items()})
        moved = bench.datapath.reasons(0).get("flow-moved", 0)
    finally:
        bench.close()
    results = []
    for name in ("normal", "stream"):
        ratio, value, base = min(
            (found[name] / found["calibration"], found[name], found["calibration"])
            for found in rounds
        )
        results.append(
            Result(
                f"classifier, flow-cache hit, {name} packet",
                value,
                "ns",
                target=50,
                ratio=ratio,
                ratio_target=1.8,
                note=f"{ratio:.2f} x calibration ({base:.1f} ns), at most 1.8",
            )
        )
    results.append(
        Result(
            "classifier, signal packet with budget and policer",
            min(found["signal"] for found in rounds),
            "ns",
            target=110,
            failure=f"{moved} packets were over the budget" if moved else "",
        )
    )
    return results


# --- whitelist changes while packets pass


def _update_lists(
    datapath: Datapath, number: int, stop: Event, done: multiprocessing.Queue[tuple[int, float]]
) -> None:
    entries = [host_entry(HOST_BASE + index) for index in range(500)]
    started = time.perf_counter()
    count = 0
    while not stop.is_set():
        entry = entries[count // 2 % len(entries)]
        if count % 2:
            datapath.remove_entry(entry)
        else:
            datapath.add_entry(entry, number, 0)
        count += 1
        spare = started + count / UPDATES_PER_S - time.perf_counter()
        if spare > 0:
            time.sleep(spare)
    done.put((count, time.perf_counter() - started))


@row("updates")
def whitelist_updates(options: Options) -> Sequence[Result]:
    """The average over 1,024 flows in turn, while one process makes 1,000 changes a second."""
    bench = perflib.open_bench(options.source)
    try:
        _replace(bench, [host_entry(HOST_BASE + index) for index in range(1_000, 2_000)])
        image = compile_text((HERE / "wrap.c").read_text(), ("perf_flows",))
        maps = bench.datapath.maps
        ours = tail_call_to(image, "perf_flows", bench.egress, maps)
        base = tail_call_to(image, "perf_flows", load_empty(), maps)
        repeat = options.pick(2_000_000, 400_000)
        context = multiprocessing.get_context("fork")
        stop = context.Event()
        done: multiprocessing.Queue[tuple[int, float]] = context.Queue()
        updater = context.Process(
            target=_update_lists, args=(bench.datapath, bench.numbers["stream"], stop, done)
        )
        epoch = bench.datapath.read_control().epoch
        updater.start()
        try:
            values = []
            for _ in range(ROUNDS):
                with_ours = bpf.run_program(ours, NORMAL, repeat=repeat).duration_ns
                values.append(with_ours - bpf.run_program(base, NORMAL, repeat=repeat).duration_ns)
        finally:
            stop.set()
            count, seconds = done.get(timeout=10)
            updater.join(10)
        bumped = bench.datapath.read_control().epoch - epoch
        rate = count / seconds
        assert bumped == count, f"got {bumped} epochs for {count} changes"
    finally:
        bench.close()
    return [
        Result(
            "classifier, average with 1,000 single whitelist updates/s",
            min(values),
            "ns",
            target=120,
            note=f"{rate:.0f} updates/s, {FLOWS:,} flows",
            failure="" if rate >= 0.95 * UPDATES_PER_S else f"only {rate:.0f} updates/s",
        )
    ]


# --- stale hits and new flows


def _replace(bench: Bench, entries: Sequence[WhitelistEntry]) -> None:
    tables = listbuild.build_tables(entries, bench.numbers, lambda _when: 0)
    bench.datapath.replace_lists(tables)


def _prefix(index: int, *, scattered: bool = False) -> int:
    if scattered:
        return (index * PREFIX_STEP & 0xFF_FFFF) << 8
    return PREFIX_BASE + (index << 8)


def _host_list() -> list[WhitelistEntry]:
    return [host_entry(HOST_BASE + index) for index in range(HOSTS)]


def _prefix_list(*, scattered: bool) -> list[WhitelistEntry]:
    """Return /24 networks: side by side, as address plans are, or each far from the next."""
    return [host_entry(_prefix(index, scattered=scattered), bits=24) for index in range(PREFIXES)]


def _text(address: int) -> str:
    return ".".join(str(part) for part in address.to_bytes(4, "big"))


def _frame_to(address: int) -> bytes:
    return perflib.tcp_frame(perflib.LOCAL, _text(address), 40_000, 41_000)


def _range(count: int, base: int, step: int, mask: int, shift: int, local: int) -> bytes:
    return b"".join(
        value.to_bytes(4, "little") for value in (base, count, step, mask, shift, local)
    )


@row("lists")
def stale_and_new(options: Options) -> Sequence[Result]:
    """Stale-generation hits and truly new flows, with 1,000,000 hosts and 100,000 prefixes.

    New flows are gated as shipped, with at most 20,000 inserts a second and
    CPU; rows with the limit lifted, where each packet pays an insert into a
    full LRU, are reported beside them.
    """
    bench = perflib.open_bench(options.source)
    try:
        image = compile_text((HERE / "wrap.c").read_text(), ("perf_stale", "perf_random"))
        maps = {
            **bench.datapath.maps,
            "range": bpf.create_map("range", bpf.MapShape(bpf.MapType.ARRAY, 4, 24, 1, 0)),
        }
        empty = load_empty()
        wrapped = {
            name: (
                tail_call_to(image, name, bench.egress, maps),
                tail_call_to(image, name, empty, maps),
            )
            for name in ("perf_stale", "perf_random")
        }
        results: list[Result] = []
        _replace(bench, _host_list())
        results += _stale_rows(options, bench, wrapped["perf_stale"], "exact hosts", 130)
        hosts = {
            "listed": _range(HOSTS, HOST_BASE, 1, 0xFFFF_FFFF, 0, 0),
            "unlisted": _range(0x0800_0000, 0x4000_0000, 1, 0xFFFF_FFFF, 0, 0),
        }
        results += _new_rows(
            options, bench, maps["range"], wrapped["perf_random"], hosts,
            "1,000,000 exact hosts", 700
        )  # fmt: skip
        _replace(bench, _prefix_list(scattered=False))
        results += _stale_rows(options, bench, wrapped["perf_stale"], "100,000 prefixes", 500)
        unlisted = _range(0xFFFF_FFFF, 0, 1, 0xFFFF_FFFF, 0, 0)
        prefixes = {
            "listed": _range(PREFIXES, PREFIX_BASE + 77, 1, 0xFFFF_FFFF, 8, 0),
            "unlisted": unlisted,
        }
        results += _new_rows(
            options, bench, maps["range"], wrapped["perf_random"], prefixes,
            "100,000 prefixes", 900
        )  # fmt: skip
        _replace(bench, _prefix_list(scattered=True))
        prefixes = {
            "listed": _range(PREFIXES, 77, PREFIX_STEP, 0xFF_FFFF, 8, 0),
            "unlisted": unlisted,
        }
        results += _new_rows(
            options, bench, maps["range"], wrapped["perf_random"], prefixes,
            "100,000 prefixes scattered over all of IPv4", None
        )  # fmt: skip
    finally:
        bench.close()
    return results


def _stale_rows(
    options: Options, bench: Bench, pair: tuple[int, int], what: str, target: float
) -> list[Result]:
    """The slower of a listed and an unlisted address decides."""
    listed = HOST_BASE if what == "exact hosts" else _prefix(1) + 77
    frames = {"listed": _frame_to(listed), "unlisted": _frame_to(0xC633_6401)}
    values = {}
    perflib.lift_insert_limit(bench)
    before = perflib.inserted_flows(bench)
    for kind, frame in frames.items():
        batch_ns(pair[0], frame, 100)
        best = fastest_ns(
            {"ours": (pair[0], frame), "base": (pair[1], frame)}, batches=options.pick(100, 25)
        )
        values[kind] = best["ours"] - best["base"]
    # the second address is a new flow once; a refresh in place inserts nothing
    inserted = perflib.inserted_flows(bench) - before
    note = ", ".join(f"{kind} {value:.0f}" for kind, value in values.items())
    return [
        Result(
            f"classifier, stale-generation hit refreshed in place, {what}",
            max(values.values()),
            "ns",
            target=target,
            note=note,
            failure="" if inserted <= 4 else f"{inserted} inserts instead of refreshes",
        )
    ]


def _new_rows(
    options: Options,
    bench: Bench,
    range_fd: int,
    pair: tuple[int, int],
    ranges: dict[str, bytes],
    what: str,
    target: float | None,
) -> list[Result]:
    perflib.ship_insert_limit(bench)
    shipped = _new_row(options, bench, range_fd, pair, ranges, what, target)
    perflib.lift_insert_limit(bench)
    every = _new_row(options, bench, range_fd, pair, ranges, f"{what}, each one cached", None)
    return [shipped, every]


def _new_row(
    options: Options,
    bench: Bench,
    range_fd: int,
    pair: tuple[int, int],
    ranges: dict[str, bytes],
    what: str,
    target: float | None,
) -> Result:
    repeat = options.pick(400_000, 100_000)
    values = {}
    for kind, wanted in ranges.items():
        bpf.update(range_fd, bytes(4), wanted)
        frame = _frame_to(HOST_BASE)
        bpf.run_program(pair[0], frame, repeat=200_000)  # the cache is full from here on
        before = perflib.inserted_flows(bench)
        found = []
        for _ in range(ROUNDS):
            ours = bpf.run_program(pair[0], frame, repeat=repeat).duration_ns
            found.append(ours - bpf.run_program(pair[1], frame, repeat=repeat).duration_ns)
        inserted = perflib.inserted_flows(bench) - before
        if target is None and "each" in what:
            share = inserted / (ROUNDS * repeat)
            assert share > 0.95, f"{what}, {kind}: got {share:.2f} of the packets as new flows"
        values[kind] = min(found)
    note = ", ".join(f"{kind} {value:.0f}" for kind, value in values.items())
    return Result(
        f"classifier, truly new flow, random addresses, {what}",
        max(values.values()),
        "ns",
        target=target,
        note=note,
    )
