# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus scrapes the page of a real engine: its queries give what really flowed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from enginekit import (
    BULK,
    MBIT,
    STREAM_TCP,
    Bench,
    TcpFlow,
    UdpSink,
    UdpSource,
    entry,
    pause,
    send_datagrams,
    wait_until,
)
from promkit import (
    PROGRAMS,
    Prometheus,
    http_get,
    listen_in,
    require_prometheus,
    running_prometheus,
)

from shapeagent.telemetry.http import HttpOptions, MetricsServer
from shapeagent.telemetry.metrics import AgentFacts, AgentMetrics, MetricsPage
from tests.unit.test_dashboard import alert_rules, dashboard_queries

pytestmark = [
    pytest.mark.netns,
    pytest.mark.host,
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
]

_METHOD = "/shapectl.v1.Shaper/Status"
_WINDOW_S = 10.0
_DRAW = Path(__file__).resolve().parents[2] / "packaging" / "grafana" / "draw.py"


@dataclass
class Scraped:
    """An attached device whose page is served in its namespace."""

    bench: Bench
    metrics: AgentMetrics
    server: MetricsServer

    @property
    def port(self) -> int:
        port = urlsplit(self.server.url).port
        assert port is not None
        return port

    def page(self) -> str:
        status, body = http_get(self.bench.netns, self.port, "/metrics")
        assert status == 200, f"got {status}"
        return body.decode()


@pytest.fixture
def scraped(bench: Callable[..., Bench]) -> Iterator[Scraped]:
    one = bench()
    one.attach()
    metrics = AgentMetrics(
        grpc_methods=(_METHOD,), reconcile_actions=("attach",), conflict_kinds=("qdisc",)
    )

    def facts() -> AgentFacts:
        return AgentFacts(
            version="0.1.0",
            source_digest="ab" * 32,
            kernel_release=os.uname().release,
            whitelist_capacity_entries=4_000_000,
            certificate_expiry_unix_s={"server": time.time() + 90 * 86_400},
        )

    page = MetricsPage(one.engine, facts, metrics)
    server = MetricsServer(page, HttpOptions(), listener=listen_in(one.netns))
    server.start()
    try:
        yield Scraped(one, metrics, server)
    finally:
        server.close()


def labels_of(key: str) -> dict[str, str]:
    found: dict[str, str] = json.loads(key)
    return found


def wait_scraped(prometheus: Prometheus, times: int = 3) -> None:
    """Return once the page was scraped so often since now."""
    begin_s = time.time()

    def is_scraped() -> bool:
        found = prometheus.query(f"count_over_time(shapectl_status_up[{times + 1}s])")
        errors = {one["lastError"] for one in prometheus.ask("targets")["activeTargets"]}
        assert errors <= {""}, f"got {errors}"
        enough = bool(found) and next(iter(found.values())) >= times
        return enough and time.time() > begin_s + times

    wait_until(is_scraped, f"{times} scrapes", 60)


class Meter:
    """What arrived at the other end, sampled, to be asked about any window later."""

    def __init__(self, sink: UdpSink) -> None:
        self._sink = sink
        self.points: list[tuple[float, int]] = []

    def run(self, seconds: float) -> None:
        end_s = time.time() + seconds
        while time.time() < end_s:
            self.points.append((time.time(), self._sink.wire_bits()))
            pause(0.05)

    def bits_per_s(self, begin_s: float, end_s: float) -> float:
        inside = [point for point in self.points if begin_s <= point[0] <= end_s]
        (first_s, first), (last_s, last) = inside[0], inside[-1]
        assert last_s - first_s > 0.9 * (end_s - begin_s), "got no samples of the whole window"
        return (last - first) / (last_s - first_s)


def test_rate_of_a_class_is_what_arrived(scraped: Scraped, tmp_path: Path) -> None:
    require_prometheus()
    one = scraped.bench
    target = (one.pair.peer_address4, BULK)
    with (
        running_prometheus(one.netns, tmp_path, scraped.port) as prometheus,
        UdpSink(one.pair.peer_netns, BULK) as sink,
        UdpSource(one.netns, target, bits_per_s=8 * MBIT),
    ):
        wait_scraped(prometheus)
        meter = Meter(sink)
        meter.run(_WINDOW_S + 3)
        at_s = meter.points[-1][0] - 0.5
        place = f'{{interface="{one.device}", direction="egress", class="bulk"}}'
        window = f"[{_WINDOW_S:.0f}s]"
        want = meter.bits_per_s(at_s - _WINDOW_S, at_s)
        assert want > 4 * MBIT, f"got only {want:.0f} bit/s of traffic"
        for name in ("wire_bytes_total", "queue_sent_bytes_total"):
            got = 8 * prometheus.value(f"rate(shapectl_class_{name}{place}{window})", at_s)
            if name.startswith("queue"):
                sent = prometheus.value(
                    f"rate(shapectl_class_queue_sent_packets_total{place}{window})", at_s
                )
                got += 8 * 24 * sent
            assert got == pytest.approx(want, rel=0.05), f"got {got:.0f} by {name}, want {want:.0f}"
        others = prometheus.query(
            "sum by (class) (rate(shapectl_class_wire_bytes_total"
            f'{{direction="egress", class=~"stream|normal"}}{window}))',
            at_s,
        )
        assert max(others.values()) < 0.01 * want / 8, f"got {others} in other classes"
        decided = prometheus.value(
            f'rate(shapectl_verdicts_total{{direction="egress", code="rule-port"}}{window})', at_s
        )
        packets = prometheus.value(f"rate(shapectl_class_packets_total{place}{window})", at_s)
        assert decided == pytest.approx(packets, rel=0.05), f"got {decided}, want {packets}"


