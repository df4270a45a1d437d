# SPDX-License-Identifier: Apache-2.0
"""The engine of an agent, which holds the lock for life: quick where nothing changed, not blind."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agentkit import MOST_START_S, config_text, running_agent
from devicekit import rename
from enginekit import Bench, entry, wait_until
from netlab import ip, tc

from shapeagent.kernel import rtnl, tcx
from shapeagent.kernel.monitor import Watch
from shapeagent.model.agentschema import load_agent_config
from shapeagent.model.errors import ConflictError, FailedError, ShapeError
from shapeagent.model.types import Direction
from shapeagent.service.commanded import CommandedEngine
from shapeagent.service.daemon import Agent

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
]


@pytest.fixture
def one(bench: Callable[..., Bench]) -> Bench:
    made = bench()
    made.attach(profile="police")
    return made


@pytest.fixture
def warned() -> list[str]:
    return []


@pytest.fixture
def engine(one: Bench, warned: list[str]) -> Iterator[CommandedEngine]:
    """An engine that has made one change already: it knows the device."""
    made = CommandedEngine(
        netns=one.netns,
        run_dir=one.engine.run_dir,
        bpffs_dir=one.engine.bpffs_dir,
        holds_lock=True,
        warn=warned.append,
    )
    add(made, one, "203.0.113.1")
    yield made
    made.close()


def add(engine: CommandedEngine, one: Bench, text: str) -> int:
    """Add an entry by the name that the device had at first; return how many there are."""
    return engine.whitelist_add(one.device, [entry(text)]).total


def refusal(engine: CommandedEngine, one: Bench) -> str:
    with pytest.raises(ShapeError) as caught:
        add(engine, one, "203.0.113.9")
    return caught.value.reference


def test_a_change_asks_the_kernel_nothing_that_cannot_have_changed(
    one: Bench, engine: CommandedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    send = rtnl.Rtnl._send

    def counted(self: Any, kind: int, flags: int, body: bytes) -> int:
        asked.append(kind)
        return send(self, kind, flags, body)

    monkeypatch.setattr(rtnl.Rtnl, "_send", counted)
    assert add(engine, one, "203.0.113.2") == 2
    assert asked == [], f"got netlink requests {asked}, want none"
    ip("link", "add", "other0", "type", "veth", "peer", "name", "other1", netns=one.netns)
    assert add(engine, one, "203.0.113.3") == 3
    assert asked, "got no netlink request after links have changed, want some"


def test_another_device_of_the_old_name_is_that_device(one: Bench, engine: CommandedEngine) -> None:
    rename(one.netns, one.device, "was0")
    ip("link", "add", one.device, "type", "veth", "peer", "name", "p9", netns=one.netns)
    try:
        found = refusal(engine, one)
    finally:
        ip("link", "del", one.device, netns=one.netns)
        rename(one.netns, "was0", one.device)
    assert found == "not-attached", f"got {found}"
    assert add(engine, one, "203.0.113.2") == 2


def test_another_device_of_the_old_index_is_not_touched(
    one: Bench, engine: CommandedEngine
) -> None:
    index = str(one.index)
    ip("link", "del", one.device, netns=one.netns)
    words = ("type", "veth", "peer", "name", "p9")
    ip("link", "add", one.device, "index", index, *words, netns=one.netns)
    found = refusal(engine, one)
    assert found == "interface-gone", f"got {found}"
    engine.detach(one.device)


def test_a_file_that_was_damaged_between_two_changes_is_put_right(
    one: Bench, engine: CommandedEngine, warned: list[str]
) -> None:
    path = one.engine.run_dir / one.key / "policy.toml"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert add(engine, one, "203.0.113.2") == 2
    assert path.read_bytes() == whole, "got the damaged policy left"
    assert any("policy.toml was damaged" in text for text in warned), f"got {warned}"


def test_what_another_process_undid_is_not_changed(one: Bench, engine: CommandedEngine) -> None:
    one.engine.detach(one.device)  # as shapectl-panic-off would, past the lock
    found = refusal(engine, one)
    assert found == "not-attached", f"got {found}"


def test_a_failed_change_does_not_keep_the_next_from_looking(
    one: Bench, engine: CommandedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:

        def fail(*_: object) -> None:
            raise OSError(5, "Input/output error")

        patched.setattr(os, "fdatasync", fail)
        with pytest.raises((FailedError, ConflictError)):
            add(engine, one, "203.0.113.2")
    assert add(engine, one, "203.0.113.3") == 2


@pytest.mark.parametrize("traffic_control", [False, True])
def test_a_watch_tells_each_change_once(bench: Callable[..., Bench], traffic_control: bool) -> None:
    one = bench()
    with contextlib.closing(Watch(one.netns, traffic_control=traffic_control)) as watch:
        watch.has_changed()
        assert not watch.has_changed(), "got a change where nothing was changed"
        ip("link", "set", one.device, "mtu", "1400", netns=one.netns)
        assert watch.has_changed(), "got no change of an MTU"
        tc("qdisc", "replace", "dev", one.device, "root", "pfifo", netns=one.netns)
        found = watch.has_changed()
        assert found is traffic_control, f"got {found} for a qdisc, want {traffic_control}"
        ip("link", "del", one.device, netns=one.netns)
        assert watch.has_changed(), "got no change of a removed link"


def test_a_watch_that_lost_messages_says_so(bench: Callable[..., Bench], tmp_path: Path) -> None:
    """F15."""
    one = bench()
    lines = [f"link {verb} f type ifb" if verb == "add" else "link del f"
             for _ in range(400) for verb in ("add", "del")]  # fmt: skip
    batch = tmp_path / "batch"
    batch.write_text("\n".join(lines))
    with contextlib.closing(Watch(one.netns)) as watch:
        watch._netlink.raw.setsockopt(1, 33, 2_048)  # SOL_SOCKET, SO_RCVBUFFORCE
        watch.has_changed()
        ip("-batch", str(batch), netns=one.netns)
        assert watch.has_changed(), "got no change after a flood"
        assert not watch.has_changed(), "got a change twice"


@pytest.mark.skipif(not tcx.is_supported(), reason="this kernel has no tcx")
def test_a_lost_tcx_link_comes_back_though_no_message_tells_of_it(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    one = bench()
    table = f'device = "{one.device}"\nlink_rate = "100mbit"\nhook = "tcx"'
    with running_agent(one, tmp_path, config_text(one, table)) as agent:
        agent.wait_for(r"attached: d0", timeout_s=MOST_START_S)
        agent.wait_for(r"listening: metrics on")
        for count, direction in enumerate((Direction.EGRESS, Direction.EGRESS), 1):
            tcx.remove_link(one.pins, direction)
            agent.wait_for(r"put-back: d0: our egress program", count=count)
        assert one.status().problems == (), f"got {one.status().problems}, want none"


def test_what_happened_before_there_were_metrics_is_counted(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    from test_agent_api import dial, metrics_page

    one = bench()
    table = f'device = "{one.device}"\nlink_rate = "100mbit"'
    for count, action in enumerate(("attach", "adopt"), 1):
        with running_agent(one, tmp_path, config_text(one, table)) as agent:
            agent.wait_for(r"listening: metrics on", count=count, timeout_s=MOST_START_S)
            agent.wait_for(r"attached: d0", count=count)
            with dial(one) as remote:
                remote.whitelist_add(one.device, [entry(f"203.0.113.{count}")])
            page = metrics_page(one)
        lines = [one for one in page.splitlines() if "_actions_" in one or "_update_" in one]
        for line in (
            f'shapectl_reconcile_actions_total{{action="{action}"}} 1.0',
            'shapectl_whitelist_update_seconds_count{kind="single"} 1.0',
        ):
            assert line in lines, f"got no {line!r} in {lines}"


def test_a_look_survives_a_socket_that_fails(
    bench: Callable[..., Bench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F15: what tells of changes is gone: each look reads everything."""
    one = bench()
    one.attach()
    table = f'device = "{one.device}"\nlink_rate = "100mbit"'
    agent = Agent(load_agent_config(config_text(one, table), "test"), netns=one.netns)
    thread = threading.Thread(target=agent.run)

    def fail(_: Watch) -> bool:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    thread.start()
    try:
        wait_until(lambda: told(agent, "attached"), "the adoption", timeout_s=MOST_START_S)
        monkeypatch.setattr(Watch, "has_changed", fail)
        tc("qdisc", "replace", "dev", one.device, "root", "pfifo", netns=one.netns)
        wait_until(lambda: told(agent, "put-back"), "our tree to be put back")
    finally:
        agent.stop()
        thread.join(30)


def told(agent: Agent, kind: str) -> bool:
    return any(event.kind == kind for event in agent.events.after(0)[0])
