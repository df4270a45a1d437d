# SPDX-License-Identifier: Apache-2.0
"""Network namespaces and veth pairs for tests, removed even when a test fails.

Everything lives in namespaces named `shp-<8 hex>`; the host's own namespace
is never touched. At the end of each test the fixtures check that nothing of
it is left: no process in its namespaces, no namespace, no link in the host.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from enginekit import Bench, engine_for, receive_in_order
from netlab import VethPair, ip

from shapeagent.kernel import tcx
from shapeagent.model.types import Hook


@pytest.fixture
def netns_factory() -> Iterator[Callable[[], str]]:
    """Give a function that creates a namespace with `lo` up and returns its name."""
    if os.geteuid() != 0:
        pytest.skip("needs root to create network namespaces")
    host_links = _host_links()
    names: list[str] = []

    def create() -> str:
        name = f"shp-{secrets.token_hex(4)}"
        names.append(name)
        ip("netns", "add", name)
        ip("link", "set", "lo", "up", netns=name)
        return name

    leaks: list[str] = []
    try:
        yield create
    finally:
        for name in reversed(names):
            leaks += _remove_netns(name)
    leaks += [f"link {link} in the host" for link in sorted(_host_links() - host_links)]
    assert not leaks, f"got left behind: {', '.join(leaks)}, want nothing"


@pytest.fixture
def veth_pair(netns_factory: Callable[[], str]) -> Callable[..., VethPair]:
    """Give a function that creates a veth pair between two new namespaces, both ends up.

    Its arguments: `queues` (tx and rx queues of both ends) and `mtu`.
    """

    def create(queues: int = 1, mtu: int = 1500) -> VethPair:
        pair = VethPair(netns=netns_factory(), peer_netns=netns_factory())
        queue_words = ("numtxqueues", str(queues), "numrxqueues", str(queues))
        ip(
            *("link", "add", "name", pair.device, "mtu", str(mtu), *queue_words),
            *("type", "veth", "peer", "name", pair.peer_device, "netns", pair.peer_netns),
            *("mtu", str(mtu), *queue_words),
            netns=pair.netns,
        )
        ends = (
            (pair.netns, pair.device, pair.address4, pair.address6),
            (pair.peer_netns, pair.peer_device, pair.peer_address4, pair.peer_address6),
        )
        for netns, device, address4, address6 in ends:
            ip("address", "add", f"{address4}/24", "dev", device, netns=netns)
            ip("address", "add", f"{address6}/64", "dev", device, "nodad", netns=netns)
            ip("link", "set", device, "up", netns=netns)
        for netns, device, _, address6 in ends:
            _wait_until_up(netns, device, address6)
        return pair

    return create


def _wait_until_up(netns: str, device: str, address6: str, deadline_s: float = 5.0) -> None:
    """Return once the kernel has noticed the carrier; until then it flushes routes by itself."""
    end = time.monotonic() + deadline_s
    asked = (
        (("link", "show", device), "state UP"),
        (("-6", "route", "show", "table", "local"), address6),
    )
    for words, wanted in asked:
        while wanted not in ip(*words, netns=netns):
            assert time.monotonic() < end, f"{device} in {netns} is not up after {deadline_s} s"


def _host_links() -> set[str]:
    """Return the host's links that carry a name of ours (others belong to other people)."""
    return {name for name in os.listdir("/sys/class/net") if name.startswith("shp")}


def _remove_netns(name: str) -> list[str]:
    """Remove a namespace of ours; return what was left in it or could not be removed."""
    if not Path("/run/netns", name).exists():
        return []
    leaks: list[str] = []
    for pid in map(int, ip("netns", "pids", name).split()):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            os.kill(pid, signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):
            continue
        leaks.append(f"process {pid} ({command.strip()}) in {name}")
    try:
        ip("netns", "delete", name)
    except AssertionError as error:
        leaks.append(f"{name}: {error}")
    return leaks


@pytest.fixture
def hook_kind() -> str | None:
    """How `bench` attaches: None leaves it to attach; the marker `hooks` gives others."""
    return None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test once for each hook that its marker `hooks` names and the kernel has."""
    marker = metafunc.definition.get_closest_marker("hooks")
    if marker is not None and "hook_kind" in metafunc.fixturenames:
        has_tcx = tcx.is_supported()
        kinds = [one for one in marker.args if one != Hook.TCX.value or has_tcx]
        metafunc.parametrize("hook_kind", kinds)


@pytest.fixture
def bench(
    veth_pair: Callable[..., VethPair], tmp_path: Path, hook_kind: str | None
) -> Iterator[Callable[..., Bench]]:
    """Give a function that makes a veth pair and an engine for its device.

    Its arguments are those of `veth_pair`.
    """
    with contextlib.ExitStack() as stack:

        def create(**options: Any) -> Bench:
            pair = veth_pair(**options)
            receive_in_order(pair.netns, pair.device)
            receive_in_order(pair.peer_netns, pair.peer_device)
            engine = stack.enter_context(engine_for(pair.netns, tmp_path))
            one = Bench(
                engine=engine, netns=pair.netns, device=pair.device, pair=pair, hook=hook_kind
            )
            stack.callback(one.check_put_back)
            return one

        yield create
