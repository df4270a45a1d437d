# SPDX-License-Identifier: Apache-2.0
"""docs/performance.md and the README's headline, written from the rows of a run.

`python -m shapeagent.lab.bench.document` writes both again from
docs/performance/bench.json; `--check` changes nothing and exits 1 where one of
them says something else than the rows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shapeagent.lab.bench.catalog import (
    IDLE,
    INGRESS_SHAPER_SHARE,
    SHAPER_SHARE,
    WARM_UP_S,
)
from shapeagent.lab.bench.curves_plot import curves_markdown
from shapeagent.lab.bench.plots import KINDS, chart_names
from shapeagent.lab.bench.queues import EGRESS, INGRESS, AttachShaper, Place, Queue
from shapeagent.lab.bench.report import (
    ARTICLE_ROWS,
    FAST_BITS_PER_S,
    FULL_TEXT,
    HEADLINE_COLUMNS,
    HEADLINE_SCENARIO,
    IDLE_TEXT,
    LEGEND,
    UNSHAPED,
    Group,
    Row,
    Topic,
    aggregate,
    best,
    by_topic,
    facts_line,
    headline_markdown,
    headline_topics,
    loss_of,
    markdown_table,
    netem_spread,
    scenario_heading,
    topic_markdown,
    topic_text,
    wire_text,
)
from shapeagent.lab.topology import Port
from shapeagent.lab.wire import WIRE_OVERHEAD_BYTES
from shapeagent.model.errors import FailedError, InputError

README_BEGIN = "<!-- bench:begin -->"
README_END = "<!-- bench:end -->"
MODULE = "shapeagent.lab.bench.document"
IMAGES = "performance"  # the folder of charts and rows, beside the document
ROWS_FILE = "bench.json"
EXAMPLE_RATE_BITS_PER_S = 98_500_000

_CHART_TEXT = {
    "cdf": "Distribution of the delay under each queue",
    "time": "Delay over time under each queue",
    "front": "p99 delay against bulk throughput",
}


# --- the commands of a set-up -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Recorder(Place):
    """A place that notes what a queue would type, and types nothing."""

    typed: list[str] = field(default_factory=list)

    def tc(self, *words: str) -> str:
        self.typed.append(f"tc {' '.join(words)}")
        return ""

    def ip(self, *words: str) -> str:
        self.typed.append(f"ip {' '.join(words)}")
        return ""

    def batch(self, lines: Sequence[str], device: str | None = None) -> None:
        device = f"dev {device or self.port.device}"
        self.typed.extend(f"tc {line.replace('DEV', device)}" for line in lines)


def set_up_lines(queue: Queue, rate_bits_per_s: int, device: str = "eth0") -> list[str]:
    """Return what the benchmark types to make a queue on `device` at one rate, with MTU 1500.

    They come from the queue itself: there is no second copy that could differ.
    """
    lines: list[str] = []
    port, attach = Port("lab", device, "", ""), _recording_attach(lines)
    place = _Recorder(port, rate_bits_per_s, 1500, attach, lines)
    with queue.enter(place):
        return lines


def _recording_attach(lines: list[str]) -> AttachShaper:
    @contextmanager
    def attach(
        netns: str,
        device: str,
        link_rate_bits_per_s: int,
        *,
        profile: str | None = None,
        ingress: str = "count",
        hook: str | None = None,
    ) -> Iterator[int]:
        words = ["shapectl", "attach", device, "--link-rate", f"{link_rate_bits_per_s / 1e6:g}mbit"]
        words += [] if profile is None else ["--profile", profile]
        words += [] if ingress == "count" else ["--ingress", ingress]
        words += [] if hook is None else ["--hook", hook]
        lines.append(" ".join(words))
        yield link_rate_bits_per_s

    return attach


def _set_ups(queues: Iterable[Queue], rate_bits_per_s: int) -> list[str]:
    out: list[str] = []
    for queue in queues:
        commands = set_up_lines(queue, rate_bits_per_s)
        out += [f"**{queue.name}**: {queue.about}.", ""]
        if commands:
            out += ["```", *commands, "```", ""]
    return out


# --- the document -----------------------------------------------------------------------------

_VIRTUAL = """\
**Virtual time.** QEMU's software emulation of one x86-64 CPU (`qemu64`) with `-icount shift=0`:
the guest's clock advances one nanosecond per instruction and jumps over idle time, so a busy host
changes nothing and microseconds repeat. The kernel runs with `mitigations=off`, since every
instruction costs the same here and the price of a mitigation would be made up. There are no
caches, no branch prediction and no memory bus: CPU cost is a number of instructions. One CPU
serves sender, shaper, router, receiver and timers alike, so part of each delay is CPU time; the
idle row says how much on an empty link.

