# SPDX-License-Identifier: Apache-2.0
"""What a review by fresh eyes found, each with the test that fails without its fix."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from enginekit import Bench, entry, write_policy
from netlab import ip, tc

from shapeagent.kernel import signals
from shapeagent.kernel.abi import SHP_ABI_VERSION
from shapeagent.model.errors import ConflictError
from shapeagent.model.reports import AttachRequest, ExplainRequest
from shapeagent.service.engine import Engine

MBIT = 1_000_000


def test_a_link_in_place_of_the_pin_folder_is_refused_and_not_followed(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    """A bpffs is often 1777: root's clean-up must not unlink what a link points to."""
    one = bench()
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").write_text("x")
    folder = one.engine.bpffs_dir
    folder.mkdir(mode=0o700, exist_ok=True)
    trap = folder / one.key
    trap.symlink_to(victim)
    try:
        with pytest.raises(ConflictError) as caught:
            one.attach()
        assert caught.value.reference == "pins-foreign", f"got {caught.value.reference}"
        assert (victim / "precious").exists(), "got the link followed, want it refused"
    finally:
        trap.unlink()


def test_a_foreign_root_with_our_handle_survives_a_detach(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.attach(profile="htb")
    where = ("dev", one.device, "root", "handle", "5348:", "htb", "default", "30")
    tc("qdisc", "del", "dev", one.device, "root", netns=one.netns)
    tc("qdisc", "add", *where, netns=one.netns)
    report = one.engine.detach(one.device)
    shown = tc("qdisc", "show", "dev", one.device, netns=one.netns)
    assert "htb 5348: root" in shown, f"got {shown}, want the foreign root left alone"
    assert any("left alone" in note for note in report.notes), f"got {report.notes}"
    tc("qdisc", "del", "dev", one.device, "root", netns=one.netns)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_in_the_middle_of_an_attach_leaves_nothing(
    bench: Callable[..., Bench], number: signal.Signals
) -> None:
    one = bench()
    before = one.host_state()

    def shoot(step: str) -> None:
        if "programs" in step:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)  # a second one must not cut the undo short

    engine = Engine(
        netns=one.netns,
        progress=shoot,
        run_dir=one.engine.run_dir,
        bpffs_dir=one.engine.bpffs_dir,
    )
    want = KeyboardInterrupt if number == signal.SIGINT else signals.TerminationSignal
    with pytest.raises(want):
        engine.attach(AttachRequest(device=one.device, link_rate_bits_per_s=100 * MBIT))
    after = one.host_state()
    assert after == before, f"got {after}, want {before}"


def test_a_damaged_attachment_hides_no_other(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.attach(profile="police")
    other = one.engine.run_dir / (one.key.rpartition("-")[0] + "-9999")
    other.mkdir()
    (other / "state.json").write_text("{")
    found = {row.index: row for row in one.engine.status()}
    assert found[one.index].problems == (), f"got {found[one.index].problems}"
    assert "damaged" in found[9999].problems[0] or "state" in found[9999].problems[0]


def test_detach_cleans_up_after_a_device_that_was_made_again(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.attach(profile="htb")
    key = one.key
    pair = one.pair
    ip("link", "delete", pair.device, netns=pair.netns)
    words = ("type", "veth", "peer", "name", "again", "netns", pair.peer_netns)
    ip("link", "add", pair.device, *words, netns=pair.netns)
    report = one.engine.detach(pair.device)
    assert report.changed, f"got {report}, want the old attachment gone"
    left = [
        folder for folder in (one.engine.run_dir, one.engine.bpffs_dir) if (folder / key).exists()
    ]
    assert not left, f"got {left} with {key} left"


def test_another_default_class_is_no_change_in_place(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    one = bench()
    one.attach(profile="htb")
    changed = write_policy(
        tmp_path,
        lambda text: text.replace('default_class = "normal"', 'default_class = "bulk"'),
    )
    with pytest.raises(ConflictError) as caught:
        one.attach(profile="htb", policy_path=changed)
    assert caught.value.reference == "attached-differently", f"got {caught.value.reference}"
    assert one.status().problems == (), f"got {one.status().problems}"


def test_explain_names_the_end_that_decided(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.attach(profile="police")
    one.engine.whitelist_add(
        one.device,
        [
            entry("10.9.0.1 match=source", "bulk"),
            entry("10.9.0.7 match=destination", "stream"),
        ],
    )
    got = one.engine.explain(
        one.device,
        ExplainRequest("10.9.0.1", "10.9.0.7", source_port=1000, destination_port=1001),
    )
    assert (got.traffic_class, got.prefix) == ("stream", "10.9.0.7"), f"got {got}"


def test_an_attachment_of_another_layout_is_refused_and_can_be_detached(
    bench: Callable[..., Bench],
) -> None:
    one = bench()
    one.attach(profile="police")
    assert one.state()["abi_version"] == SHP_ABI_VERSION, f"got {one.state()}, want our version"
    one.change_state(abi_version=0)
    with pytest.raises(ConflictError) as caught:
        one.engine.class_set(one.device, "bulk", 20 * MBIT)
    assert caught.value.reference == "other-version-attached", f"got {caught.value.reference}"
    assert one.engine.detach(one.device).changed
