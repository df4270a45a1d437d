# SPDX-License-Identifier: Apache-2.0
"""The metrics page: names, values, formats, and that it never shows a series twice."""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from shapeagent.model.codes import Code
from shapeagent.model.errors import ConflictError
from shapeagent.model.reports import InterfaceStatus
from shapeagent.telemetry.exposition import Family, label_text, render
from shapeagent.telemetry.metrics import AgentFacts, AgentMetrics, MetricsPage
from shapeagent.telemetry.tables import interface_families
from tests.unit.statuskit import class_status, interface_status

OPENMETRICS = "application/openmetrics-text;version=1.0.0"
PROMTOOL = Path("/var/lib/shapectl/programs/usr/bin/promtool")
_METHODS = ("/shapectl.v1.Shaper/Attach", "/shapectl.v1.Shaper/Status")


class Source:
    """Answers with what a test put there, and counts how often it was asked."""

    def __init__(self, *statuses: InterfaceStatus) -> None:
        self.statuses = statuses
        self.error: Exception | None = None
        self.asked = 0

    def status(self) -> tuple[InterfaceStatus, ...]:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return self.statuses


def facts() -> AgentFacts:
    return AgentFacts(
        version="0.1.0",
        source_digest="cd" * 32,
        kernel_release="6.18.0",
        whitelist_capacity_entries=1_000_000,
        certificate_expiry_unix_s={"server": 2e9, "ca": 3e9},
    )


def new_metrics() -> AgentMetrics:
    return AgentMetrics(
        grpc_methods=_METHODS, reconcile_actions=("attach",), conflict_kinds=("qdisc",)
    )


