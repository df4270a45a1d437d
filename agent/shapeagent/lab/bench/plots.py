# SPDX-License-Identifier: Apache-2.0
"""Charts of the benchmark: delay distribution, delay over time, throughput against latency."""

from __future__ import annotations

import gzip
import io
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shapeagent.lab.bench.catalog import IDLE
from shapeagent.lab.bench.report import (
    Group,
    Row,
    Topic,
    aggregate,
    by_topic,
    distinct,
    link_text,
    topic_text,
)
from shapeagent.model.errors import UnsupportedError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = ("cdf", "time", "front")
COLUMNS = 4
TIME_BINS = 200
CURVE_POINTS = 400
DPI = 100
GREYS = 16
_LEAST_US = 1.0
_LABEL_GAP = 0.038  # between labels at the right, as a share of the axis

Samples = Mapping[str, list[list[tuple[float, float]]]]  # queue → repeats → (sent, delay) in µs


def load_pyplot() -> Any:
    """Return matplotlib's pyplot, drawing into files. Raises UnsupportedError (plot-missing)."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise UnsupportedError(
            "plot-missing",
            "The charts need matplotlib, which is not installed.",
            hint="pip install 'shapectl[bench]', or make bench, which installs it",
        ) from error
    mpl.use("agg")
    from matplotlib import pyplot as plt

    return plt


def plot_rows(rows: Iterable[Row], samples_dir: Path, folder: Path) -> list[Path]:
    """Return the paths of the charts: KIND-SCENARIO-LINK.png for each kind, scenario and wire.

    Args:
        samples_dir: holds `<key>.json.gz` of the rows; without those of a scenario and
            wire only its front is drawn.

    Raises: UnsupportedError (plot-missing) where matplotlib is not installed.
    """
    plt = load_pyplot()

    rows = distinct(rows)
    groups = aggregate(rows)
    names = chart_names(groups)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for topic, own in by_topic(groups).items():
        samples = read_samples(topic, rows, own, samples_dir)
        for kind in KINDS:
            if kind != "front" and not samples:
                continue
            figure = plt.figure(dpi=DPI)
            try:
                _DRAW[kind](figure, topic, own, samples)
                path = folder / names[topic][kind]
                _save(figure, path)
            finally:
                plt.close(figure)
            paths.append(path)
    return paths


def _save(figure: Figure, path: Path) -> None:
    """Write a PNG of 16 greys: a quarter of the size, and the same file from the same rows."""
    from PIL import Image

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    with Image.open(buffer) as image:
        image.convert("L").quantize(GREYS, dither=Image.Dither.NONE).save(path, optimize=True)


def chart_names(groups: Iterable[Group]) -> dict[Topic, dict[str, str]]:
    """Return the file names by topic and kind; MTU, kernel and clock only where they differ."""
    topics = list(by_topic(groups))
    kernels = {topic.kernel for topic in topics}
    clocks = {topic.clock for topic in topics}
    names = {}
    for topic in topics:
        words = [topic.scenario, f"{topic.link_bits_per_s // 1_000_000}m"]
        if topic.mtu != 1500:
            words.append(str(topic.mtu))
        if len(kernels) > 1:
            words.append(topic.kernel)
        if len(clocks) > 1:
            words.append(topic.clock)
        names[topic] = {kind: f"{'-'.join((kind, *words))}.png" for kind in KINDS}
    return names


def read_samples(
    topic: Topic, rows: Iterable[Row], groups: Sequence[Group], samples_dir: Path
) -> Samples:
    """Return the samples of a topic by queue, one list for each repeat whose file is there."""
    found: dict[str, list[list[tuple[float, float]]]] = {group.queue: [] for group in groups}
    for row in rows:
        same = (row["scenario"], row["mtu"], row["link_bits_per_s"], row["kernel"], row["clock"])
        path = samples_dir / f"{row['key']}.json.gz"
        if same == (
            *(topic.scenario, topic.mtu, topic.link_bits_per_s, topic.kernel, topic.clock),
        ) and path.exists():  # fmt: skip
            with gzip.open(path, "rt", encoding="utf-8") as file:
                found[row["queue"]].append([(at, delay) for at, delay in json.load(file)])
    return {queue: repeats for queue, repeats in found.items() if any(repeats)}


def distribution(delays: Sequence[float]) -> list[tuple[float, float]]:
    """Return (delay, share of the probes that were later), at most CURVE_POINTS of them.

    Dense towards the tail: the points are even in the logarithm of the share.
    """
    ordered = sorted(delays)
    count = len(ordered)
    points = []
    last = -1
    for step in range(CURVE_POINTS + 1):
        later = count ** (1 - step / CURVE_POINTS)  # from all down to one
        index = min(count - 1, max(0, math.ceil(count - later)))
        if index != last:
            points.append((max(_LEAST_US, ordered[index]), (count - index) / count))
            last = index
    return points


def over_time(
    samples: Sequence[tuple[float, float]],
) -> list[tuple[float, float, float, float]]:
    """Return (seconds, least, median, greatest delay) of TIME_BINS parts of the window."""
    end = max(at for at, _ in samples) + 1.0
    bins: dict[int, list[float]] = {}
    for at, delay in samples:
        bins.setdefault(int(at / end * TIME_BINS), []).append(max(_LEAST_US, delay))
    return [
        ((number + 0.5) * end / TIME_BINS / 1e6, min(own), statistics.median(own), max(own))
        for number, own in sorted(bins.items())
    ]


def _log_us(axes: Axes, which: str) -> None:
    """Make an axis of microseconds logarithmic, with plain numbers."""
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axes.minorticks_off()
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _panels(
    figure: Figure, topic: Topic, groups: Sequence[Group], samples: Samples, what: str
) -> list[tuple[Group, Axes]]:
    """Return one panel for each queue with samples, all with the same axes."""
    shown = [group for group in groups if group.queue in samples]
    rows = math.ceil(len(shown) / COLUMNS)
    figure.set_size_inches(8.4, 0.9 + 1.75 * rows)
    figure.suptitle(f"{what}\n{topic_text(topic)}", fontsize=9)
    grid = figure.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False)
    panels = []
    for number, axes in enumerate(grid.flat):
        if number >= len(shown):
            axes.set_visible(False)
            continue
        group = shown[number]
        mark = "" if group.counts or group.queue == IDLE else " (does not count)"
        axes.set_title(
            group.queue + mark, fontsize=8, loc="left", fontweight="bold" if group.is_ours else None
        )
        axes.tick_params(labelsize=7)
        axes.grid(color="0.9", linewidth=0.5)
        if number + COLUMNS >= len(shown):  # the lowest of its column
            axes.tick_params(labelbottom=True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        panels.append((group, axes))
    return panels


def _draw_cdf(figure: Figure, topic: Topic, groups: Sequence[Group], samples: Samples) -> None:
    curves = {
        queue: distribution([delay for repeat in repeats for _, delay in repeat])
        for queue, repeats in samples.items()
    }
    title = "Share of the probes that were later than a delay (black; grey: the other queues)"
    for group, axes in _panels(figure, topic, groups, samples, title):
        for queue, points in curves.items():
            if queue not in (group.queue, IDLE):
                axes.plot(*zip(*points, strict=True), color="0.85", linewidth=0.7)
        if IDLE in curves and group.queue != IDLE:
            axes.plot(*zip(*curves[IDLE], strict=True), color="0.4", linewidth=1.0, linestyle="--")
            axes.annotate(
                "idle", curves[IDLE][-1], fontsize=6, color="0.4", xytext=(2, 2),
                textcoords="offset points",
            )  # fmt: skip
        axes.plot(*zip(*curves[group.queue], strict=True), color="black", linewidth=1.5)
        _log_us(axes, "x")
        axes.set_yscale("log")
        axes.set_yticks([1, 0.1, 0.01, 0.001, 0.0001], ["all", "10%", "1%", "0.1%", "0.01%"])
        axes.minorticks_off()
    figure.supxlabel("one-way delay or round trip, µs", fontsize=8)
    figure.tight_layout()


def _draw_time(figure: Figure, topic: Topic, groups: Sequence[Group], samples: Samples) -> None:
    title = "Delay over time, first repeat (line: median, grey: least to greatest)"
    for group, axes in _panels(figure, topic, groups, samples, title):
        at, least, middle, greatest = zip(*over_time(samples[group.queue][0]), strict=True)
        axes.fill_between(at, least, greatest, color="0.7", linewidth=0)
        axes.plot(at, middle, color="black", linewidth=0.8)
        _log_us(axes, "y")
    figure.supxlabel("seconds", fontsize=8)
    figure.supylabel("µs", fontsize=8)
    figure.tight_layout()


def _draw_front(figure: Figure, topic: Topic, groups: Sequence[Group], samples: Samples) -> None:
    figure.set_size_inches(7.2, 4.6)
    axes = figure.subplots()
    points = [
        (group, bulk / 1e6, max(_LEAST_US, p99))
        for group in groups
        if group.queue != IDLE
        and (bulk := group.median("bulk_bits_per_s")) is not None
        and (p99 := group.median("p99_us")) is not None
    ]
    for group, bulk, p99 in points:
        marker = "x" if not group.counts else "s" if group.is_ours else "o"
        face = "black" if group.is_ours or not group.counts else "white"
        axes.scatter(bulk, p99, s=34, marker=marker, color="black", facecolor=face, zorder=3)
    idle = next((group for group in groups if group.queue == IDLE), None)
    if idle is not None and (p99 := idle.median("p99_us")) is not None:
        axes.axhline(p99, color="0.5", linewidth=0.8, linestyle="--")
        axes.annotate(
            "idle link", (0.005, p99), xycoords=("axes fraction", "data"), fontsize=7, color="0.4",
            xytext=(0, 2), textcoords="offset points",
        )  # fmt: skip
    _log_us(axes, "y")
    axes.margins(x=0.08, y=0.08)
    axes.set_title(
        f"p99 against bulk: lower and further right is better\n{topic_text(topic)}\n"
        "(squares: shapectl; circles: by hand; crosses do not count)",
        fontsize=9,
    )
    axes.set_xlabel(f"bulk, Mbit/s of a wire of {link_text(topic.link_bits_per_s)}", fontsize=8)
    axes.set_ylabel("p99, µs", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(color="0.9", linewidth=0.5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout(rect=(0, 0, 0.76, 1))
    _label_at_right(figure, axes, points)


def _label_at_right(
    figure: Figure, axes: Axes, points: Sequence[tuple[Group, float, float]]
) -> None:
    """Write each name right of the axes, none over another, with a line to its point."""
    figure.canvas.draw()  # fixes the limits
    to_share = axes.transData + axes.transAxes.inverted()
    ends = sorted(
        (float(to_share.transform((bulk, p99))[1]), group.queue, bulk, p99, group.is_ours)
        for group, bulk, p99 in points
    )
    heights: list[float] = []
    for share, *_ in ends:
        heights.append(max(share, heights[-1] + _LABEL_GAP) if heights else max(0.0, share))
    over = heights[-1] - 1.0 if heights else 0.0
    if over > 0:  # push down what ran out at the top
        ceiling = 1.0
        for index in range(len(heights) - 1, -1, -1):
            heights[index] = min(heights[index], ceiling)
            ceiling = heights[index] - _LABEL_GAP
    for height, (_, queue, bulk, p99, is_ours) in zip(heights, ends, strict=True):
        axes.annotate(
            queue, (bulk, p99), xytext=(1.03, height), textcoords="axes fraction", fontsize=8,
            fontweight="bold" if is_ours else None, verticalalignment="center",
            arrowprops={"arrowstyle": "-", "color": "0.7", "linewidth": 0.6, "relpos": (0, 0.5)},
        )  # fmt: skip


_DRAW: Mapping[str, Any] = {"cdf": _draw_cdf, "time": _draw_time, "front": _draw_front}
