# SPDX-License-Identifier: Apache-2.0
"""Whitelists kept over a reboot, which takes the run folder and the maps of the kernel."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from enginekit import Bench, entry
from netlab import ip

from shapeagent.model.errors import ConflictError
from shapeagent.model.reports import ExplainRequest
from shapeagent.service import listplace

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
]

LINES = ("192.0.2.9 owner=ops reason=etcd", "198.51.100.0/24 match=either", "10.0.0.1>10.0.0.2")


@pytest.fixture
def one(bench: Callable[..., Bench], tmp_path: Path) -> Bench:
    made = bench()
    made.engine.lists_dir = tmp_path / "lists"
    made.attach(profile="police")
    return made


def kept_at(one: Bench) -> Path:
    assert one.engine.lists_dir is not None
    return listplace.place_of(one.engine.lists_dir, one.netns, one.device)


def reboot(one: Bench) -> None:
    """Take away what a reboot takes: filters, pins, the run folder."""
    path = kept_at(one)
    data = path.read_bytes()
    one.engine.detach(one.device)
    assert not path.exists(), "got the list kept over a detach, want it gone"
    path.write_bytes(data)
    shutil.rmtree(one.engine.run_dir)


def reason(one: Bench, address: str) -> str:
    request = ExplainRequest(one.pair.address4, address, destination_port=9)
    return one.engine.explain(one.device, request).reason


def test_a_whitelist_is_in_force_again_after_a_reboot(one: Bench) -> None:
    one.engine.whitelist_add(one.device, [entry(line, "bulk") for line in LINES])
    one.engine.whitelist_add(one.device, [entry("192.0.2.77", "bulk")])
    want = one.engine.whitelist_list(one.device)
    generation = one.status().whitelist_generation
    reboot(one)
    one.attach(profile="police")
    assert reason(one, "192.0.2.9") == "default"
    one.engine.whitelist_expire(one.device)  # whatever opens it
    assert one.engine.whitelist_list(one.device) == want
    assert reason(one, "192.0.2.9") == "whitelist-host"
    assert one.status().whitelist_generation == generation
    assert one.state()["whitelist_entries"] == len(want)
    assert one.status().warnings == () or not any("whitelist" in w for w in one.status().warnings)


def test_an_entry_that_expired_meanwhile_does_not_come_back(one: Bench) -> None:
    ends = time.time() + 0.3
    one.engine.whitelist_add(one.device, [entry("192.0.2.9", "bulk", expires_unix_s=ends)])
    one.engine.whitelist_add(one.device, [entry("192.0.2.10", "bulk")])
    reboot(one)
    while time.time() < ends:
        pass
    one.attach(profile="police")
    assert one.engine.whitelist_expire(one.device).removed == 1
    assert reason(one, "192.0.2.9") == "default"
    assert reason(one, "192.0.2.10") == "whitelist-host"


def test_a_list_of_the_command_line_is_taken_along(one: Bench) -> None:
    """It was made before an agent ran, and is changed without it later."""
    lists_dir, one.engine.lists_dir = one.engine.lists_dir, None
    one.engine.whitelist_add(one.device, [entry(line, "bulk") for line in LINES])
    link = one.engine.run_dir / one.key / "whitelist.log"
    assert not link.is_symlink()
    one.engine.lists_dir = lists_dir
    one.engine.whitelist_expire(one.device)
    assert link.is_symlink()
    one.engine.lists_dir = None
    one.engine.whitelist_replace(one.device, [entry("192.0.2.77", "bulk")])
    assert link.is_symlink(), "got the link replaced by a file"
    one.engine.lists_dir = lists_dir
    assert len(one.engine.whitelist_list(one.device)) == 1
    reboot(one)
    one.attach(profile="police")
    one.engine.whitelist_expire(one.device)
    assert reason(one, "192.0.2.77") == "whitelist-host"


def test_a_damaged_list_is_put_aside_and_said(one: Bench) -> None:
    said: list[str] = []
    one.engine.warn = said.append
    one.engine.whitelist_add(one.device, [entry(line, "bulk") for line in LINES])
    path = kept_at(one)
    data = bytearray(path.read_bytes())
    data[200] ^= 0xFF
    path.write_bytes(data)
    assert len(one.engine.whitelist_list(one.device)) == 3, "got it not read from the kernel"
    assert any("whitelist was damaged" in text for text in said), f"got {said}"
    path.write_bytes(data)
    reboot(one)
    one.attach(profile="police")
    said.clear()
    one.engine.whitelist_expire(one.device)
    assert one.engine.whitelist_list(one.device) == ()
    assert any(str(path) in text for text in said), f"got {said}"
    assert list(path.parent.glob("*.corrupt-*")), "got nothing put aside"


def test_a_folder_that_somebody_removed_is_made_again(one: Bench) -> None:
    said: list[str] = []
    one.engine.warn = said.append
    one.engine.whitelist_add(one.device, [entry(line, "bulk") for line in LINES])
    assert one.engine.lists_dir is not None
    shutil.rmtree(one.engine.lists_dir)
    assert len(one.engine.whitelist_list(one.device)) == 3, "got it not read from the kernel"
    assert any("it is missing" in text for text in said), f"got {said}"
    one.engine.whitelist_add(one.device, [entry("192.0.2.77", "bulk")])
    assert kept_at(one).exists()


def test_entries_of_a_class_that_the_policy_lost_are_left_out(one: Bench, tmp_path: Path) -> None:
    one.engine.whitelist_add(one.device, [entry("192.0.2.9", "bulk"), entry("192.0.2.10")])
    text = one.engine.store(one.key).read_policy()
    reboot(one)
    policy = tmp_path / "policy.toml"
    policy.write_text(text.replace("stream", "tokens"))
    said: list[str] = []
    one.engine.warn = said.append
    one.attach(profile="police", policy_path=str(policy))
    one.engine.whitelist_expire(one.device)
    got = [row.destination for row in one.engine.whitelist_list(one.device)]
    assert got == ["192.0.2.9"], f"got {got}"
    assert any("'stream'" in text for text in said), f"got {said}"


def test_a_device_that_is_made_again_finds_its_list(one: Bench) -> None:
    one.engine.whitelist_add(one.device, [entry(line, "bulk") for line in LINES])
    one.before = None
    ip("link", "delete", one.device, netns=one.netns)
    ip(
        *("link", "add", "name", one.device, "type", "veth", "peer", "name", one.pair.peer_device),
        *("netns", one.pair.peer_netns),
        netns=one.netns,
    )
    ip("link", "set", one.device, "up", netns=one.netns)
    with pytest.raises(ConflictError):
        one.engine.whitelist_list(one.device)
    one.attach(profile="police")
    one.engine.whitelist_expire(one.device)
    assert len(one.engine.whitelist_list(one.device)) == len(LINES)


@pytest.mark.parametrize("kill", ["before the link", "before the switch"])
def test_a_kill_while_it_is_taken_up_is_finished(
    one: Bench, monkeypatch: pytest.MonkeyPatch, kill: str
) -> None:
    one.engine.whitelist_add(one.device, [entry(line, "bulk") for line in LINES])
    want = one.engine.whitelist_list(one.device)
    reboot(one)
    one.attach(profile="police")

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    if kill == "before the link":
        monkeypatch.setattr(listplace, "_link", stop)
    else:
        monkeypatch.setattr("shapeagent.kernel.datapath.Datapath.replace_lists", stop)
    with pytest.raises(KeyboardInterrupt):
        one.engine.whitelist_expire(one.device)
    monkeypatch.undo()
    one.engine.whitelist_expire(one.device)
    assert one.engine.whitelist_list(one.device) == want
    assert reason(one, "192.0.2.9") == "whitelist-host"