def page_of(source: Source, **options: object) -> MetricsPage:
    return MetricsPage(source, facts, new_metrics(), **options)  # type: ignore[arg-type]


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return (name, labels) → value of a page in the text format; fails on a repeated series."""
    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in parse_text(text):
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in found, f"got {key} twice, want it once"
            found[key] = sample.value
    return found


def value(text: str, name: str, **labels: str) -> float:
    wanted = {key.rstrip("_"): text for key, text in labels.items()}
    return samples(text)[name, tuple(sorted(wanted.items()))]


def read(page: MetricsPage) -> str:
    return page.render()[1].decode()


def busy_interface(device: str = "eth0") -> InterfaceStatus:
    bulk = class_status(
        packets=10, wire_bytes=15_000, drops=2, drop_wire_bytes=3_000, ce_marks=4,
        no_socket_packets=5, over_segment_packets=6, backlog_bytes=777, queue_drops=8,
        queue_sent_bytes=9_000, queue_sent_packets=7, lease_s_left=1.5,
    )  # fmt: skip
    return interface_status(device, classes=(bulk, class_status("bulk", "ingress", packets=3)))


def test_every_number_of_a_class_is_on_the_page() -> None:
    text = read(page_of(Source(busy_interface())))
    place = {"interface": "eth0", "direction": "egress", "class_": "bulk"}
    wanted = {
        "shapectl_class_packets_total": 10,
        "shapectl_class_wire_bytes_total": 15_000,
        "shapectl_class_ceiling_dropped_wire_bytes_total": 3_000,
        "shapectl_class_ce_marks_total": 4,
        "shapectl_class_no_socket_packets_total": 5,
        "shapectl_class_over_segment_packets_total": 6,
        "shapectl_class_queue_sent_bytes_total": 9_000,
        "shapectl_class_queue_sent_packets_total": 7,
        "shapectl_class_guarantee_bytes_per_second": 1_250_000,
        "shapectl_class_ceiling_bytes_per_second": 10_000_000,
        "shapectl_class_safe_ceiling_bytes_per_second": 5_000_000,
        "shapectl_class_ceiling_in_force_bytes_per_second": 10_000_000,
        "shapectl_class_lease_remaining_seconds": 1.5,
        "shapectl_class_backlog_bytes": 777,
    }
    got = {name: value(text, name, **place) for name in wanted}
    assert got == wanted
    assert value(text, "shapectl_class_drops_total", reason="ceiling", **place) == 2
    assert value(text, "shapectl_class_drops_total", reason="queue", **place) == 8


def test_what_a_class_does_not_have_is_no_sample() -> None:
    found = samples(read(page_of(Source(busy_interface()))))
    names = {name for name, labels in found if ("direction", "ingress") in labels}
    assert "shapectl_class_packets_total" in names
    absent = {"lease_remaining_seconds", "backlog_bytes", "ceiling_bytes_per_second"}
    assert not {f"shapectl_class_{name}" for name in absent} & names, f"got {names}"


def test_every_code_has_a_sample_before_it_happens() -> None:
    text = read(page_of(Source(interface_status())))
    for code in Code:
        name = "shapectl_notes_total" if code.is_note else "shapectl_verdicts_total"
        want = {"default": 3, "rule-port": 9, "ce-mark": 1}.get(code.label, 0)
        got = value(text, name, interface="eth0", direction="egress", code=code.label)
        assert got == want, f"got {got} for {code.label}, want {want}"
        assert value(text, name, interface="eth0", direction="ingress", code=code.label) == 0


def test_interface_whitelist_and_facts_are_on_the_page() -> None:
    one = interface_status(problems=("gone",), warnings=("a", "b"), unconfirmed_s=12.5)
    text = read(page_of(Source(one)))
    wanted = {
        "shapectl_interface_link_rate_bytes_per_second": 12_500_000,
        "shapectl_interface_segment_limit_bytes": 3028,
        "shapectl_interface_attached_timestamp_seconds": 1_893_456_000,
        "shapectl_interface_programs": 2,
        "shapectl_interface_problems": 1,
        "shapectl_interface_warnings": 2,
        "shapectl_interface_unconfirmed_seconds": 12.5,
        "shapectl_whitelist_entries": 2,
        "shapectl_whitelist_generation": 5,
    }
    got = {name: value(text, name, interface="eth0") for name in wanted}
    assert got == wanted
    assert value(text, "shapectl_whitelist_capacity_entries") == 1_000_000
    assert value(text, "shapectl_certificate_expiry_timestamp_seconds", certificate="ca") == 3e9
    assert value(text, "shapectl_kernel_info", release="6.18.0") == 1
    assert value(text, "shapectl_status_up") == 1
    assert "process_resident_memory_bytes" in text
    assert 'shapectl_interface_info{interface="eth0",profile="htb",ingress="count"' in text


def test_both_formats_say_the_same() -> None:
    page = page_of(Source(busy_interface(), interface_status("eth1")), clock_s=lambda: 0.0)
    plain_type, plain = page.render("text/plain;version=0.0.4")
    open_type, text = page.render(OPENMETRICS)
    assert plain_type.startswith("text/plain; version=0.0.4"), f"got {plain_type}"
    assert open_type.startswith("application/openmetrics-text; version=1.0.0"), f"got {open_type}"
    assert text.endswith(b"# EOF\n")
    found = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parse_openmetrics(text.decode())  # type: ignore[no-untyped-call]
        for sample in family.samples
    }
    other = samples(plain.decode())
    changing = {name for name, _ in other if name.startswith("process_")}
    assert {k: v for k, v in found.items() if k[0] not in changing} == {
        k: v for k, v in other.items() if k[0] not in changing
    }


def test_a_name_that_two_attachments_share_is_shown_once() -> None:
    gone = interface_status(programs={}, attached_unix_s=9e9, whitelist_entries=1)
    new = interface_status(index=9, attached_unix_s=1.0, whitelist_entries=2)
    for both in ((gone, new), (new, gone)):
        text = read(page_of(Source(*both)))
        assert value(text, "shapectl_whitelist_entries", interface="eth0") == 2


def test_no_address_is_a_label() -> None:
    names = {
        name
        for family in interface_families((busy_interface(), interface_status("eth1")))
        for labels, _ in family.rows
        for name in (part.split("=")[0] for part in labels.strip("{}").split(","))
    }
    allowed = {
        *("interface", "direction", "class", "reason", "code"),
        *("profile", "ingress", "hook", "shadow", "policy_digest"),
    }
    assert names <= allowed, f"got {names - allowed} beyond {allowed}"


def test_what_callers_invent_makes_no_new_series() -> None:
    metrics = new_metrics()
    page = MetricsPage(Source(), facts, metrics)
    before = len(samples(read(page)))
    for number in range(50):
        metrics.grpc_call(f"/x/{number}", f"CODE{number}", 0.01)
        metrics.reconcile_action(f"a{number}")
        metrics.conflict(f"k{number}")
        metrics.whitelist_update(f"w{number}", 0.001)
    text = read(page)
    assert value(text, "shapectl_grpc_calls_total", method="other", code="other") == 50
    assert value(text, "shapectl_reconcile_actions_total", action="other") == 50
    # two counters, two histograms with buckets, sum and count, each once for "other"
    grown = len(samples(text)) - before
    assert grown == 3 + (9 + 1 + 2) + (12 + 1 + 2), f"got {grown} new series"


def test_counts_of_the_agent_begin_at_zero_and_grow() -> None:
    metrics = new_metrics()
    page = MetricsPage(Source(), facts, metrics)
    method = _METHODS[0]
    for code in ("OK", "INTERNAL", "UNKNOWN"):
        assert value(read(page), "shapectl_grpc_calls_total", method=method, code=code) == 0
    assert value(read(page), "shapectl_reconcile_actions_total", action="attach") == 0
    metrics.grpc_call(method, "OK", 0.25)
    metrics.grpc_call(method, "PERMISSION_DENIED", 0.001)
    metrics.whitelist_update("single", 0.0021)
    metrics.reconcile_action("attach")
    metrics.conflict("qdisc")
    metrics.config_reload(accepted=False)
    text = read(page)
    assert value(text, "shapectl_grpc_calls_total", method=method, code="PERMISSION_DENIED") == 1
    assert value(text, "shapectl_grpc_call_seconds_count", method=method) == 2
    assert value(text, "shapectl_grpc_call_seconds_bucket", method=method, le="0.1") == 1
    assert value(text, "shapectl_whitelist_update_seconds_bucket", kind="single", le="0.002") == 0
    assert value(text, "shapectl_whitelist_update_seconds_bucket", kind="single", le="0.003") == 1
    assert value(text, "shapectl_reconcile_actions_total", action="attach") == 1
    assert value(text, "shapectl_reconcile_conflicts_total", kind="qdisc") == 1
    assert value(text, "shapectl_config_reloads_total", result="refused") == 1
    assert "_created" not in text


def test_scrapers_that_come_together_share_a_look() -> None:
    source, now = Source(interface_status()), [100.0]
    page = page_of(source, clock_s=lambda: now[0])
    for accept in ("", OPENMETRICS, "", OPENMETRICS):
        page.render(accept)
    assert source.asked == 1, f"got {source.asked} readings at one moment, want 1"
    now[0] += 0.25
    source.statuses = (interface_status(whitelist_entries=7),)
    assert value(read(page), "shapectl_whitelist_entries", interface="eth0") == 7
    assert source.asked == 2


@pytest.mark.parametrize(
    ("error", "words"),
    [(ConflictError("agent-busy", "Busy."), "Busy."), (KeyError("x"), "KeyError: 'x'")],
    ids=["shape", "any"],
)
def test_unreadable_interfaces_leave_the_rest_of_the_page(error: Exception, words: str) -> None:
    warned: list[str] = []
    source, now = Source(interface_status()), [0.0]
    page = page_of(source, warn=warned.append, clock_s=lambda: now[0])
    read(page)
    readable = [page.is_readable]
    source.error = error
    for _ in range(3):
        now[0] += 2
        text = read(page)
    assert value(text, "shapectl_status_up") == 0
    assert "shapectl_class_packets_total" not in text, "got old numbers, want none"
    assert "shapectl_build_info" in text
    readable.append(page.is_readable)
    assert readable == [True, False], f"got {readable}"
    assert warned == [f"metrics: the interfaces cannot be read: {words}"], f"got {warned}"
    source.error, now[0] = None, now[0] + 2
    assert value(read(page), "shapectl_status_up") == 1


def test_a_page_can_be_made_again_beside_another_agent() -> None:
    """Case C99: a reload must not register anything twice."""
    metrics = new_metrics()
    for _ in range(3):
        page = MetricsPage(Source(interface_status()), facts, metrics)
        samples(read(page))
        page.close()
    samples(read(page_of(Source(interface_status()))))


@given(st.text(max_size=20))
def test_any_label_text_is_read_back_as_it_was(text: str) -> None:
    clean = text.encode("utf-8", "replace").decode()
    family = Family("m", "gauge", "h", [(label_text(class_=text), 1)])
    (found,) = parse_text(render([family], openmetrics=False))
    assert found.samples[0].labels == {"class": clean}, f"got {found.samples}"


def test_large_numbers_keep_their_digits() -> None:
    big = 2**53 - 1
    one = interface_status(classes=(class_status(wire_bytes=big),))
    text = read(page_of(Source(one)))
    place = {"interface": "eth0", "direction": "egress", "class_": "bulk"}
    assert value(text, "shapectl_class_wire_bytes_total", **place) == big
    assert all(math.isfinite(number) for number in samples(text).values())


@pytest.fixture
def promtool() -> Callable[[str], str]:
    """Give a function that returns what `promtool check metrics` finds in a page."""
    if not os.access(PROMTOOL, os.X_OK):
        pytest.skip("promtool is missing: sudo packaging/setup-programs.sh prometheus")

    def check(text: str) -> str:
        done = subprocess.run(
            [PROMTOOL, "check", "metrics"],
            input=text, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        return done.stdout + done.stderr

    return check


def test_promtool_finds_nothing_in_the_page(promtool: Callable[[str], str]) -> None:
    found = promtool(read(page_of(Source(busy_interface(), interface_status("eth1")))))
    assert found == "", f"got {found}, want no finding"


def test_promtool_does_find_what_is_wrong(promtool: Callable[[str], str]) -> None:
    found = promtool("# HELP a_milliseconds x\n# TYPE a_milliseconds counter\na_milliseconds 1\n")
    assert "a_milliseconds" in found, f"got {found!r}, want findings"


def test_sixteen_classes_on_eight_interfaces_are_a_page() -> None:
    names = tuple(f"class{number}" for number in range(16))
    classes = tuple(class_status(n, d) for d in ("egress", "ingress") for n in names)
    source = Source(*(interface_status(f"eth{n}", classes=classes) for n in range(8)))
    found = samples(read(page_of(source)))
    each = {labels for name, labels in found if name == "shapectl_class_packets_total"}
    assert len(each) == 8 * 2 * 16
