# SPDX-License-Identifier: Apache-2.0
"""Rows of the benchmark as tables: medians over repeats, and what may be compared. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shapeagent.lab.bench.catalog import FAST_LINKS_BITS_PER_S, IDLE, SCENARIOS
from shapeagent.lab.bench.cell import FULL_SHARE, IDLE_SHARE
from shapeagent.lab.bench.queues import EGRESS, INGRESS
from shapeagent.lab.wire import ETHERNET_HEADER_BYTES, WIRE_OVERHEAD_BYTES

Row = Mapping[str, Any]

OURS_PREFIX = "shapectl-"
HEADLINE_SCENARIO = "signal-under-bulk"
HEADLINE_MTU = 1500
# From here on rows of any MTU stand beside the articles': jumbo frames alone fill such a wire.
FAST_BITS_PER_S = min(FAST_LINKS_BITS_PER_S)
HTB_NETEM_PREFIX = "htb+netem"
UNSHAPED = ("pfifo_fast", "none")
NO_QUEUE = ("shapectl-police", "shapectl-ingress-police")
LEAST_PROBES = 100_000  # for a claim that nothing is lost
SAME_TREE = ("htb+u32-ours", "shapectl-htb")  # one tree, classified by cls_u32 and by us
EQUAL_BULK = 0.99  # of ours: what carries less is not compared at equal goodput

# What is measured, as a row names it: taken over the repeats as median and range.
FIGURES = (
    *("p50_us", "p90_us", "p99_us", "p999_us", "max_us", "jitter_mean_us", "jitter_p99_us"),
    *("gap_p50_us", "gap_p99_us", "rr_p50_us", "rr_p99_us", "bulk_bits_per_s", "cpu_idle"),
    *("cpu_ns_per_packet", "wire_dropped", "segment_bytes"),
)
COUNTS = ("sent", "lost", "rr_sent", "rr_lost", "leases", "leases_lost")

# seed-facts §A: (strategy, delay jitter, signalling packet loss); the link is not named there.
ARTICLE_ROWS = (
    ("HTB + netem", "120–450 µs", "0.8 %"),
    ("eBPF + FQ_CODEL + prio", "32–68 µs", "0.012 %"),
)


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over the repeats."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Topic:
    """What rows must share to be compared."""

    scenario: str
    mtu: int
    link_bits_per_s: int
    kernel: str
    clock: str


@dataclass(frozen=True, slots=True)
class Group:
    """The repeats of one cell."""

    topic: Topic
    queue: str
    repeats: int
    counts: bool  # in every repeat: the link full and the CPU not the bottleneck
    link_full: bool
    shaper_bits_per_s: int | None
    figures: Mapping[str, Spread]
    totals: Mapping[str, int]

    @property
    def is_ours(self) -> bool:
        """Whether shapectl shaped."""
        return self.queue.startswith(OURS_PREFIX)

    @property
    def holds_link(self) -> bool:
        """Whether shapectl shaped and queued; `police` has no queue, and the wire's overflows."""
        return self.is_ours and self.queue not in NO_QUEUE

    def median(self, name: str) -> float | None:
        """Return the median of a figure, None where no repeat has it."""
        spread = self.figures.get(name)
        return None if spread is None else spread.median


def distinct(rows: Iterable[Row]) -> list[Row]:
    """Return the rows, the later one where a cell was run twice."""
    return list({(row["key"], row["kernel"], row["clock"]): row for row in rows}.values())


def aggregate(rows: Iterable[Row]) -> tuple[Group, ...]:
    """Return a group for each cell, in the order of the catalog."""
    found: dict[tuple[Topic, str], list[Row]] = {}
    for row in distinct(rows):
        topic = Topic(
            row["scenario"], row["mtu"], row["link_bits_per_s"], row["kernel"], row["clock"]
        )
        found.setdefault((topic, row["queue"]), []).append(row)
    groups = (_group(topic, queue, cells) for (topic, queue), cells in found.items())
    return tuple(sorted(groups, key=_order))


