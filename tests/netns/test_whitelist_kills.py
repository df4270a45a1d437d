# SPDX-License-Identifier: Apache-2.0
"""kill -9 at any point of a whitelist change: what was acknowledged stays, kernel and log agree."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator

import pytest
from enginekit import Bench, entry, environment
from killkit import each_step
from listkillkit import Change, ListKiller

from shapeagent.kernel.datapath import Datapath
from shapeagent.kernel.listread import read_lists
from shapeagent.kernel.maps import PinnedMaps
from shapeagent.model.reports import WhitelistRow
from shapeagent.policy.whitelist import export_list, format_prefix

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
]

Entry = tuple[str, str | None, str | None, str]
BASE = ["192.0.2.1", "192.0.2.2 class=signal", "198.51.100.0/24", "10.0.0.1>10.0.0.2"]
SOON = 4_000_000_000
CHANGES: dict[str, list[Change]] = {
    "one host": [("add", ["203.0.113.1"])],
    "another class": [("add", ["192.0.2.1 class=stream owner=ops"])],
    "one prefix": [("add", ["203.0.113.0/25"])],
    "one pair gone": [("remove", ["10.0.0.1>10.0.0.2"])],
    "several": [("add", ["203.0.113.1", "2001:db8::1", "2001:db8::/40 match=source"])],
    "all replaced": [("replace", ["203.0.113.7", "198.51.100.0/24 class=stream"])],
    "all gone": [("replace", [])],
    "expiry in place": [("expire", [str(SOON + 1)])],
    "one after another": [
        ("add", ["203.0.113.1"]),
        ("add", ["203.0.113.0/25", "203.0.113.2"]),
        ("remove", ["192.0.2.1"]),
    ],
}


def as_entries(rows: tuple[WhitelistRow, ...]) -> set[Entry]:
    return {(row.match, row.source, row.destination, row.traffic_class) for row in rows}


def in_kernel(one: Bench) -> set[Entry]:
    """Return what the kernel's lists hold."""
    names = {row.number: row.name for row in one.status().classes}
    with contextlib.closing(PinnedMaps(one.pins)) as maps:
        active = Datapath(maps, 1).read_control().active_lists
        return {
            (
                found.match.value,
                format_prefix(found.source) if found.source else None,
                format_prefix(found.destination) if found.destination else None,
                names[found.class_number],
            )
            for found in read_lists(maps, active)
        }


@pytest.fixture
def one(bench: Callable[..., Bench]) -> Bench:
    made = bench()
    made.attach(profile="police")
    return made


@pytest.fixture
def killer(one: Bench) -> Iterator[ListKiller]:
    made = ListKiller(one)
    yield made
    made.close()


def listed(one: Bench) -> set[Entry]:
    return as_entries(one.engine.whitelist_list(one.device))


def expected(one: Bench, changes: list[Change]) -> list[set[Entry]]:
    """Return what is listed before and after each of the changes."""
    found = [listed(one)]
    with one.engine.session(one.device) as session:
        for verb, texts in changes:
            if verb == "expire":
                session.whitelist_expire(float(texts[0]))
            else:
                getattr(session, f"whitelist_{verb}")([entry(text, "bulk") for text in texts])
            found.append(as_entries(session.whitelist_list()))
    return found


def check_agreement(one: Bench, before: set[Entry], where: str) -> None:
    """Fail unless the next change finds and leaves kernel and log the same."""
    extra = ("destination", None, "203.0.113.99", "bulk")
    one.engine.whitelist_add(one.device, [entry("203.0.113.99", "bulk")])
    got = listed(one)
    assert got == before | {extra}, f"got {got}, want {before} and one more, {where}"
    kernel = in_kernel(one)
    assert kernel == got, f"got {kernel} in the kernel, want {got}, {where}"


@pytest.mark.slow
@pytest.mark.host
@pytest.mark.parametrize("what", CHANGES)
def test_a_kill_at_any_step_loses_nothing_acknowledged(
    one: Bench, killer: ListKiller, what: str
) -> None:
    said: list[str] = []
    one.engine.warn = said.append
    changes = CHANGES[what]
    base = [entry(text, "bulk") for text in BASE]
    if what.startswith("expiry"):
        base.append(entry("203.0.113.50", "bulk", expires_unix_s=float(SOON)))
    one.engine.whitelist_replace(one.device, base)
    states = expected(one, changes)
    acknowledged = 0

    def kill(number: int) -> bool:
        nonlocal acknowledged
        one.engine.whitelist_replace(one.device, base)
        acknowledged, killed = killer.run(changes, number)
        return killed

    def recover(number: int) -> None:
        where = f"killed before step {number} of {what}"
        got = listed(one)
        allowed = states[acknowledged : acknowledged + 2]
        assert got in allowed, f"got {got}, want one of {allowed}, {where}"
        check_agreement(one, got, where)

    steps = each_step(kill, recover)
    print(f"{what}: {steps} steps")
    assert listed(one) == states[-1]
    assert steps >= 5, f"got {steps} steps, want them found"
    assert said == [], f"got {said}, want no damage found"


