# SPDX-License-Identifier: Apache-2.0
"""The dashboard and the alerts ask for what the page has, and promtool finds no fault in them."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.test_metrics import PROMTOOL, Source, busy_interface, page_of, read

_PACKAGING = Path(__file__).resolve().parents[2] / "packaging"
_RULES = _PACKAGING / "prometheus" / "alerts.yaml"
_TESTS = _PACKAGING / "prometheus" / "alerts-test.yaml"
_CONFIG = _PACKAGING / "prometheus" / "prometheus.yml"
_DASHBOARD = _PACKAGING / "grafana" / "shapectl.json"

needs_promtool = pytest.mark.skipif(
    not os.access(PROMTOOL, os.X_OK),
    reason="promtool is missing: sudo packaging/setup-programs.sh prometheus",
)


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_DASHBOARD.read_text(encoding="utf-8"))
    return found


def dashboard_queries() -> list[tuple[str, str]]:
    """Return (panel, expression) with the variables filled in, as Grafana does."""
    found = []
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            text = target["expr"]
            for name, value in (
                ("$__rate_interval", "1m"), ("$instance", ".*"), ("$interface", ".*"),
                ("$direction", "egress"),
            ):  # fmt: skip
                text = text.replace(name, value)
            assert "$" not in text, f"got a variable that is not known in {text}"
            found.append((panel["title"], text))
    return found


def alert_rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(_RULES.read_text(encoding="utf-8"))["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def promtool(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PROMTOOL, *words], capture_output=True, text=True, check=False, timeout=120
    )


def test_every_metric_that_is_asked_for_is_on_the_page() -> None:
    labels: dict[str, set[str]] = {"up": set(), "process_start_time_seconds": set()}
    for family in text_string_to_metric_families(read(page_of(Source(busy_interface())))):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    queries = dashboard_queries() + [(rule["alert"], rule["expr"]) for rule in alert_rules()]
    assert len(queries) > 40, f"got only {len(queries)} queries"
    for place, text in queries:
        found = re.findall(r"\b((?:shapectl|process)_\w+|up)\b(?:\{([^}]*)\})?", text)
        assert found, f"got no metric of ours in {place}: {text}"
        for name, matchers in found:
            assert name in labels, f"{place} asks for {name}, which is not on the page"
            asked = set(re.findall(r"(\w+)\s*[=!]~?", matchers)) - {"job", "instance"}
            assert asked <= labels[name], f"{place}: {name} has no label {asked - labels[name]}"


def test_panels_say_what_they_show_and_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, f"{panel['title']} overlaps another panel"
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["description"], f"{panel['title']} has no description"
        assert panel["fieldConfig"]["defaults"]["unit"], f"{panel['title']} has no unit"
        sources = {panel["datasource"]["uid"], *(t["datasource"]["uid"] for t in panel["targets"])}
        assert sources == {"${datasource}"}, f"{panel['title']} is bound to {sources}"


def test_dashboard_is_provisioned_from_where_it_is_put() -> None:
    text = (_PACKAGING / "grafana" / "dashboards.yaml").read_text(encoding="utf-8")
    (provider,) = yaml.safe_load(text)["providers"]
    assert provider["type"] == "file"
    assert provider["options"]["path"].startswith("/var/lib/grafana/")
    names = {one["name"] for one in dashboard()["templating"]["list"]}
    assert names == {"datasource", "instance", "interface", "direction"}


def test_each_alert_says_what_to_do_and_is_tested_both_ways() -> None:
    fires: set[str] = set()
    stays_quiet: set[str] = set()
    for one in yaml.safe_load(_TESTS.read_text(encoding="utf-8"))["tests"]:
        for check in one["alert_rule_test"]:
            (fires if check["exp_alerts"] else stays_quiet).add(check["alertname"])
    for rule in alert_rules():
        name = rule["alert"]
        assert name.startswith("Shapectl"), f"got {name}"
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert rule["annotations"]["summary"], f"{name} has no summary"
        assert rule["annotations"]["description"], f"{name} has no description"
        assert name in fires, f"{name} is never seen to fire"
        assert name in stays_quiet, f"{name} is never seen to stay quiet"


@needs_promtool
@pytest.mark.parametrize(
    "words",
    [
        ("check", "rules", "--lint=all", "--lint-fatal", str(_RULES)),
        ("check", "config", "--lint=all", "--lint-fatal", str(_CONFIG)),
        ("test", "rules", str(_TESTS)),
    ],
    ids=["rules", "config", "rule tests"],
)
def test_promtool_finds_no_fault(words: tuple[str, ...]) -> None:
    done = promtool(*words)
    assert done.returncode == 0, f"got {done.stdout}{done.stderr}"
    assert "SUCCESS" in done.stdout + done.stderr


@needs_promtool
def test_rule_tests_notice_a_threshold_that_is_off(tmp_path: Path) -> None:
    for name, before, after in (
        ("ShapectlWhitelistNearlyFull", "capacity_entries > 0.9", "capacity_entries > 0.99"),
        ("ShapectlSignalDropped", 'drops_total{class="signal"}', "drops_total"),
    ):
        rules = _RULES.read_text(encoding="utf-8")
        assert before in rules, f"got no {before} in the rules"
        (tmp_path / "alerts.yaml").write_text(rules.replace(before, after), encoding="utf-8")
        tests = tmp_path / "alerts-test.yaml"
        tests.write_text(_TESTS.read_text(encoding="utf-8"), encoding="utf-8")
        done = promtool("test", "rules", str(tests))
        assert done.returncode != 0, f"got no failure for a changed {name}"
        assert name in done.stdout + done.stderr


@needs_promtool
def test_every_query_of_the_dashboard_parses(tmp_path: Path) -> None:
    rules = [
        {"record": f"q:{number}", "expr": text}
        for number, (_, text) in enumerate(dashboard_queries())
    ]
    path = tmp_path / "queries.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "q", "rules": rules}]}), encoding="utf-8")
    done = promtool("check", "rules", str(path))
    assert done.returncode == 0, f"got {done.stdout}{done.stderr}"