def _group(topic: Topic, queue: str, cells: Sequence[Row]) -> Group:
    figures = {}
    for name in FIGURES:
        values = [cell[name] for cell in cells if cell.get(name) is not None]
        if values:
            figures[name] = Spread(statistics.median(values), min(values), max(values))
    totals = {
        name: sum(cell[name] for cell in cells)
        for name in COUNTS
        if all(name in cell for cell in cells)
    }
    return Group(
        topic=topic,
        queue=queue,
        repeats=len(cells),
        counts=all(cell["counts"] for cell in cells),
        link_full=all(cell["link_full"] for cell in cells),
        shaper_bits_per_s=cells[0]["shaper_bits_per_s"],
        figures=figures,
        totals=totals,
    )


def _order(group: Group) -> tuple[object, ...]:
    topic = group.topic
    scenarios, queues = list(SCENARIOS), [IDLE, *EGRESS, *INGRESS]
    return (
        scenarios.index(topic.scenario),
        topic.kernel,
        topic.clock,
        topic.mtu,
        topic.link_bits_per_s,
        queues.index(group.queue),
    )


def by_topic(groups: Iterable[Group]) -> dict[Topic, list[Group]]:
    """Return the groups that may be compared with each other."""
    found: dict[Topic, list[Group]] = {}
    for group in groups:
        found.setdefault(group.topic, []).append(group)
    return found


def best(groups: Iterable[Group], figure: str = "p99_us") -> Group | None:
    """Return the group with the smallest figure among those that count; the idle link is none."""
    able = [
        (value, number, group)
        for number, group in enumerate(groups)
        if group.counts and group.queue != IDLE and (value := group.median(figure)) is not None
    ]
    return min(able)[2] if able else None


@dataclass(frozen=True, slots=True)
class Loss:
    """Probes of a whole run."""

    sent: int
    lost: int

    @property
    def claims_none(self) -> bool:
        """Whether it may be said that nothing is lost: none of at least 100,000."""
        return self.lost == 0 and self.sent >= LEAST_PROBES

    def text(self) -> str:
        """Return `3 of 126,000 (0.0024 %)`."""
        share = f" ({100 * self.lost / self.sent:.2g} %)" if self.lost and self.sent else ""
        return f"{self.lost:,} of {self.sent:,}{share}"


def loss_of(groups: Iterable[Group]) -> Loss:
    """Return the probes sent and lost over all repeats of `groups`, also those that do not count.

    What does not count is left in: leaving it out could only hide a loss.
    """
    chosen = list(groups)
    return Loss(
        sum(group.totals.get("sent", 0) for group in chosen),
        sum(group.totals.get("lost", 0) for group in chosen),
    )


def bulk_share(group: Group) -> float | None:
    """Return bulk's goodput as a share of what full frames carry at the shaper's rate.

    The shaper counts 24 bytes per frame that goodput does not have.
    """
    bulk = group.median("bulk_bits_per_s")
    if bulk is None or group.shaper_bits_per_s is None:
        return None
    frame = group.topic.mtu + ETHERNET_HEADER_BYTES
    return bulk / (group.shaper_bits_per_s * frame / (frame + WIRE_OVERHEAD_BYTES))


def link_text(bits_per_s: int) -> str:
    """Return `100 Mbit/s`, `1 Gbit/s`."""
    if bits_per_s >= 1_000_000_000:
        return f"{bits_per_s / 1e9:g} Gbit/s"
    return f"{bits_per_s / 1e6:g} Mbit/s"


def topic_text(topic: Topic) -> str:
    """Return the heading of a table."""
    return (
        f"{topic.scenario}, {link_text(topic.link_bits_per_s)}, MTU {topic.mtu}, "
        f"kernel {topic.kernel}, {topic.clock} time"
    )


# --- tables -----------------------------------------------------------------------------------


def _spread_text(group: Group, name: str, scale: float, digits: int) -> str:
    spread = group.figures.get(name)
    if spread is None:
        return "–"
    texts = [f"{v * scale:,.{digits}f}" for v in (spread.median, spread.low, spread.high)]
    return texts[0] if texts[1] == texts[2] else f"{texts[0]} ({texts[1]}–{texts[2]})"