**What the tail is made of.** Under `prio` at 100 Mbit/s the longest wait for the wire is one frame
(123 µs), and 9 µs more for the probe's own tokens and time on it. What p99.9 has beyond that and
the idle delay is the CPU, most of all while it splits a large packet into frames or takes a batch
of acknowledgements: the same cell on a CPU of half the speed (`-icount shift=1`) has an idle p99.9
of 50 µs for 30, a p50 of 96 for 92, but a p99 of 191 for 159 and a p99.9 of 274 for 178. Smaller
packets are no remedy: with a segment limit of 8 frames, p99 was 167."""

_REAL = """\
**Real time.** The rows of clock `real` come from a machine that did other things too: compare
them within a table, and take ratios, not microseconds."""

_METHOD = f"""\
Three network namespaces: a sender, a router, a receiver, joined by veth. The shaper stands at the
sender's device (in `ingress`: at the receiver's). veth has no wire, so behind the shaper the
router's egress is a modelled one: netem with `limit 1000 rate LINK {WIRE_OVERHEAD_BYTES}`, which
holds each packet for as long as its bytes and {WIRE_OVERHEAD_BYTES} bytes of preamble, checksum
and gap take and sends them in order (on kernels without netem a TBF). Every shaper gets
{100 * SHAPER_SHARE:g} % of the wire (`ingress`: {100 * INGRESS_SHAPER_SHARE:g} %), counted with
the same {WIRE_OVERHEAD_BYTES} bytes per packet where it knows the word.

Each probe leaves at a random time within its interval of 2 ms: a fixed grid would meet the
shaper's period at the same few phases. The kernel stamps it on arrival, and the receiver reads
the stamps after the run, so no delay contains a wake-up of the reader. Bulk is kept in flight all
the time; after a warm-up of {WARM_UP_S:g} s the window begins. Jitter is the absolute
difference between the delays of neighbouring probes.

A cell counts only if bulk carried at least {FULL_TEXT} of the shaper's rate (of the wire,
where nothing shapes) and the CPU was at least {IDLE_TEXT} idle. Otherwise nothing queued, or
the CPU was measured instead of the queue."""

_LEASES = """\
`lease-storm` runs Debian's etcd with its data on tmpfs. Twenty leases of 2 s, the shortest that
etcd grants with its defaults, so that starvation loses them; one keep-alive every 5 ms, the
leases in turn, pipelined over one connection to etcd's JSON gateway. A lease is lost where etcd
says so, or where no answer came for 2 s, which is when etcd's own client gives it up."""

_LIMITS = f"""\
- No NIC: no transmit ring and no BQL, no DMA, no interrupt moderation, no hardware queues. Below
  the shaper there is veth and the modelled wire only. What a driver's ring adds on a real host
  comes on top.
- A GSO packet crosses the wire as one: it holds the wire for all its bytes, and what waits behind
  it waits for the whole of it, but its {WIRE_OVERHEAD_BYTES} bytes of overhead count once. On a
  real wire they count per frame; with a segment limit the difference is small, without one it
  flatters bulk.
- Nothing pre-empts a frame on the wire: 1,538 bytes take 123 µs at 100 Mbit/s and 41 µs at 300
  Mbit/s. That is the floor of jitter under load.
- The fastest wire is what one virtual CPU fills while {IDLE_TEXT} of it stays idle.
- One path, no loss but that of full queues, no competing senders, no round-trip time to speak of.
- The articles name neither link, load, probe nor what their jitter is. Their rows stand beside
  ours for orientation; no factor between the two is claimed."""


def performance_document(
    rows: Iterable[Row],
    curves: Mapping[str, Any] | None,
    facts: Mapping[str, Any],
    *,
    charts: Collection[str] | None = None,
) -> str:
    """Return docs/performance.md.

    Args:
        rows: as `cell.run_cell` gives them.
        curves: what `curves.run_curves` returned, or None.
        facts: what `curves.machine_facts` returned for the machine of the rows.
        charts: the file names that exist beside it; None for all that can be drawn.

    Raises: InputError (bench-no-rows).
    """
    groups = aggregate(rows)
    if not groups:
        raise InputError("bench-no-rows", "There are no rows to write about.", hint="make bench")
    clocks = {group.topic.clock for group in groups}
    parts = [
        "<!-- SPDX-License-Identifier: Apache-2.0 -->",
        f"<!-- Written by `python -m {MODULE}` from {IMAGES}/{ROWS_FILE}: do not edit. -->",
        "# Performance",
        "",
        "What signalling meets while bulk saturates the link, under shapectl and under what people",
        f"would use instead. `sudo make bench` measures the headline again ({HEADLINE_SCENARIO}),",
        "`sudo make bench-full` the rest, `sudo shapectl bench run --real` the same on your own",
        "machine.",
        "",
        facts_line(facts),
        "",
        *headline_markdown(groups),
        *_netem_section(groups),
        "## Method",
        "",
        _METHOD,
        "",
    ]
    parts += [text for clock, text in (("virtual", _VIRTUAL), ("real", _REAL)) if clock in clocks]
    parts.append("")
    if any(group.topic.scenario == "lease-storm" for group in groups):
        parts += [_LEASES, ""]
    parts += ["## Tables", "", LEGEND, ""]
    parts += _scenario_sections(groups, charts)
    if curves is not None and curves.get("rows"):
        parts += [curves_markdown(curves, images=IMAGES)]
    parts += ["## Limits", "", _LIMITS, "", *_set_up_section(groups)]
    return "\n".join(parts).rstrip() + "\n"


