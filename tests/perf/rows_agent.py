# SPDX-License-Identifier: Apache-2.0
"""The agent by its API: whitelists from client to kernel, what it takes, and a restart."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from agent_perf import AgentLab, AgentRun, Client, agent_lab
from netlab_perf import BulkLoad, Pair, bulk_packets, class_packets, pair
from perflib import Options, Result, median, row
from rows_scrape import most_classes
from rows_traffic import PAIRS, signal_p99_us

from shapeagent.kernel.abi import SHP_MAX_CLASSES
from shapeagent.lab.stats import quantile_nearest_rank
from shapeagent.lab.topology import ip_batch

MILLION = 1_000_000
HUNDRED_THOUSAND = 100_000
MB = 1e6
INTERFACES = 8
LOAD_PER_S = 5_000
NO_RULE_PORT = 7_777  # class normal, unless a whitelist says otherwise
FLOOD_THREADS = 4


@contextlib.contextmanager
def _agent(ends: Pair, **options: Any) -> Iterator[tuple[AgentLab, AgentRun]]:
    with agent_lab(ends, **options) as lab, lab.running() as run:
        run.log.wait_for("attached: " + lab.devices[-1])
        yield lab, run


# --- whitelists


@row("agent-stream")
def stream(options: Options) -> Sequence[Result]:
    """Many hosts by one stream of packed batches over mTLS, into an empty list."""
    results = []
    with pair() as ends, _agent(ends) as (lab, _), Client(lab, over="tcp") as client:
        for count, repeats in ((MILLION, options.pick(5, 2)), (HUNDRED_THOUSAND, 5)):
            spent = []
            for _ in range(repeats):
                client.ask("stream", 0, "10.0.0.0", "bulk", True)
                took_s, total = client.ask("stream", count, "10.0.0.0", "bulk", False)
                assert total == count, f"got {total} in force, want {count}"
                spent.append(took_s)
            results.append(
                Result(
                    f"whitelist stream with mTLS, {count:,} hosts, call to answer",
                    count / min(spent),
                    "entries/s",
                    target=200_000,
                    at_least=True,
                    note=f"median {count / median(spent):,.0f}, least {count / max(spent):,.0f}",
                )
            )
    return results


@row("agent-single")
def single(options: Options) -> Sequence[Result]:
    """One host by one call, beside none and beside a million; durable and audited in the answer."""
    results = []
    calls, repeats = options.pick(1_000, 300), options.pick(5, 2)
    with pair() as ends, _agent(ends) as (lab, _):
        for beside in (0, MILLION):
            for over, name in (("tcp", "mTLS"), ("unix", "Unix socket")):
                with Client(lab, over=over) as client:
                    client.ask("stream", beside, "10.0.0.0", "bulk", True)
                    client.ask("singles", 50, "192.0.1.0")
                    runs = [
                        client.ask("singles", calls, f"192.{number}.0.0")
                        for number in range(1, repeats + 1)
                    ]
                p99s = [quantile_nearest_rank([one for one, _ in run], 0.99) for run in runs]
                effects, answers = zip(*(both for run in runs for both in run), strict=True)
                results.append(
                    Result(
                        f"single whitelist update by {name} beside {beside:,}: "
                        "call to effect in the kernel, p99",
                        min(p99s) * 1e3,
                        "ms",
                        target=3.0,
                        note=f"best of {repeats} × {calls:,}, median {median(p99s) * 1e3:.2f}; "
                        f"p50 {median(effects) * 1e3:.2f}; to the answer (durable, audited) "
                        f"p50 {median(answers) * 1e3:.2f}, "
                        f"p99 {quantile_nearest_rank(answers, 0.99) * 1e3:.2f}",
                    )
                )
    return results


@row("agent-replace")
def replace_under_traffic(options: Options) -> Sequence[Result]:
    """Lists of 100,000 that replace each other over mTLS while one of their hosts is sent to.

    The host is of class stream in one list and of bulk in the other. Misclassified
    is what was counted in neither: a reader that saw a mix, or no list, has class normal.
    """
    with pair() as ends, _agent(ends) as (lab, _), Client(lab, over="tcp") as client:

        def replace(number: int) -> float:
            first, name = (("10.0.0.0", "stream"), ("11.0.0.0", "bulk"))[number % 2]
            took_s, total = client.ask("stream", HUNDRED_THOUSAND, first, name, True, ends.far.ipv4)
            assert total == HUNDRED_THOUSAND + 1, f"got {total} in force"
            return float(took_s)

        replace(0)
        before = class_packets(ends)
        with BulkLoad(ends, LOAD_PER_S, port=NO_RULE_PORT) as load:
            spent = [replace(number) for number in range(1, options.pick(20, 4) + 1)]
        after = class_packets(ends)
    counted = {name: after[name] - before[name] for name in ("stream", "bulk")}
    assert min(counted.values()) > 0, f"got {counted}, want packets of both lists"
    return [
        Result(
            "atomic replace of 100,000 hosts under traffic, mTLS, call to answer",
            max(spent),
            "s",
            target=1.0,
            note=f"worst of {len(spent)}, median {median(spent):.3f} s",
        ),
        Result(
            "packets misclassified meanwhile",
            abs(load.sent - sum(counted.values())),
            "packets",
            target=0,
            note=f"{load.sent:,} sent at {LOAD_PER_S:,}/s, {load.received:,} arrived",
            failure="" if load.received == load.sent else "not all that was sent arrived",
        ),
    ]


# --- what it costs


def _settled_pss(run: AgentRun) -> float:
    """Return the memory in MB once it stands still, after a look of the reconciler."""
    last = 0
    for _ in range(20):
        time.sleep(0.5)
        now = run.pss_bytes()
        if abs(now - last) < MB / 10:
            break
        last = now
    return now / MB


@row("agent-memory")
def memory(options: Options) -> Sequence[Result]:
    """PSS of the process; what it shares with another Python counts by half."""
    with pair() as ends, _agent(ends) as (lab, run):
        idle = _settled_pss(run)
        with Client(lab, over="tcp") as client:
            client.ask("stream", MILLION, "10.0.0.0", "bulk", True)
            client.ask("singles", 100, "192.0.2.0")
        full = _settled_pss(run)
        with Client(lab, over="tcp") as client:
            for number in range(3):
                client.ask("stream", MILLION, f"{20 + number}.0.0.0", "bulk", True)
        replaced = _settled_pss(run)
    return [
        Result("agent memory (PSS), idle after attach", idle, "MB", target=85),
        Result(
            "agent memory (PSS) with 1,000,000 hosts",
            full,
            "MB",
            target=250,
            note=f"after three replaces {replaced:.0f} MB",
        ),
    ]


@contextlib.contextmanager
def _eight(ends: Pair) -> Iterator[list[str]]:
    more = [f"d{number}" for number in range(1, INTERFACES)]
    lines = [f"link add {name} type veth peer name peer-{name}" for name in more]
    ip_batch(ends.near.namespace, [*lines, *(f"link set {name} up" for name in more)])
    yield [ends.near.device, *more]


@row("agent-idle")
def idle_cpu(options: Options) -> Sequence[Result]:
    """CPU of an agent that has eight interfaces and nothing to do, reconciling every 2 s."""
    seconds = options.pick(30, 10)
    with pair() as ends, _eight(ends) as devices, _agent(ends, devices=devices) as (_, run):
        time.sleep(5.0)  # looks that follow an attach
        before, began_s = run.cpu_s(), time.monotonic()
        time.sleep(seconds)
        used = (run.cpu_s() - before) / (time.monotonic() - began_s)
    return [
        Result(
            f"agent CPU, idle, {INTERFACES} interfaces",
            used * 100,
            "% of a core",
            target=0.5,
            note=f"over {seconds} s",
        )
    ]


@row("agent-scrape")
def scrape(options: Options) -> Sequence[Result]:
    """A scrape of the running agent: eight interfaces with 16 classes, both directions."""
    with contextlib.ExitStack() as stack:
        ends = stack.enter_context(pair())
        devices = stack.enter_context(_eight(ends))
        policy = most_classes(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        more = f'policy = "{policy}"'
        lab, run = stack.enter_context(_agent(ends, devices=devices, more=more))
        client = stack.enter_context(Client(lab, over="unix"))
        used_s = run.cpu_s()
        found = client.ask("scrapes", options.pick(30, 8))
        used_s = run.cpu_s() - used_s
    times_ms = [1e3 * took_s for took_s, _ in found]
    classes = {count for _, count in found}
    want = 2 * INTERFACES * SHP_MAX_CLASSES
    return [
        Result(
            f"scrape of the agent, {INTERFACES} interfaces with {SHP_MAX_CLASSES} classes",
            min(times_ms),
            "ms",
            target=20,
            note=f"median {median(times_ms):.1f} ms; CPU of the agent "
            f"{1e3 * used_s / len(found):.1f} ms",
            failure="" if classes == {want} else f"got {classes} classes, want {want}",
        )
    ]


@row("agent-flood")
def flood(options: Options) -> Sequence[Result]:
    """Signal while the API is called as fast as it answers, against quiet."""
    seconds = 3.0 if not options.quick else 1.0
    quiet, flooded, calls = [], [], 0
    with (
        pair() as ends,
        _agent(ends, link_rate="1gbit") as (lab, run),
        Client(lab, over="tcp") as client,
    ):
        used_s = run.cpu_s()
        for _ in range(options.pick(PAIRS, 2)):
            quiet.append(signal_p99_us(ends, seconds))
            client.ask("flood", FLOOD_THREADS)
            flooded.append(signal_p99_us(ends, seconds))
            calls += client.ask("calm")[0]
        used_s = run.cpu_s() - used_s
    assert calls > 100 * len(flooded), f"got {calls} calls, want a flood"
    return [
        Result(
            "signal p99 while the API is flooded, against quiet",
            median([b / a for a, b in zip(quiet, flooded, strict=True)]),
            "ratio",
            target=1.2,
            note=f"median of {len(quiet)} interleaved pairs; {median(flooded):.0f} against "
            f"{median(quiet):.0f} µs, one-way; {calls:,} calls from {FLOOD_THREADS} threads, "
            f"{used_s:.1f} s of CPU in the agent",
        )
    ]


# --- restart


@row("agent-restart")
def restart(options: Options) -> Sequence[Result]:
    """kill -9 under traffic, and another agent at once."""
    spent, answering = [], []
    with pair() as ends, agent_lab(ends) as lab, contextlib.ExitStack() as stack:
        run = stack.enter_context(lab.running())
        run.log.wait_for("attached: d0")
        before = bulk_packets(ends)
        with BulkLoad(ends, LOAD_PER_S) as load:
            for _ in range(options.pick(10, 3)):
                run.kill()
                run = stack.enter_context(lab.running())
                spent.append(run.log.wait_for("attached: d0") - run.started_s)
                answering.append(run.log.wait_for("listening: metrics") - run.started_s)
        counted = bulk_packets(ends) - before
    return [
        Result(
            "restart after kill -9: process start to adopted",
            median(spent),
            "s",
            target=0.5,
            note=f"{min(spent):.2f} to {max(spent):.2f} s; "
            f"until all of its sockets answer {median(answering):.2f} s",
        ),
        Result(
            "packets misclassified during the restarts",
            abs(load.sent - counted),
            "packets",
            target=0,
            note=f"{load.sent:,} sent in {len(spent)} restarts, {load.received:,} arrived",
            failure="" if load.received == load.sent else "not all that was sent arrived",
        ),
    ]