def _figure(name: str, scale: float = 1.0, digits: int = 0) -> Callable[[Group], str]:
    return lambda group: _spread_text(group, name, scale, digits)


def _lost(sent: str, lost: str) -> Callable[[Group], str]:
    def text(group: Group) -> str:
        if sent not in group.totals:
            return "–"
        return f"{group.totals[lost]:,} of {group.totals[sent]:,}"

    return text


def _shaper(group: Group) -> str:
    return "–" if group.shaper_bits_per_s is None else f"{group.shaper_bits_per_s / 1e6:.1f}"


def _share(group: Group) -> str:
    share = bulk_share(group)
    return "–" if share is None or group.queue == IDLE else f"{100 * share:.1f} %"


def _yes(flag: bool) -> str:
    return "yes" if flag else "NO"


# (heading, text, the figure or count without which the column is left out)
_COLUMNS: tuple[tuple[str, Callable[[Group], str], str], ...] = (
    ("p50", _figure("p50_us"), "p50_us"),
    ("p90", _figure("p90_us"), "p90_us"),
    ("p99", _figure("p99_us"), "p99_us"),
    ("p99.9", _figure("p999_us"), "p999_us"),
    ("max", _figure("max_us"), "max_us"),
    ("jitter mean", _figure("jitter_mean_us"), "jitter_mean_us"),
    ("jitter p99", _figure("jitter_p99_us"), "jitter_p99_us"),
    ("lost", _lost("sent", "lost"), "sent"),
    ("gap p50", _figure("gap_p50_us"), "gap_p50_us"),
    ("gap p99", _figure("gap_p99_us"), "gap_p99_us"),
    ("leases lost", _lost("leases", "leases_lost"), "leases"),
    ("rr p50", _figure("rr_p50_us"), "rr_p50_us"),
    ("rr p99", _figure("rr_p99_us"), "rr_p99_us"),
    ("rr lost", _lost("rr_sent", "rr_lost"), "rr_sent"),
    ("bulk Mbit/s", _figure("bulk_bits_per_s", 1e-6, 1), "bulk_bits_per_s"),
    ("shaper Mbit/s", _shaper, "bulk_bits_per_s"),
    ("of shaper", _share, "bulk_bits_per_s"),
    ("CPU idle %", _figure("cpu_idle", 100.0, 0), "cpu_idle"),
    ("CPU µs/packet", _figure("cpu_ns_per_packet", 1e-3, 1), "cpu_ns_per_packet"),
    ("link full", lambda group: _yes(group.link_full), "cpu_idle"),
    ("counts", lambda group: _yes(group.counts), "cpu_idle"),
)


class Table(NamedTuple):
    """A table for the terminal. Headings that start with `>` are of numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def _table(topic: Topic, groups: Sequence[Group]) -> Table:
    columns = [
        (heading, text)
        for heading, text, needs in _COLUMNS
        if any(needs in group.figures or needs in group.totals for group in groups)
    ]
    return Table(
        title=topic_text(topic),
        columns=("queue", *(f">{heading}" for heading, _ in columns)),
        rows=tuple((group.queue, *(text(group) for _, text in columns)) for group in groups),
    )


def terminal_table(rows: Iterable[Row]) -> tuple[Table, ...]:
    """Return a table for each scenario, wire, MTU and kernel, for a terminal."""
    return tuple(_table(topic, groups) for topic, groups in by_topic(aggregate(rows)).items())


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table; headings that start with `>` are right-aligned."""
    rule = ["---:" if column.startswith(">") else "---" for column in columns]
    lines = [f"| {' | '.join(_escape(column.removeprefix('>')) for column in columns)} |"]
    lines.append(f"|{'|'.join(rule)}|")
    lines += [f"| {' | '.join(map(_escape, row))} |" for row in rows]
    return lines


