# SPDX-License-Identifier: Apache-2.0
"""Foreign trees of kinds that the development machine's kernel lacks: put back, or refused."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from enginekit import SIGNAL_UDP, Bench, UdpSink, add_bpf_filter, send_datagrams, wait_until
from netlab import load_program, note_change, tc
from treekit import HTB, build, tc_says

from shapeagent.model.errors import ConflictError
from shapeagent.model.types import Direction

pytestmark = [pytest.mark.vm, pytest.mark.netns]

SCRIPT = Path(__file__).resolve().parents[2] / "packaging" / "shapectl-panic-off"

# `tc` words after `qdisc add dev DEV root handle 7:`, or whole lines as in treekit.
KINDS = {
    "fq_codel": "fq_codel limit 1234 flows 512 target 3ms interval 77ms ecn memory_limit 1000000",
    "codel": "codel limit 500 target 3ms interval 77ms ecn",
    "fq": "fq limit 5000 flow_limit 50 maxrate 90mbit nopacing horizon 3s",
    "fq with defaults": "fq",
    "prio": "prio bands 5 priomap 1 2 2 2 1 2 0 0 1 1 1 1 1 1 1 4",
    "sfq": "sfq perturb 10 quantum 3000 limit 100 depth 60 divisor 512",
    "netem": "netem limit 777 delay 20ms loss 3% duplicate 1%",
    "pfifo_fast": "pfifo_fast",
}
NO_WORDS = {
    "fq_codel with ce": "fq_codel ce_threshold 250us noecn",
    "cake": "cake bandwidth 50mbit diffserv4 rtt 30ms overhead 18 nat",
    "netem with more": "netem limit 777 delay 20ms rate 20mbit reorder 5% gap 3",
    "ets": "ets bands 4 strict 2 quanta 3000 2000",
}
TREES = {
    "hfsc": """
qdisc add dev DEV root handle 1: hfsc default 20
class add dev DEV parent 1: classid 1:1 hfsc sc rate 90mbit ul rate 90mbit
class add dev DEV parent 1:1 classid 1:10 hfsc rt m1 20mbit d 10ms m2 5mbit ls rate 30mbit
class add dev DEV parent 1:1 classid 1:20 hfsc ls rate 60mbit
qdisc add dev DEV parent 1:10 handle 10: fq_codel
filter add dev DEV parent 1: protocol ip prio 1 u32 match ip dport 123 0xffff flowid 1:10
""",
    "drr": """
qdisc add dev DEV root handle 1: drr
class add dev DEV parent 1: classid 1:1 drr quantum 1500
class add dev DEV parent 1: classid 1:2 drr quantum 3000
filter add dev DEV parent 1: protocol ip prio 1 handle 6 fw flowid 1:1
filter add dev DEV parent 1: protocol all prio 2 matchall flowid 1:2
""",
    "qfq": """
qdisc add dev DEV root handle 1: qfq
class add dev DEV parent 1: classid 1:1 qfq weight 10 maxpkt 2000
filter add dev DEV parent 1: protocol all prio 2 matchall flowid 1:1
""",
    "prio with leaves": """
qdisc add dev DEV root handle 1: prio
qdisc add dev DEV parent 1:1 handle 11: tbf rate 10mbit burst 10k limit 100k
qdisc add dev DEV parent 1:2 handle 12: fq_codel target 4ms
qdisc add dev DEV parent 1:3 handle 13: netem delay 5ms
filter add dev DEV parent 1: protocol ip prio 1 flower ip_proto udp dst_port 123 classid 1:1
filter add dev DEV parent 1: protocol ip prio 2 basic match 'u32(u32 1 1 at 0)' classid 1:2
""",
    "drop and pass": """
