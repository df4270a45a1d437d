# SPDX-License-Identifier: Apache-2.0
"""The scale curves as charts and as a section of docs/performance.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shapeagent.lab.bench.curves_jobs import CLASSIFIERS, POINTS
from shapeagent.lab.bench.plots import load_pyplot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Mapping[str, Any]

TITLES: Mapping[str, str] = {
    "prefixes": "Cost of a packet by number of whitelisted prefixes",
    "flows": "Cost of a packet by number of flows",
    "rules": "Cost of a packet by number of rules",
    "classes": "Cost of a packet by number of classes",
}
# Apart in black and white: line, marker, grey.
_STYLES: Mapping[str, tuple[str, str, str]] = {
    "shapectl": ("-", "o", "black"),
    "shapectl-first": ("--", "o", "black"),
    "u32": ("-", "s", "0.45"),
    "u32-hashed": ("--", "s", "0.45"),
    "flower": ("-.", "^", "0.25"),
}
_LEAST_NS = 10.0  # of a logarithmic axis; on a busy host a difference may come out below nothing
_LOG_SPREAD = 20.0  # costs that lie further apart get a logarithmic axis
_LABEL_GAP = 0.045  # between labels at the right end, as a share of the axis


def plot_curves(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Return the paths of the charts, `curve-NAME.png`, one for each curve in `rows`.

    Raises: UnsupportedError (plot-missing) where matplotlib is not installed.
    """
    plt = load_pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for curve in _curves_in(rows):
        figure, axes = plt.subplots(figsize=(7.2, 4.2), dpi=100)
        try:
            _draw(axes, curve, [row for row in rows if row["curve"] == curve])
            figure.tight_layout()
            path = folder / f"curve-{curve}.png"
            # Without the version and the date the same rows give the same file.
            figure.savefig(path, metadata={"Software": None})
        finally:
            plt.close(figure)
        paths.append(path)
    return paths


def _draw(axes: Axes, curve: str, rows: Sequence[Row]) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

    lines = _lines(rows)
    costs = [row["ns_per_packet"] for row in rows]
    is_log = max(costs) > _LOG_SPREAD * max(_LEAST_NS, min(costs))
    for classifier, points in lines.items():
        line, marker, colour = _STYLES[classifier]
        axes.plot(
            [n for n, _ in points],
            [max(_LEAST_NS, cost) if is_log else cost for _, cost in points],
            linestyle=line,
            marker=marker,
            color=colour,
            markersize=4,
        )
    axes.set_xscale("log", base=2 if curve == "classes" else 10)
    if is_log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(min(0, *costs), 1.1 * max(1, *costs))
    lowest, highest = min(row["n"] for row in rows), max(row["n"] for row in rows)
    axes.set_xlim(lowest / 1.2, highest * (highest / lowest or 2) ** 0.28 * 1.2)
    axes.set_xticks(sorted({row["n"] for row in rows}) if curve != "rules" else _ticks(rows))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y", color="0.88", linewidth=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.set_title(
        f"{TITLES[curve]}\n(kernel {rows[0]['kernel']}, {rows[0]['clock']} time)", fontsize=10
    )
    axes.set_xlabel(curve)
    axes.set_ylabel("ns per packet above no classifier")
    axes.tick_params(labelsize=8)
    _label_ends(axes, lines)


def _label_ends(axes: Axes, lines: Mapping[str, Sequence[tuple[int, float]]]) -> None:
    """Write each line's name beside its last point, none over another."""
    to_share = axes.transData + axes.transAxes.inverted()
    last = max(points[-1][0] for points in lines.values())
    ends = []
    for classifier, points in lines.items():
        n, cost = points[-1]
        x, y = to_share.transform((n, max(_LEAST_NS, cost)))
        # Where other lines go on, above the point and not on them.
        shown = y if n == last else min(0.97, y + 0.05)
        ends.append((float(shown), float(x), classifier))
    heights: dict[float, float] = {}
    for y, x, classifier in sorted(ends):
        heights[x] = max(y, heights.get(x, -1.0) + _LABEL_GAP)
        axes.text(
            x + 0.015,
            heights[x],
            classifier,
            transform=axes.transAxes,
            fontsize=8,
            color=_STYLES[classifier][2],
            verticalalignment="center",
        )


def _ticks(rows: Sequence[Row]) -> list[int]:
    numbers = sorted({row["n"] for row in rows})
    return [n for at, n in enumerate(numbers) if at == 0 or n >= 4 * numbers[at - 1]]


def _curves_in(rows: Iterable[Row]) -> list[str]:
    found = {row["curve"] for row in rows}
    return [curve for curve in POINTS if curve in found]