def topic_markdown(topic: Topic, groups: Sequence[Group]) -> list[str]:
    """Return a table and what it says; a cell that does not count is marked and not compared."""
    table = _table(topic, groups)
    winner = best(groups)
    rows = []
    for group, row in zip(groups, table.rows, strict=True):
        name = group.queue
        if group is winner:
            name = f"**{name}**"
        elif not group.counts:
            name = f"~~{name}~~"
        rows.append((name, *row[1:]))
    lines = markdown_table(table.columns, rows)
    said = comparison_lines(groups)
    return [*lines, "", *said] if said else lines


def comparison_lines(groups: Sequence[Group]) -> list[str]:
    """Return, of one topic, how our best row stands to the others; only rows that count."""
    ours = best(group for group in groups if group.is_ours)
    if ours is None:
        return ["No row of ours counts here: nothing is claimed."] if _has_ours(groups) else []
    ours_us = ours.median("p99_us")
    assert ours_us is not None
    lines = []
    baseline = best(_by_hand(groups, ours))
    if baseline is not None:
        lines.append(
            f"- p99 of {ours.queue}: {ours_us:,.0f} µs, "
            f"{_ratio(baseline.median('p99_us'), ours_us)} the best set-up by hand at equal bulk "
            f"({baseline.queue}: {baseline.median('p99_us'):,.0f} µs, "
            f"bulk {_mbit(baseline)} against {_mbit(ours)} Mbit/s)."
        )
    slower = best(
        g for g in groups if not g.is_ours and g.queue != IDLE and not _carries_as_much(g, ours)
    )
    if slower is not None and (slower.median("p99_us") or 0.0) < ours_us:
        lines.append(
            f"- {slower.queue} reached {slower.median('p99_us'):,.0f} µs with less bulk "
            f"({_mbit(slower)} Mbit/s)."
        )
    unshaped = best(group for group in groups if group.queue in UNSHAPED)
    if unshaped is not None:
        lines.append(
            f"- {_ratio(unshaped.median('p99_us'), ours_us).capitalize()} no shaping "
            f"({unshaped.queue}: {unshaped.median('p99_us'):,.0f} µs)."
        )
    lines += _same_tree_line(groups)
    left_out = [group.queue for group in groups if not group.counts]
    if left_out:
        lines.append(f"- Not compared, since they do not count: {', '.join(left_out)}.")
    return lines


def _carries_as_much(group: Group, ours: Group) -> bool:
    theirs, own = group.median("bulk_bits_per_s"), ours.median("bulk_bits_per_s")
    return theirs is not None and own is not None and theirs >= EQUAL_BULK * own


def _by_hand(groups: Iterable[Group], ours: Group) -> list[Group]:
    """Return the shapers made by hand that carry as much bulk as `ours`."""
    return [
        group
        for group in groups
        if not group.is_ours
        and group.queue not in (IDLE, *UNSHAPED)
        and _carries_as_much(group, ours)
    ]


def _same_tree_line(groups: Iterable[Group]) -> list[str]:
    """Return what classifying in BPF changes where the tree is the same."""
    pair = {group.queue: group for group in groups if group.queue in SAME_TREE and group.counts}
    if len(pair) < len(SAME_TREE):
        return []
    by_u32, by_us = (pair[name] for name in SAME_TREE)
    cost_u32, cost_us = by_u32.median("cpu_ns_per_packet"), by_us.median("cpu_ns_per_packet")
    if cost_u32 is None or cost_us is None:
        return []
    return [
        (
            f"- The same tree and segment limit, classified by cls_u32 and by us: p99 "
            f"{by_u32.median('p99_us'):,.0f} and {by_us.median('p99_us'):,.0f} µs, CPU "
            f"{cost_u32 / 1e3:.1f} and {cost_us / 1e3:.1f} µs per packet. That delay is the "
            "tree's, not our classifier's; what the classifier adds is classes by cgroup, mark, "
            "DSCP, prefix and whitelist, budgets and leases, changed while traffic flows."
        )
    ]


def _has_ours(groups: Iterable[Group]) -> bool:
    return any(group.is_ours for group in groups)


