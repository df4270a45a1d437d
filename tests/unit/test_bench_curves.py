# SPDX-License-Identifier: Apache-2.0
"""The scale curves: jobs that all classifiers can do, filters, charts and the document."""

from __future__ import annotations

import importlib.util
import ipaddress
import sys
from pathlib import Path
from typing import Any

import pytest
from scapy.layers.inet import IP, UDP
from scapy.layers.l2 import Ether

from shapeagent.lab.bench import curves_jobs as jobs
from shapeagent.lab.bench.curves_plot import curves_markdown, plot_curves
from shapeagent.model.errors import InputError, UnsupportedError
from shapeagent.model.schema import MAX_RULE_NUMBER, PROTECTED, load_policy

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
FACTS = {
    "kernel": "6.12.0-test", "clock": "virtual", "cpu": "QEMU", "cpus": 1,
    "memory_mb": 2048, "iproute2": "iproute2-6.1.0",
}  # fmt: skip


def row(curve: str, classifier: str, n: int, ns: float) -> dict[str, Any]:
    return {
        "curve": curve, "classifier": classifier, "n": n, "ns_per_packet": ns,
        "base_ns_per_packet": 4_000.4, "packets": 20_480, "kernel": "6.12.0-test",
        "clock": "virtual",
    }  # fmt: skip


def some_curves() -> dict[str, Any]:
    return {
        "rows": [
            row("prefixes", "u32", 1_000, 15_000.2),
            row("prefixes", "shapectl", 1, 300.0),
            row("prefixes", "shapectl", 1_000, 310.6),
            row("prefixes", "u32", 1, 150.0),
            row("classes", "shapectl", 2, 290.0),
            row("classes", "flower", 16, -3.0),
        ],
        "left_out": [
            {"curve": "prefixes", "classifier": "u32", "n": 100_000, "reason": "too slow"}
        ],
        "facts": FACTS,
    }


@pytest.mark.parametrize(
    ("classes", "rules"), [(2, 16), (4, 0), (16, 16), (4, MAX_RULE_NUMBER - len(PROTECTED))]
)
def test_policy_of_a_job_is_valid_and_has_what_it_says(classes: int, rules: int) -> None:
    text = jobs.policy_text(classes, rules)
    policy = load_policy(text, "test", link_rate_bits_per_s=10_000_000_000)
    assert [one.number for one in policy.classes] == list(range(classes))
    assert sum(1 for rule in policy.rules if not rule.protected) == rules


def test_policy_refuses_more_rules_than_a_flow_word_can_name() -> None:
    with pytest.raises(InputError, match=r"policy|error") as caught:
        load_policy(jobs.policy_text(4, 4_096), "test", link_rate_bits_per_s=10_000_000_000)
    assert "at most 4090 are possible" in caught.value.details[0]


@pytest.mark.parametrize("n", [1, 10, 257, 1_000, 1_000_000])
def test_packets_lie_in_the_prefix_that_decides_them(n: int) -> None:
    job = jobs.job_at("prefixes", n)
    for flow in (0, 1, 77, 4_095, jobs.FIRST_FLOW + 5):
        entry = job.entry_of(flow)
        network = ipaddress.ip_network(
            (jobs.prefix_address(entry), jobs.prefix_length(entry)), strict=True
        )
        packet = Ether(job.frame(flow))
        assert len(job.frame(flow)) == 60
        assert ipaddress.ip_address(packet[IP].dst) in network
        assert packet[UDP].len == 26
        assert packet[IP].len == 46


def test_rules_decide_by_destination_port_and_flows_differ_by_source() -> None:
    job = jobs.job_at("rules", 64)
    packets = [Ether(job.frame(flow)) for flow in range(64)]
    assert {packet[UDP].dport for packet in packets} == set(range(10_000, 10_064))
    assert len({packet[IP].src for packet in packets}) == 64


@pytest.mark.parametrize("n", [1, 2, 10, 100, 4_090])
def test_every_entry_gets_packets(n: int) -> None:
    job = jobs.job_at("rules", n)
    assert {job.entry_of(flow) for flow in job.sample(0)} == set(range(n))