def test_every_query_has_an_answer(scraped: Scraped, tmp_path: Path) -> None:
    """Of the dashboard; and of each alert what stands before its threshold."""
    require_prometheus()
    one, metrics = scraped.bench, scraped.metrics
    one.engine.whitelist_add(one.device, [entry("192.0.2.7")])
    one.engine.class_set(one.device, "bulk", 20 * MBIT, lease_s=3600)
    target = (one.pair.peer_address4, BULK)
    with contextlib.ExitStack() as stack:
        prometheus = stack.enter_context(running_prometheus(one.netns, tmp_path, scraped.port))
        stack.enter_context(UdpSink(one.pair.peer_netns, BULK))
        # above the ceiling: drops and a queue too
        stack.enter_context(UdpSource(one.netns, target, bits_per_s=30 * MBIT))
        flow = TcpFlow(
            one.netns, one.pair.peer_netns, one.pair.peer_address4, STREAM_TCP, bits_per_s=MBIT
        )
        stack.enter_context(flow)
        for _ in range(8):
            send_datagrams(one.pair, 123, 20)
            for kind in ("single", "batch", "replace"):
                metrics.whitelist_update(kind, 0.002)
            metrics.grpc_call(_METHOD, "OK", 0.01)
            metrics.reconcile_action("attach")
            wait_scraped(prometheus, 1)
        empty = []
        for place, text in dashboard_queries():
            if not prometheus.query(text.replace("[1m]", "[5s]")) and not text.endswith("> 0"):
                empty.append(f"{place}: {text}")
        # no code is noticed on a quiet link, so that panel may be empty
        assert not empty, "got no answer for\n" + "\n".join(empty)
        for rule in alert_rules():
            before_threshold = re.sub(r"\s(?:==|<|>)\s[\d.* ]+$", "", rule["expr"])
            assert before_threshold != rule["expr"], f"got no threshold in {rule['expr']}"
            text = re.sub(r"\[\d+[mh]\]", "[5s]", before_threshold)
            found = prometheus.query(text)
            assert found, f"got no answer for {rule['alert']}: {text}"
            assert all(number == number for number in found.values()) or "histogram" in text
        delay = [text for place, text in dashboard_queries() if place == "Queue delay"]
        delays = prometheus.query(delay[0].replace("[1m]", "[5s]"))
        bulk = next(number for key, number in delays.items() if labels_of(key)["class"] == "bulk")
        assert 0.0005 < bulk < 1, f"got a queue delay of {bulk} s behind a full ceiling"
        drops = prometheus.value(
            'rate(shapectl_class_drops_total{class="bulk", direction="egress", reason="queue"}[5s])'
        )
        assert drops > 100, f"got {drops} drops/s of 10 Mbit/s too much"
        picture = tmp_path / "dashboard.png"
        drawn = subprocess.run(
            [
                *("ip", "netns", "exec", one.netns, sys.executable, str(_DRAW)),
                *("--minutes", "0.5", "--window", "5", str(picture)),
            ],
            capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        assert drawn.returncode == 0, f"got {drawn.stderr}"
        assert picture.read_bytes().startswith(b"\x89PNG"), "got no picture"


def test_rules_are_evaluated_and_one_that_holds_is_pending(
    scraped: Scraped, tmp_path: Path
) -> None:
    require_prometheus()
    one = scraped.bench
    with running_prometheus(one.netns, tmp_path, scraped.port) as prometheus:
        wait_scraped(prometheus)

        def states() -> dict[str, str]:
            (group,) = prometheus.ask("rules")["groups"]
            assert {rule["health"] for rule in group["rules"]} <= {"ok", "unknown"}, f"got {group}"
            return {rule["name"]: rule["state"] for rule in group["rules"]}

        wait_until(lambda: set(states().values()) == {"inactive"}, "all quiet", 20)
        # the unwelcome help of somebody else
        one.before = None
        subprocess.run(
            ["tc", "-n", one.netns, "qdisc", "delete", "dev", one.device, "root"], check=True
        )
        wait_until(
            lambda: states()["ShapectlInterfaceChanged"] == "pending",
            "the alert to be pending",
            20,
        )
        assert {name for name, state in states().items() if state != "inactive"} == {
            "ShapectlInterfaceChanged"
        }


def test_promtool_finds_nothing_in_a_real_page(scraped: Scraped) -> None:
    require_prometheus()
    send_datagrams(scraped.bench.pair, 123, 20)
    done = subprocess.run(
        [PROGRAMS / "promtool", "check", "metrics"],
        input=scraped.page(), capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_detached_interface_leaves_no_series(scraped: Scraped) -> None:
    """Case C98: series go with their owner."""
    assert f'interface="{scraped.bench.device}"' in scraped.page()
    scraped.bench.engine.detach(scraped.bench.device)
    wait_until(
        lambda: f'interface="{scraped.bench.device}"' not in scraped.page(),
        "the page without the interface",
    )
    assert "shapectl_status_up 1" in scraped.page()