def _mbit(group: Group) -> str:
    bulk = group.median("bulk_bits_per_s")
    return "–" if bulk is None else f"{bulk / 1e6:.1f}"


def _ratio(theirs_us: float | None, ours_us: float) -> str:
    """Return `3.1 times less than`, in words that say who is better."""
    if theirs_us is None or ours_us <= 0 or theirs_us <= 0:
        return "not comparable with"
    ratio = theirs_us / ours_us
    if round(ratio, 2) == 1:
        return "the same as"
    if ratio > 1:
        return f"{_times(ratio)} times less than"
    return f"{_times(1 / ratio)} times more than"


def _times(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.2f}"


# --- the headline -----------------------------------------------------------------------------


def headline_topics(groups: Iterable[Group]) -> dict[Topic, list[Group]]:
    """Return the topics of the headline: signal-under-bulk at MTU 1500, of the newest kernel.

    Virtual time where there is any: on a real clock only ratios mean something.
    """
    chosen = {
        topic: own
        for topic, own in by_topic(groups).items()
        if topic.scenario == HEADLINE_SCENARIO
        and (topic.mtu == HEADLINE_MTU or topic.link_bits_per_s >= FAST_BITS_PER_S)
    }
    if not chosen:
        return {}
    clock = "virtual" if any(topic.clock == "virtual" for topic in chosen) else "real"
    kernel = max((t.kernel for t in chosen if t.clock == clock), key=kernel_order)
    return {t: own for t, own in chosen.items() if (t.clock, t.kernel) == (clock, kernel)}


def kernel_order(release: str) -> tuple[int, ...]:
    """Return a key by which 6.12 comes after 6.1."""
    return tuple(int(part) for part in release.split("-")[0].split(".") if part.isdigit())


def headline_rows(groups: Iterable[Group]) -> list[tuple[str, ...]]:
    """Return the articles' two rows and ours beside each, as (set-up, link, jitter, p99, loss).

    Ours: jitter from the mean to the p99 of |Δ delay|, loss over all repeats. For
    the articles' worse row, the spread over the plausible set-ups of HTB + netem;
    for the better one, our best row. Only what counts.
    """
    topics = headline_topics(groups)
    out: list[tuple[str, ...]] = []
    for number, (strategy, jitter, loss) in enumerate(ARTICLE_ROWS):
        out.append((f"articles: {strategy}", "not named", jitter, "not given", loss))
        for topic, own in topics.items():
            if number == 0:
                chosen = [g for g in own if g.queue.startswith(HTB_NETEM_PREFIX) and g.counts]
                name = f"HTB + netem here, {len(chosen)} set-ups"
            else:
                winner = best(group for group in own if group.is_ours)
                chosen = [] if winner is None else [winner]
                name = "" if winner is None else winner.queue
            if chosen:
                out.append(_headline_row(name, topic, chosen))
    return out


def _headline_row(name: str, topic: Topic, groups: Sequence[Group]) -> tuple[str, ...]:
    means = [g.median("jitter_mean_us") for g in groups]
    tails = [g.median("jitter_p99_us") for g in groups]
    delays = [g.median("p99_us") for g in groups]
    low, high = min(m for m in means if m is not None), max(t for t in tails if t is not None)
    p99 = sorted({f"{d:,.0f}" for d in delays if d is not None}, key=lambda s: float(_plain(s)))
    return (
        name,
        wire_text(topic),
        f"{low:,.0f}–{high:,.0f} µs",
        f"{p99[0]} µs" if len(p99) == 1 else f"{p99[0]}–{p99[-1]} µs",
        loss_of(groups).text(),
    )


def wire_text(topic: Topic) -> str:
    """Return the wire of a row: its rate, and its MTU where that is not the headline's."""
    link = link_text(topic.link_bits_per_s)
    return link if topic.mtu == HEADLINE_MTU else f"{link}, MTU {topic.mtu}"


def _plain(text: str) -> str:
    return text.replace(",", "")