qdisc add dev DEV root handle 1: prio
filter add dev DEV parent 1: protocol ip prio 1 u32 match ip dport 9 0xffff action drop
filter add dev DEV parent 1: protocol ip prio 2 u32 match ip dport 8 0xffff action pass
""",
}
REFUSED = {
    "red": ("red limit 400k min 30k max 90k avpkt 1000 burst 55 bandwidth 10mbit", "red 7:"),
    "netem with jitter": ("netem delay 20ms 5ms distribution normal", "netem 7:"),
}


def take_over_and_back(one: Bench) -> None:
    shown, before = tc_says(one.netns, one.device), one.host_state()
    for profile in ("htb", "prio"):
        one.attach(takeover=True, profile=profile)
        assert one.status().problems == (), f"got {one.status().problems}"
        assert one.engine.detach(one.device).notes == ()
        got = tc_says(one.netns, one.device)
        assert got == shown, f"got {json.dumps(got)}, want {json.dumps(shown)}"
        found = one.host_state()
        assert found == before, f"got {found}, want {before}"


def panic_off_and_back(one: Bench) -> None:
    """With the lines alone; `prio` and its friends are words of tc as well."""
    shown, before = tc_says(one.netns, one.device), one.host_state()
    plan = one.attach(takeover=True).plan
    assert "no words" not in str(plan.warnings), f"got {plan.warnings}, want lines for all"
    undo = one.engine.run_dir / one.key / "undo"
    assert stat.S_IMODE(undo.stat().st_mode) == 0o600, f"got {undo.stat()}"
    lines = undo.read_text()
    done = subprocess.run(
        ["sh", str(SCRIPT), "--state", str(one.engine.run_dir)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"got {done} from {lines}"
    got = tc_says(one.netns, one.device)
    assert got == shown, f"got {json.dumps(got)} from {lines}, want {json.dumps(shown)}"
    # a tree that tc made may differ in what tc neither takes nor shows, such as netem's seed
    found = dataclasses.replace(one.host_state(), tree=before.tree)
    assert found == before, f"got {found}, want {before}"
    note_change(one.netns)


@pytest.mark.parametrize("kind", KINDS)
def test_a_root_of_each_kind_comes_back(bench: Callable[..., Bench], kind: str) -> None:
    one = bench()
    build(f"qdisc add dev DEV root handle 7: {KINDS[kind]}", one.netns, one.device)
    take_over_and_back(one)
    panic_off_and_back(one)


@pytest.mark.parametrize("kind", NO_WORDS)
def test_a_root_without_words_of_tc_comes_back_by_detach(
    bench: Callable[..., Bench], kind: str
) -> None:
    """What shapectl-panic-off cannot make again is said in the plan, and detach makes it."""
    one = bench()
    build(f"qdisc add dev DEV root handle 7: {NO_WORDS[kind]}", one.netns, one.device)
    take_over_and_back(one)
    plan = one.attach(takeover=True).plan
    assert "no words" in str(plan.warnings), f"got {plan.warnings}, want it said"
    one.engine.detach(one.device)


@pytest.mark.parametrize("name", TREES)
def test_a_tree_of_each_kind_comes_back(bench: Callable[..., Bench], name: str) -> None:
    one = bench()
    build(TREES[name], one.netns, one.device)
    take_over_and_back(one)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_root_that_cannot_be_told_whole_is_refused(
    bench: Callable[..., Bench], kind: str
) -> None:
    """RED's damping table and netem's distribution are in no dump."""
    one = bench()
    words, named = REFUSED[kind]
    build(f"qdisc add dev DEV root handle 7: {words}", one.netns, one.device)
    before = one.host_state()
    with pytest.raises(ConflictError) as caught:
        one.attach(takeover=True)
    assert caught.value.reference == "qdisc-not-restorable", f"got {caught.value}"
    assert named in caught.value.message, f"got {caught.value.message}, want {named}"
    assert one.host_state() == before, "got a changed host, want nothing done"


def test_an_fq_of_an_edt_writer_is_not_taken_over(bench: Callable[..., Bench]) -> None:
    """Cilium's bandwidth manager stamps packets, and its fq sends them in time."""
    one = bench()
    tc("qdisc", "add", "dev", one.device, "root", "handle", "1:", "fq", netns=one.netns)
    tc("qdisc", "add", "dev", one.device, "clsact", netns=one.netns)
    descriptor = load_program()
    add_bpf_filter(one.netns, one.device, Direction.EGRESS, descriptor, pref=1)
    os.close(descriptor)
    before = one.host_state()
    for takeover in (False, True):
        for profile in ("htb", "edt", "prio"):
            with pytest.raises(ConflictError) as caught:
                one.attach(takeover=takeover, profile=profile)
            assert caught.value.reference == "edt-writer", f"got {caught.value}"
    assert one.host_state() == before, "got a changed host, want nothing done"
    one.attach(profile="police")  # touches no qdisc
    one.engine.detach(one.device)
    assert one.host_state() == before, f"got {one.host_state()}, want {before}"


def test_an_fq_without_a_writer_is_taken_over_by_edt(bench: Callable[..., Bench]) -> None:
    """Of one queue and of several, with a foreign fq under each; heartbeats pass all along."""
    for queues in (1, 4):
        one = bench(queues=queues)
        text = "qdisc add dev DEV root handle 1: fq limit 5000"
        if queues > 1:
            text = "qdisc add dev DEV root handle 1: mq\n" + "\n".join(
                f"qdisc add dev DEV parent 1:{queue} handle 1{queue}: fq limit {1000 * queue}"
                for queue in range(1, queues + 1)
            )
        build(text, one.netns, one.device)
        shown, before = tc_says(one.netns, one.device), one.host_state()
        with UdpSink(one.pair.peer_netns, SIGNAL_UDP) as sink:
            one.attach(takeover=True, profile="edt")
            send_datagrams(one.pair, SIGNAL_UDP, 20)
            wait_until(lambda sink=sink: sink.received == 20, "20 heartbeats")  # type: ignore[misc]
            one.engine.detach(one.device)
            send_datagrams(one.pair, SIGNAL_UDP, 20)
            wait_until(lambda sink=sink: sink.received == 40, "20 more")  # type: ignore[misc]
        assert tc_says(one.netns, one.device) == shown, f"got {tc_says(one.netns, one.device)}"
        assert one.host_state() == before, f"got {one.host_state()}, want {before}"


def test_htb_with_fq_codel_leaves_comes_back(bench: Callable[..., Bench]) -> None:
    one = bench()
    build(HTB, one.netns, one.device)
    tc(
        *("qdisc", "replace", "dev", one.device, "parent", "5:21", "handle", "21:", "fq_codel"),
        netns=one.netns,
    )
    take_over_and_back(one)
    panic_off_and_back(one)