def _netem_section(groups: Sequence[Group]) -> list[str]:
    spread = netem_spread(groups)
    if not spread:
        return []
    strategy, jitter, loss = ARTICLE_ROWS[0]
    return [
        "## HTB + netem",
        "",
        f"The articles give {jitter} and {loss} loss for {strategy} and no set-up. These are the",
        "plausible ones (their commands are below), and what each reached here:",
        "",
        *markdown_table(HEADLINE_COLUMNS, spread),
        "",
    ]


def _scenario_sections(groups: Sequence[Group], charts: Collection[str] | None) -> list[str]:
    names = chart_names(groups)
    out: list[str] = []
    scenario = ""
    for topic, own in by_topic(groups).items():
        if topic.scenario != scenario:
            scenario = topic.scenario
            out += scenario_heading(scenario, level=3)
        out += [f"#### {topic_text(topic)}", "", *topic_markdown(topic, own), ""]
        for kind in KINDS:
            name = names[topic][kind]
            if charts is None or name in charts:
                out += [f"![{_CHART_TEXT[kind]}: {topic_text(topic)}]({IMAGES}/{name})", ""]
    return out


def _set_up_section(groups: Sequence[Group]) -> list[str]:
    measured = {group.queue for group in groups}
    rate = EXAMPLE_RATE_BITS_PER_S
    egress = [queue for name, queue in EGRESS.items() if name in measured]
    out = [
        "## Set-ups",
        "",
        f"The commands of each row, here for {rate / 1e6:g} Mbit/s, with `eth0` for the device.",
        "",
        *_set_ups(egress, rate),
    ]
    ingress = [queue for name, queue in INGRESS.items() if name in measured]
    if ingress:
        out += ["On what arrives:", "", *_set_ups(ingress, rate)]
    return out


# --- the README -------------------------------------------------------------------------------


def readme_block(rows: Iterable[Row]) -> str:
    """Return the README's headline, without the markers. Raises InputError (bench-no-rows)."""
    groups = aggregate(rows)
    topics = headline_topics(groups)
    if not topics:
        raise InputError(
            "bench-no-rows",
            f"There are no rows of {HEADLINE_SCENARIO} at MTU 1500.",
            hint="make bench",
        )
    first = next(iter(topics))
    clock = "virtual time" if first.clock == "virtual" else "a real clock"
    lines = [
        "Signalling (a UDP probe of 92 B every 2 ms, one way) beside 8 saturating TCP bulk flows,",
        f"kernel {first.kernel}, {clock}, modelled wire:",
        "",
        *markdown_table(
            ("link", "queue", ">p50", ">p99", ">jitter, mean–p99", ">lost", ">bulk"),
            [
                row
                for topic, own in topics.items()
                if topic.link_bits_per_s <= FAST_BITS_PER_S
                for row in _readme_rows(topic, own)
            ],
        ),
        "",
    ]
    ours = loss_of(group for own in topics.values() for group in own if group.holds_link)
    worse, better = ARTICLE_ROWS
    lines += [
        f"Lost over all probes under htb, prio and edt: {ours.text()}. The articles behind this",
        f"project give {worse[1]} of jitter and {worse[2]} loss for {worse[0]}, {better[1]} and",
        f"{better[2]} for {better[0]}, and name no link.",
        "",
        "`sudo make bench` measures it again; method, all rows and limits:",
        f"[docs/{IMAGES}.md](docs/{IMAGES}.md).",
    ]
    return "\n".join(lines)


def _readme_rows(topic: Topic, groups: Sequence[Group]) -> list[tuple[str, ...]]:
    by_hand = best(g for g in groups if not g.is_ours and g.queue not in UNSHAPED)
    chosen = [
        next((group for group in groups if group.queue == IDLE), None),
        best(group for group in groups if group.queue in UNSHAPED),
        by_hand,
        best(group for group in groups if group.is_ours),
    ]
    notes = ("idle link", "no shaping: ", "best by hand: ", "")
    rows: list[tuple[str, ...]] = []
    for note, group in zip(notes, chosen, strict=True):
        if group is None or group.median("p99_us") is None:
            continue
        name = note if group.queue == IDLE else f"{note}{group.queue}"
        bulk = group.median("bulk_bits_per_s") or 0.0
        rows.append(
            (
                wire_text(topic),
                f"**{name}**" if group.is_ours else name,
                f"{group.median('p50_us'):,.0f} µs",
                f"{group.median('p99_us'):,.0f} µs",
                f"{group.median('jitter_mean_us'):,.0f}–{group.median('jitter_p99_us'):,.0f} µs",
                loss_of([group]).text(),
                "–" if group.queue == IDLE else f"{bulk / 1e6:.1f} Mbit/s",
            )
        )
    return rows


