# SPDX-License-Identifier: Apache-2.0
"""docs/metrics.md names every metric and alert, in the words of the page and of the rules."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from shapeagent.telemetry.metrics import MetricsPage
from tests.unit.statuskit import interface_status
from tests.unit.test_dashboard import alert_rules
from tests.unit.test_metrics import Source, busy_interface, facts, new_metrics

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


def metrics_table() -> str:
    metrics = new_metrics()
    metrics.conflict("qdisc")
    source = Source(busy_interface(), interface_status("eth1", unconfirmed_s=5.0))
    text = MetricsPage(source, facts, metrics).render()[1].decode()
    lines = ["| metric | kind | labels | what |", "|---|---|---|---|"]
    for family in text_string_to_metric_families(text):
        labels = sorted({name for sample in family.samples for name in sample.labels} - {"le"})
        name = family.name + ("_total" if family.type == "counter" else "")
        shown = ", ".join(labels) or "-"
        lines.append(f"| `{name}` | {family.type} | {shown} | {family.documentation} |")
    return "\n".join(lines)


def alerts_table() -> str:
    lines = ["| alert | severity | after | when |", "|---|---|---|---|"]
    for rule in alert_rules():
        when = rule["expr"].replace("|", "\\|")
        after = rule.get("for", "at once")
        lines.append(f"| {rule['alert']} | {rule['labels']['severity']} | {after} | `{when}` |")
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("name", "table"), [("metrics", metrics_table), ("alerts", alerts_table)], ids=str
)
def test_table_is_fresh(name: str, table: object) -> None:
    assert callable(table)
    want = table()
    text = _PAGE.read_text(encoding="utf-8")
    found = re.search(rf"(<!-- {name}: [^>]*-->\n)(.*?)(<!-- end -->)", text, re.DOTALL)
    assert found, f"got no place for the table of {name}"
    if os.environ.get("SHAPECTL_WRITE_GOLDEN"):
        text = text[: found.start(2)] + want + "\n" + text[found.end(2) :]
        _PAGE.write_text(text, encoding="utf-8")
        return
    assert found[2].strip() == want, (
        f"got a stale table of {name}; its comment says how to renew it"
    )