def _lines(rows: Iterable[Row]) -> dict[str, list[tuple[int, float]]]:
    """Return classifier → (n, nanoseconds), both in order."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        lines.setdefault(row["classifier"], []).append((row["n"], row["ns_per_packet"]))
    return {name: sorted(lines[name]) for name in CLASSIFIERS if name in lines}


def curves_markdown(curves: Mapping[str, Any], *, images: str = "performance") -> str:
    """Return the section of docs/performance.md.

    Args:
        curves: what `run_curves` returned.
        images: the folder of the charts, seen from the document.
    """
    facts, rows = curves["facts"], curves["rows"]
    parts = ["## Scale curves", "", _method(facts), ""]
    for curve in _curves_in(rows):
        own = [row for row in rows if row["curve"] == curve]
        parts += [f"### {curve.capitalize()}", "", _WHAT[curve], ""]
        parts += [f"![{TITLES[curve]}]({images}/curve-{curve}.png)", ""]
        parts += _table(curve, own)
        left_out = [one for one in curves["left_out"] if one["curve"] == curve]
        parts += [""]
        if left_out:
            parts += ["Left out:", "", *_reasons(left_out), ""]
    return "\n".join(parts).rstrip() + "\n"


def _reasons(left_out: Sequence[Row]) -> list[str]:
    """Return one line for each reason of each classifier."""
    found: dict[tuple[str, str], list[str]] = {}
    for one in left_out:
        found.setdefault((one["classifier"], one["reason"]), []).append(f"{one['n']:,}")
    return [
        f"- {classifier} at {' · '.join(numbers)}: {reason}."
        for (classifier, reason), numbers in found.items()
    ]


_WHAT: Mapping[str, str] = {
    "prefixes": (
        "Destination prefixes of eight lengths, /24 to /31, each with a class; 4,096 flows spread "
        "over them. Eight lengths are more than our hashes take, so this is our trie. "
        "`shapectl` is a packet of a flow that the flow cache knows, `shapectl-first` the first "
        "packet of one that it does not know, its insert included. The others have no cache: each "
        "packet costs them the same."
    ),
    "flows": (
        "Sixteen port rules and so many flows, each equally likely. Our flow cache holds 131,072; "
        "beyond it most packets are asked about anew, and at most 20,000 flows a second enter it."
    ),
    "rules": "One UDP port a rule, 4,096 flows spread over them.",
    "classes": "Sixteen port rules over so many classes; a policy has at least two classes.",
}


_METHOD = """\
What a classifier adds to a UDP packet of 60 bytes that leaves by AF_PACKET through a veth device
under our HTB tree: nanoseconds per packet, less a run in the same tree without any classifier. Each
gets the same packets, and before it is timed each must have put them into the right classes.
cls_u32 and cls_flower sit at the tree's root, one filter a prefix or rule; `u32-hashed` spreads
them over 256 buckets. Ours includes what they do not do: it counts by class and reason and looks at
leases and budgets. Filters that `tc -batch` needs more than about 30 s to load are left out.
"""
_CLOCKS: Mapping[str, str] = {
    "virtual": """\
Virtual time: the machine's clock counts one nanosecond per instruction, so a figure is a number of
instructions, the same on a busy host. It knows no caches: on a real CPU every step that misses them
costs more, with a million entries much more. Compare the lines and their shape with each other.
""",
    "real": """\
Real time, the fastest of five rounds: compare within this run only, and take differences of a few
hundred nanoseconds on a busy host for noise.
""",
}


def _method(facts: Mapping[str, Any]) -> str:
    memory = f", {facts['memory_mb']:,} MB" if facts.get("memory_mb") else ""
    machine = (
        f"Machine: kernel {facts['kernel']}, {facts['cpus']} CPU ({facts['cpu']}){memory}, "
        f"{facts['iproute2']}; clock: {facts['clock']}."
    )
    return "\n".join([_METHOD, _CLOCKS[facts["clock"]], machine])


def _table(curve: str, rows: Sequence[Row]) -> list[str]:
    lines = _lines(rows)
    cost = {name: dict(points) for name, points in lines.items()}
    base = {row["n"]: row["base_ns_per_packet"] for row in rows}
    table = [
        f"| {curve} | {' | '.join(lines)} | without any |",
        "|---:" * (len(lines) + 2) + "|",
    ]
    for n in sorted(base):
        cells = [f"{cost[name][n]:,.0f}" if n in cost[name] else "–" for name in lines]
        table.append(f"| {n:,} | {' | '.join(cells)} | {base[n]:,.0f} |")
    return [*table, "", "Nanoseconds per packet; the last column is the whole path without."]