HEADLINE_COLUMNS = ("set-up", "link", ">delay jitter", ">p99 delay", ">lost")


def netem_spread(groups: Iterable[Group]) -> list[tuple[str, ...]]:
    """Return, per set-up of HTB + netem, what it reached: (set-up, link, jitter, p99, lost)."""
    return [
        _headline_row(group.queue + ("" if group.counts else " (does not count)"), topic, [group])
        for topic, own in headline_topics(groups).items()
        for group in own
        if group.queue.startswith(HTB_NETEM_PREFIX) and "jitter_mean_us" in group.figures
    ]


# --- the targets ------------------------------------------------------------------------------

# Of issue 3, for kernel 6.12, MTU 1500, virtual time: (figure, at most) per wire.
TARGETS: Mapping[int, tuple[tuple[str, str, float], ...]] = {
    100_000_000: (
        ("p99_us", "p99 delay", 200.0),
        ("jitter_mean_us", "jitter, mean", 54.0),
        ("jitter_p99_us", "jitter, p99", 160.0),
        ("p999_us", "p99.9 delay", 600.0),
    ),
    300_000_000: (
        ("p99_us", "p99 delay", 300.0),
        ("jitter_mean_us", "jitter, mean", 50.0),
        ("jitter_p99_us", "jitter, p99", 220.0),
        ("p999_us", "p99.9 delay", 1_000.0),
    ),
}
LEAST_BULK_SHARE = 0.97
LEAST_TIMES_UNSHAPED = 100.0
TARGET_COLUMNS = ("link", "profile", "target", ">wanted", ">reached", "met")


def target_rows(groups: Iterable[Group]) -> list[tuple[str, ...]]:
    """Return the targets beside what our best row of each wire reached."""
    out: list[tuple[str, ...]] = []
    topics = headline_topics(groups)
    for topic, own in topics.items():
        loss = loss_of(group for group in own if group.holds_link)
        ours = best(group for group in own if group.is_ours)
        if ours is None or topic.link_bits_per_s not in TARGETS:
            continue
        found: list[tuple[str, str, str, bool]] = []
        for figure, what, most in TARGETS[topic.link_bits_per_s]:
            value = ours.median(figure)
            if value is not None:
                found.append((what, f"≤ {most:,.0f} µs", f"{value:,.0f} µs", value <= most))
        found.append(
            ("lost, htb, prio and edt", f"0 of ≥ {LEAST_PROBES:,}", loss.text(), loss.claims_none)
        )
        share = bulk_share(ours)
        if share is not None:
            found.append(
                ("bulk of the shaper's rate", "≥ 97 %", f"{100 * share:.1f} %",
                 share >= LEAST_BULK_SHARE)
            )  # fmt: skip
        found += _against_others(own, ours)
        link = link_text(topic.link_bits_per_s)
        out += [
            (link, ours.queue, what, wanted, reached, "yes" if met else "**no**")
            for what, wanted, reached, met in found
        ]
    return out


def _against_others(own: Sequence[Group], ours: Group) -> list[tuple[str, str, str, bool]]:
    ours_us = ours.median("p99_us")
    assert ours_us is not None
    found = []
    baseline = best(_by_hand(own, ours))
    if baseline is not None:
        # No worse: what its repeats differ by is no difference.
        theirs = baseline.figures["p99_us"]
        found.append(
            ("p99 no worse than the best by hand",
             (f"≤ {theirs.high:,.0f} µs ({baseline.queue}: "
             f"{_spread_text(baseline, 'p99_us', 1.0, 0)})"),
             f"{_spread_text(ours, 'p99_us', 1.0, 0)} µs", ours_us <= theirs.high)
        )  # fmt: skip
    unshaped = best(g for g in own if g.queue in UNSHAPED)
    if unshaped is not None and (theirs_us := unshaped.median("p99_us")) is not None:
        times = theirs_us / ours_us
        found.append(
            ("p99 against no shaping", "≥ 100 times less", f"{times:,.0f} times less",
             times >= LEAST_TIMES_UNSHAPED)
        )  # fmt: skip
    return found