def test_sample_of_many_flows_is_the_same_for_each_classifier() -> None:
    job = jobs.job_at("flows", 1_000_000)
    assert job.sample(3) == job.sample(3)
    assert job.sample(3) != job.sample(4)
    assert max(job.sample(3)) > 900_000
    assert sum(job.classes_of(job.sample(3)).values()) == jobs.SAMPLE_PACKETS


def test_stages_share_a_policy() -> None:
    stages = jobs.stages_of({"prefixes": [10, 1, 10], "rules": [16, 1], "classes": []})
    assert [[job.n for job in stage] for stage in stages] == [[1, 10], [1], [16]]
    for stage in stages:
        assert len({(job.classes, job.rules) for job in stage}) == 1


def test_unknown_curve_and_point_are_named() -> None:
    with pytest.raises(InputError) as caught:
        jobs.stages_of({"ports": [1]})
    assert caught.value.reference == "bench-curve-unknown"
    for curve, n in (("classes", 1), ("rules", 5_000), ("prefixes", 0), ("flows", 1_000_001)):
        with pytest.raises(InputError) as caught:
            jobs.job_at(curve, n)
        assert caught.value.reference == "bench-point-invalid"


def test_one_filter_for_each_entry_and_leaf() -> None:
    job = jobs.job_at("rules", 64)
    for classifier in (jobs.U32, jobs.FLOWER):
        lines = list(jobs.filter_lines(classifier, job))
        assert len(lines) == 64
        assert lines[5].split()[-1] == jobs.classid(5 % job.classes) == "5348:200"
        assert " 10005" in lines[5]


def test_a_list_of_u32_never_outgrows_its_table() -> None:
    lines = list(jobs.filter_lines(jobs.U32, jobs.job_at("prefixes", 10_000)))
    tables = [line.split(" prio ")[1].split()[0] for line in lines]
    assert max(tables.count(table) for table in set(tables)) <= 0x7FF * 2
    assert len(set(lines)) == 10_000


@pytest.mark.parametrize(("curve", "offset", "shift"), [("prefixes", 16, 8), ("rules", 20, 0)])
def test_hashed_filters_lie_in_the_bucket_that_the_key_chooses(
    curve: str, offset: int, shift: int
) -> None:
    job = jobs.job_at(curve, 600)
    divisor, link, *filters = jobs.filter_lines(jobs.U32_HASHED, job)
    assert divisor.endswith("u32 divisor 256")
    mask = int(link.split("hashkey mask ")[1].split()[0], 16)
    assert f" at {offset} link 1:" in link
    for flow in range(0, 600, 7):
        header = job.frame(flow)[14:]
        word = int.from_bytes(header[offset : offset + 4], "big")
        line = filters[job.entry_of(flow)]
        assert f" ht 1:{(word & mask) >> shift:x}: " in line
        assert line.split()[-1] == jobs.classid(job.class_of(flow))


def test_few_filters_are_not_hashed() -> None:
    assert not jobs.has_hashed(jobs.job_at("prefixes", 10))
    assert not jobs.has_hashed(jobs.job_at("flows", 100_000))
    assert jobs.has_hashed(jobs.job_at("rules", 1_024))


def test_markdown_has_figures_reasons_charts_and_the_machine() -> None:
    text = curves_markdown(some_curves(), images="performance")
    assert "| 1,000 | 311 | 15,000 | 4,000 |" in text
    assert "| 2 | 290 | – | 4,000 |" in text
    assert "- u32 at 100,000: too slow." in text
    assert "](performance/curve-prefixes.png)" in text
    assert "kernel 6.12.0-test, 1 CPU (QEMU), 2,048 MB" in text
    assert "one nanosecond per instruction" in text
    assert "### Rules" not in text


def test_markdown_on_a_real_clock_says_so() -> None:
    curves = some_curves() | {"facts": {**FACTS, "clock": "real"}}
    assert "one nanosecond per instruction" not in curves_markdown(curves)


def test_missing_matplotlib_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UnsupportedError) as caught:
        plot_curves(some_curves()["rows"], tmp_path)
    assert caught.value.reference == "plot-missing"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)
def test_one_chart_for_each_curve(tmp_path: Path) -> None:
    paths = plot_curves(some_curves()["rows"], tmp_path / "charts")
    assert [path.name for path in paths] == ["curve-prefixes.png", "curve-classes.png"]
    for path in paths:
        assert path.read_bytes().startswith(PNG_MAGIC)
        assert path.stat().st_size < 100_000