def test_a_kill_at_any_step_of_the_first_change_ever(one: Bench, killer: ListKiller) -> None:
    path = one.engine.run_dir / one.key / "whitelist.log"

    def kill(number: int) -> bool:
        one.engine.detach(one.device)
        one.attach(profile="police")
        assert not path.exists()
        return killer.run([("add", ["203.0.113.1"])], number)[1]

    def recover(number: int) -> None:
        got = listed(one)
        one_host = {("destination", None, "203.0.113.1", "bulk")}
        assert got in (set(), one_host), f"got {got} at step {number}"
        check_agreement(one, got, f"killed before step {number}")

    assert each_step(kill, recover) >= 8


@pytest.mark.slow
@pytest.mark.host
def test_a_kill_at_any_step_of_taking_over_an_older_versions_text(
    one: Bench, killer: ListKiller
) -> None:
    folder = one.engine.run_dir / one.key
    base = [entry(text, "bulk") for text in BASE]
    want = {("destination", None, "203.0.113.1", "bulk")}

    def kill(number: int) -> bool:
        one.engine.whitelist_replace(one.device, [*base, entry("192.0.2.9", "bulk", owner="ä")])
        as_older_version(one)
        return killer.run([("add", ["203.0.113.1"])], number)[1]

    def recover(number: int) -> None:
        got = listed(one)
        assert got - want == old, f"got {got}, want {old}, killed before step {number}"
        check_agreement(one, got, f"killed before step {number}")
        assert not (folder / "whitelist").exists(), "got the text left"
        rows = one.engine.whitelist_list(one.device)
        assert [row.owner for row in rows if row.destination == "192.0.2.9"] == ["ä"]

    one.engine.whitelist_replace(one.device, [*base, entry("192.0.2.9", "bulk")])
    old = listed(one)
    assert each_step(kill, recover) >= 10


def as_older_version(one: Bench) -> None:
    """Leave the whitelist as a version left it that kept it as text."""
    folder = one.engine.run_dir / one.key
    state = one.engine.store(one.key).read()
    assert state is not None
    rows = one.engine.whitelist_list(one.device)
    text = export_list(
        entry(f"{row.destination or row.source}", row.traffic_class, owner=row.owner)
        if row.match != "pair"
        else entry(f"{row.source}>{row.destination}", row.traffic_class)
        for row in rows
    )
    (folder / "whitelist").write_text(f"{text}# crc32 {zlib.crc32(text.encode()):08x}\n")
    (folder / "whitelist.log").unlink()


def test_an_older_versions_text_is_taken_over(one: Bench) -> None:
    said: list[str] = []
    one.engine.warn = said.append
    one.engine.whitelist_replace(one.device, [entry(text, "bulk", owner="o") for text in BASE])
    want = one.engine.whitelist_list(one.device)
    generation = one.status().whitelist_generation
    as_older_version(one)
    assert len(one.engine.whitelist_list(one.device)) == len(want), "got it not read as it is"
    change = one.engine.whitelist_add(one.device, [entry("203.0.113.1", "bulk")])
    assert (change.added, change.generation) == (1, generation + 1), f"got {change}"
    assert said == [], f"got {said}"
    assert in_kernel(one) == listed(one)


def test_kills_at_random_lose_nothing_acknowledged(one: Bench) -> None:
    """A process adds hosts one by one and says so; it is killed somewhere, ten times."""
    moments = random.Random(5)
    words = (one.netns, one.device, str(one.engine.run_dir), str(one.engine.bpffs_dir))
    total = 0
    for turn in range(10):
        one.engine.whitelist_replace(one.device, [entry(text, "bulk") for text in BASE])
        process = subprocess.Popen(
            [sys.executable, "-c", _ADDER, *words],
            stdout=subprocess.PIPE, text=True, env=environment(),
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(moments.uniform(0.0, 0.1))
        process.send_signal(signal.SIGKILL)
        done = process.stdout.read().split()
        process.wait(timeout=10)
        process.stdout.close()
        got = listed(one)
        missing = {f"203.0.{turn_of(n)}" for n in map(int, done)} - {row[2] for row in got}
        assert not missing, f"got {missing} lost of {len(done)} acknowledged"
        assert len(got) - len(BASE) - len(done) in (0, 1), f"got {len(got)}, said {len(done)}"
        check_agreement(one, got, f"killed in turn {turn}")
        total += len(done)
    print(f"{total} single changes acknowledged before 10 kills")
    assert total, "got none acknowledged"


def turn_of(number: int) -> str:
    return f"{number >> 8}.{number & 255}"


_ADDER = """
import sys
from pathlib import Path
from shapeagent.policy.whitelist import LineDefaults, parse_entry
from shapeagent.service.engine import Engine
netns, device, run_dir, bpffs_dir = sys.argv[1:]
engine = Engine(netns=netns, run_dir=Path(run_dir), bpffs_dir=Path(bpffs_dir))
with engine.session(device) as session:
    session.whitelist_list()
    print("ready", flush=True)
    for number in range(60_000):
        text = f"203.0.{number >> 8}.{number & 255}"
        session.whitelist_add([parse_entry(text, LineDefaults("bulk"))[0]])
        print(number, flush=True)
"""