def replace_readme_block(text: str, rows: Iterable[Row]) -> str:
    """Return the README with its headline replaced. Raises FailedError (readme-no-markers)."""
    head, begin, rest = text.partition(README_BEGIN)
    _, end, tail = rest.partition(README_END)
    if not begin or not end:
        raise FailedError(
            "readme-no-markers", f"README.md has no {README_BEGIN} … {README_END} to write into."
        )
    return f"{head}{begin}\n{readme_block(rows)}\n{end}{tail}"


# --- files ------------------------------------------------------------------------------------


def dump_run(
    rows: Iterable[Row], curves: Mapping[str, Any] | None, facts: Mapping[str, Any]
) -> str:
    """Return docs/performance/bench.json: compact, one row a line."""

    def compact(value: object) -> str:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

    lines = ",\n".join(compact(row) for row in rows)
    return f'{{"facts":{compact(facts)},\n"curves":{compact(curves)},\n"rows":[\n{lines}\n]}}\n'


def write_performance(
    rows: Sequence[Row],
    curves: Mapping[str, Any] | None,
    facts: Mapping[str, Any],
    root: Path,
    samples_dir: Path,
) -> list[Path]:
    """Return what was written: the rows, charts, docs/performance.md, and README.md.

    Args:
        root: of the checkout.
        samples_dir: holds the samples of the rows.

    Raises: UnsupportedError (plot-missing), FailedError (readme-no-markers), InputError.

    Effects: replaces the charts in docs/performance; nothing where the rows are refused.
    """
    from shapeagent.lab.bench.curves_plot import plot_curves
    from shapeagent.lab.bench.plots import plot_rows

    performance_document(rows, curves, facts)
    replace_readme_block((root / "README.md").read_text(encoding="utf-8"), rows)
    folder = root / "docs" / IMAGES
    old = set(folder.glob("*.png"))
    paths = plot_rows(rows, samples_dir, folder)
    if curves is not None and curves.get("rows"):
        paths += plot_curves(curves["rows"], folder)
    for path in old - set(paths):
        path.unlink()
    (folder / ROWS_FILE).write_text(dump_run(rows, curves, facts), encoding="utf-8")
    return [folder / ROWS_FILE, *paths, *write_pages(root)]


def pages(root: Path) -> dict[Path, str]:
    """Return the wanted text of docs/performance.md and README.md, by the committed rows.

    Raises: InputError (bench-rows-invalid), FailedError (readme-no-markers).
    """
    folder = root / "docs" / IMAGES
    path = folder / ROWS_FILE
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
        rows, curves, facts = run["rows"], run["curves"], run["facts"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError("bench-rows-invalid", f"{path} is no run of the benchmark.") from error
    charts = {chart.name for chart in folder.glob("*.png")}
    readme = root / "README.md"
    return {
        root / "docs" / f"{IMAGES}.md": performance_document(rows, curves, facts, charts=charts),
        readme: replace_readme_block(readme.read_text(encoding="utf-8"), rows),
    }


def stale_pages(root: Path) -> list[Path]:
    """Return the pages that say something else than the committed rows.

    Without rows there must be no page: what it says would come from nowhere.
    """
    if not (root / "docs" / IMAGES / ROWS_FILE).exists():
        page = root / "docs" / f"{IMAGES}.md"
        return [page] if page.exists() else []
    return [
        path
        for path, text in pages(root).items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]


def write_pages(root: Path) -> list[Path]:
    """Return the pages, after writing them from the committed rows. Raises as `pages`."""
    wanted = pages(root)
    for path, text in wanted.items():
        path.write_text(text, encoding="utf-8")
    return list(wanted)


def main(argv: Sequence[str]) -> int:
    """Write the pages, or with `--check` say which are stale; return the exit status."""
    root = Path(__file__).resolve().parents[4]
    if list(argv) == ["--check"]:
        stale = stale_pages(root)
        for path in stale:
            sys.stderr.write(f"stale: {path.relative_to(root)}; python -m {MODULE} writes it\n")
        return 1 if stale else 0
    if argv:
        sys.stderr.write("usage: python -m shapeagent.lab.bench.document [--check]\n")
        return 2
    for path in write_pages(root):
        sys.stderr.write(f"written: {path.relative_to(root)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