# --- the whole --------------------------------------------------------------------------------


def facts_line(facts: Mapping[str, Any]) -> str:
    """Return what the figures were measured on, in one line."""
    parts = []
    if facts.get("kernel"):
        parts.append(f"kernel {facts['kernel']}")
    if facts.get("cpu"):
        cpus = facts.get("cpus")
        parts.append(f"{cpus} CPU ({facts['cpu']})" if cpus else str(facts["cpu"]))
    if facts.get("memory_mb"):
        parts.append(f"{facts['memory_mb']:,} MB")
    known = {"kernel", "cpu", "cpus", "memory_mb", "clock"}
    parts += [
        f"{name.replace('_', ' ')} {value}"
        for name, value in facts.items()
        if name not in known and value
    ]
    if facts.get("clock"):
        parts.append(f"clock: {facts['clock']}")
    return f"Machine: {', '.join(parts)}." if parts else ""


FULL_TEXT = f"{100 * FULL_SHARE:g} %"
IDLE_TEXT = f"{100 * IDLE_SHARE:g} %"
LEGEND = (
    "Median over the repeats, with the range where it differs; delays in microseconds. `of "
    "shaper`: bulk as a share of what full frames carry at the shaper's rate. **Bold**: the "
    f"smallest p99 of those that count. ~~Struck~~: bulk under {FULL_TEXT} of the shaper's rate, "
    f"or the CPU under {IDLE_TEXT} idle: it does not count and is compared with nothing."
)


def markdown(rows: Iterable[Row], facts: Mapping[str, Any]) -> str:
    """Return headline, targets and all tables.

    Args:
        facts: what `curves.machine_facts` returns, and whatever else the run knows.
    """
    groups = aggregate(rows)
    parts = ["# Benchmark", "", facts_line(facts), "", LEGEND, ""]
    parts += headline_markdown(groups)
    parts += tables_markdown(groups, level=2)
    return "\n".join(parts).rstrip() + "\n"


def headline_markdown(groups: Sequence[Group]) -> list[str]:
    """Return the section with the articles' rows and the targets; empty without such rows."""
    topics = headline_topics(groups)
    if not topics:
        return []
    first = next(iter(topics))
    lines = [
        "## Headline",
        "",
        (
            f"{HEADLINE_SCENARIO}, MTU {HEADLINE_MTU} unless named, kernel {first.kernel}, "
            f"{first.clock} time. "
            "Jitter: from the mean to the p99 of the difference between neighbouring delays; the "
            "articles do not say what theirs is."
        ),
        "",
        *markdown_table(HEADLINE_COLUMNS, headline_rows(groups)),
        "",
    ]
    loss = loss_of(group for own in topics.values() for group in own if group.holds_link)
    lines += [
        f"Lost over all probes of our profiles with a queue (htb, prio, edt): {loss.text()}.",
        "`police` holds classes under their ceilings, and has no queue to hold the link in.",
        "",
    ]
    targets = target_rows(groups)
    if targets:
        lines += ["Targets of the project, and our best row of each wire:", ""]
        lines += [*markdown_table(TARGET_COLUMNS, targets), ""]
        lines += ["No worse: not above the largest p99 of the other's repeats.", ""]
    return lines


def scenario_heading(name: str, *, level: int) -> list[str]:
    """Return the heading of a scenario, with what it is and what its figures are."""
    one = SCENARIOS[name]
    about = f"{one.about[0].upper()}{one.about[1:]}. Figures: {one.measured}."
    return [f"{'#' * level} {name}", "", about, ""]


def tables_markdown(groups: Sequence[Group], *, level: int) -> list[str]:
    """Return a section per scenario with its tables."""
    lines: list[str] = []
    scenario = ""
    for topic, own in by_topic(groups).items():
        if topic.scenario != scenario:
            scenario = topic.scenario
            lines += scenario_heading(scenario, level=level)
        lines += [f"{'#' * (level + 1)} {topic_text(topic)}", ""]
        lines += [*topic_markdown(topic, own), ""]
    return lines
