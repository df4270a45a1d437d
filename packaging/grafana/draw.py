#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the panels of the dashboard as a PNG, from Prometheus, where there is no Grafana.

.venv/bin/python packaging/grafana/draw.py --url http://127.0.0.1:9090 --minutes 10 out.png
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit
from urllib.request import urlopen

import matplotlib as mpl

mpl.use("Agg")
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, PercentFormatter

_DASHBOARD = Path(__file__).with_name("shapectl.json")
_UNITS = {
    "bps": "bit/s", "pps": "pkt/s", "s": "s", "bytes": "B", "ops": "/s", "short": "", "none": "",
}  # fmt: skip
_POINTS = 300
_MOST_IN_LEGEND = 12
_DAY_S = 86_400


def ask(url: str, text: str, begin_s: float, end_s: float) -> list[dict[str, Any]]:
    """Return the series of a range query. Raises: OSError, ValueError."""
    if urlsplit(url).scheme not in ("http", "https"):
        raise ValueError(f"{url} is no http address")
    step_s = max(1.0, (end_s - begin_s) / _POINTS)
    question = urlencode({"query": text, "start": begin_s, "end": end_s, "step": step_s})
    with urlopen(f"{url}/api/v1/query_range?{question}", timeout=30) as answer:  # noqa: S310
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return found


def expression(text: str, direction: str, window_s: int) -> str:
    """Return an expression of the dashboard with its variables filled in."""
    values = {
        "$__rate_interval": f"{window_s}s",
        "$instance": ".*",
        "$interface": ".*",
        "$direction": direction,
    }
    for name, value in values.items():
        text = text.replace(name, value)
    return text


def legend(pattern: str, labels: dict[str, str]) -> str:
    """Return a legend as Grafana writes it: `{{interface}} {{class}}`."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), pattern).strip()


def shown_series(series: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return the series that a panel has room for: of many only those that are not 0 all along."""
    if len(series) <= _MOST_IN_LEGEND:
        return series
    alive = [one for one in series if any(float(value) > 0 for _, value in one[1])]
    return alive[:_MOST_IN_LEGEND]


def draw_panel(axes: Axes, panel: dict[str, Any], series: list[tuple[str, Any]]) -> None:
    """Draw one panel: lines, or the last value where it is a figure."""
    axes.set_title(panel["title"], fontsize=9, loc="left")
    unit = panel["fieldConfig"]["defaults"]["unit"]
    shown = EngFormatter(unit=_UNITS.get(unit, ""), places=None, sep=" ")
    if panel["type"] == "stat":
        last = next((float(values[-1][1]) for _, values in series if values), math.nan)
        text = "no data" if math.isnan(last) else EngFormatter(_UNITS.get(unit, ""), 1)(last)
        if unit == "s" and last > _DAY_S:
            text = f"{last / _DAY_S:.1f} days"
        axes.text(0.5, 0.4, text, ha="center", va="center", fontsize=15)
        axes.set_axis_off()
        return
    for name, values in shown_series(series):
        moments = [float(moment) - float(values[-1][0]) for moment, _ in values]
        axes.plot(moments, [float(value) for _, value in values], linewidth=1, label=name)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0) if unit == "percentunit" else shown)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize=6, loc="upper left", ncols=2)


def draw(url: str, minutes: float, direction: str, window_s: int, out: Path) -> None:
    """Write the PNG. Effects: the file `out`."""
    panels = [one for one in json.loads(_DASHBOARD.read_text())["panels"] if one["type"] != "row"]
    end_s = time.time()
    figure = Figure(figsize=(18, 22))
    lines = sorted({one["gridPos"]["y"] for one in panels})
    heights = [
        0.5 if any(one["gridPos"]["y"] == y and one["type"] == "stat" for one in panels) else 1
        for y in lines
    ]
    # 24 columns, as Grafana has; the gaps hold the numbers at the axes
    grid = figure.add_gridspec(
        *(len(lines), 24), height_ratios=heights,
        left=0.05, right=0.99, top=0.98, bottom=0.02, hspace=0.35, wspace=3.5,
    )  # fmt: skip
    for panel in panels:
        place = panel["gridPos"]
        axes = figure.add_subplot(
            grid[lines.index(place["y"]), place["x"] : place["x"] + place["w"]]
        )
        series = [
            (legend(target["legendFormat"], one["metric"]), one["values"])
            for target in panel["targets"]
            for one in ask(
                url,
                expression(target["expr"], direction, window_s),
                end_s - 60 * minutes,
                end_s,
            )
        ]
        draw_panel(axes, panel, series)
    figure.savefig(out, dpi=80)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:9090")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--direction", choices=("egress", "ingress"), default="egress")
    parser.add_argument("--window", type=int, default=60, help="seconds of each rate()")
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    draw(given.url, given.minutes, given.direction, given.window, given.out)


if __name__ == "__main__":
    main()
