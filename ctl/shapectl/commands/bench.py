# SPDX-License-Identifier: Apache-2.0
"""`shapectl bench`: what each queue does to urgent traffic, measured."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from shapeagent.model.errors import FailedError, InputError, ShapeError
from shapectl.labattach import LabAttach
from shapectl.output import Bar, note, print_json, print_line, print_table
from shapectl.params import duration, rate
from shapectl.session import ShapeGroup, missing_package, session_of

_RESULTS = "build/bench.json"
_SAMPLES = "build/bench"
_CURVES = "build/curves.json"


@click.group("bench", cls=ShapeGroup)
def command() -> None:
    """Measure urgent traffic beside bulk under each queue.

    Under our profiles, and under what people use by hand.

    The traffic runs in network namespaces of its own over a modelled wire, and
    touches no interface of the host.
    """


@command.command("list")
@click.pass_context
def list_command(ctx: click.Context) -> None:
    """Show the scenarios and the queues."""
    from shapeagent.lab.bench.catalog import SCENARIOS
    from shapeagent.lab.bench.queues import EGRESS, INGRESS

    scenarios = [{"name": one.name, "about": one.about} for one in SCENARIOS.values()]
    queues = [
        {"name": one.name, "about": one.about, "scenarios": where}
        for where, table in (("all but ingress", EGRESS), ("ingress", INGRESS))
        for one in table.values()
    ]
    if session_of(ctx).json:
        print_json({"scenarios": scenarios, "queues": queues})
        return
    print_table(("scenario", "traffic"), [(row["name"], row["about"]) for row in scenarios])
    print_line()
    print_table(
        ("queue", "set-up", "scenarios"),
        [(row["name"], row["about"], row["scenarios"]) for row in queues],
    )


@command.command("run")
@click.option(
    "--real",
    is_flag=True,
    help="On this machine's kernel and clock; else in virtual machines, in virtual time.",
)
@click.option(
    "--kernel",
    "series",
    default="6.12",
    show_default=True,
    metavar="SERIES",
    help="The kernel of the virtual machines: 6.1 or 6.12.",
)
@click.option(
    "--set",
    "cell_set",
    type=click.Choice(["headline", "fast", "all"]),
    help="A whole set of cells: of `make bench`, of wires from 1 Gbit/s, of `make bench-full`.",
)
@click.option("--scenario", "scenarios", multiple=True, metavar="NAME", help="See bench list.")
@click.option("--queue", "queues", multiple=True, metavar="NAME", help="See bench list; or idle.")
@click.option(
    "--link", "links_bits_per_s", multiple=True, type=rate, metavar="RATE", help="The wire's rate."
)
@click.option(
    "--mtu", "mtus", multiple=True, type=click.IntRange(1280, 9216), help="Of all devices."
)
@click.option(
    "--repeats", type=click.IntRange(1, 100), default=3, show_default=True, help="Of each cell."
)
@click.option(
    "--duration",
    "duration_s",
    type=duration,
    metavar="TIME",
    help="What counts of each cell (1s to 10m); else 6s.",
)
@click.option(
    "--output", default=_RESULTS, show_default=True, metavar="FILE", help="Where the rows go."
)
@click.option(
    "--keep-samples", default=_SAMPLES, show_default=True, metavar="DIR", help="Raw delays."
)
@click.option("--resume", is_flag=True, help="Keep the rows that FILE has, run what is missing.")
@click.pass_context
def run_command(
    ctx: click.Context,
    real: bool,
    series: str,
    cell_set: str | None,
    scenarios: tuple[str, ...],
    queues: tuple[str, ...],
    links_bits_per_s: tuple[int, ...],
    mtus: tuple[int, ...],
    repeats: int,
    duration_s: float | None,
    output: str,
    keep_samples: str,
    resume: bool,
) -> None:
    """Run cells: a scenario over a wire under a queue.

    Without options: signal-under-bulk under every queue. Rows are saved one by
    one, so a run that was stopped goes on with --resume. In virtual time (the
    default) a noisy machine changes no figure; --real gives ratios for yours.
    """
    try:
        from shapeagent.lab.bench import catalog
        from shapeagent.lab.bench.report import terminal_table
    except ModuleNotFoundError as error:
        raise missing_package(error) from error
    session = session_of(ctx)
    if duration_s is not None and not 1 <= duration_s <= 600:
        raise InputError(
            "bench-duration", f"--duration is from 1s to 10m, got {duration_s:g}s.",
            hint="shapectl bench run --duration 8s",
        )  # fmt: skip
    if cell_set is not None:
        if scenarios or queues or links_bits_per_s or mtus or duration_s is not None:
            raise InputError(
                "bench-set", "--set is a whole set of cells; it takes no choice of them.",
                hint="leave out --set, or --scenario, --queue, --link, --mtu and --duration.",
            )  # fmt: skip
        cells = catalog.SETS[cell_set]()
    else:
        cells = catalog.select_cells(
            scenarios or ["signal-under-bulk"],
            queues=queues,
            links_bits_per_s=links_bits_per_s,
            mtus=mtus,
            repeats=repeats,
            duration_s=duration_s or catalog.DURATION_S,
        )
    clock = "real" if real else "virtual"
    rows = _Rows(Path(output), clock, "" if real else f"{series}.")
    if resume:
        rows.load({cell.key: cell.duration_s for cell in cells})
    left = [cell for cell in cells if cell.key not in rows.keys]
    if real:
        estimate_s = sum(cell.warm_up_s + cell.duration_s + 2.0 for cell in left)
    else:
        from shapeagent.lab.bench.virtual import estimate_s as estimate

        estimate_s = estimate(left)
    note(
        f"{len(left)} of {len(cells)} cells to run, {clock} time, "
        f"about {max(1, round(estimate_s / 60))} min on an idle 2-core machine"
    )
    if left:
        with Bar(len(left), estimate_s) as bar:

            def take(row: dict[str, Any]) -> None:
                rows.add(row)
                bar.advance(row["key"])

            if real:
                _run_real(left, Path(keep_samples), take)
            else:
                from shapeagent.lab.bench.virtual import run_virtual

                run_virtual(
                    left,
                    series=series,
                    tree=_checkout(),
                    samples_dir=Path(keep_samples),
                    on_row=take,
                    progress=bar.say,
                )
    found = rows.of(cells)
    if session.json:
        print_json({"facts": rows.facts, "rows": found})
        return
    for title, columns, lines in terminal_table(found):
        print_line(title)
        print_table(columns, lines)
        print_line()
    note(f"rows: {output}; raw delays: {keep_samples}")


@command.command("curves")
@click.option(
    "--real",
    is_flag=True,
    help="On this machine's kernel and clock; else in a virtual machine, in virtual time.",
)
@click.option(
    "--kernel",
    "series",
    default="6.12",
    show_default=True,
    metavar="SERIES",
    help="The kernel of the virtual machine: 6.1 or 6.12.",
)
@click.option(
    "--here",
    type=click.Choice(["virtual"]),
    hidden=True,
    help="This is the virtual machine: measure here, and call the clock so.",
)
@click.option(
    "--output", default=_CURVES, show_default=True, metavar="FILE", help="Where the rows go."
)
@click.pass_context
def curves_command(
    ctx: click.Context, real: bool, series: str, here: str | None, output: str
) -> None:
    """Measure a packet's cost by prefixes, flows, rules, classes.

    Of our classifier, cls_u32 and cls_flower, doing the same job in one run.
    The virtual machine needs 4.6 GB of memory.
    """
    session = session_of(ctx)
    with session.progress() as progress:
        if real or here:
            from shapeagent.lab.bench.curves import run_curves

            folder = Path(output).parent
            folder.mkdir(parents=True, exist_ok=True)
            attach = LabAttach(folder, lambda _: None)
            result = run_curves(attach=attach, clock=here or "real", progress=progress.step)
        else:
            from shapeagent.lab.bench.virtual import run_curves_virtual

            result = run_curves_virtual(series=series, tree=_checkout(), progress=progress.step)
    _write_json(Path(output), result)
    if session.json:
        print_json(result)
        return
    print_table(
        ("curve", "classifier", ">n", ">ns per packet"),
        [
            (row["curve"], row["classifier"], f"{row['n']:,}", f"{row['ns_per_packet']:,.0f}")
            for row in result["rows"]
        ],
    )
    note(f"rows: {output}")


@command.command("report")
@click.argument("file", default=_RESULTS, required=False)
@click.option(
    "--curves", default=_CURVES, show_default=True, metavar="FILE", help="Rows of bench curves."
)
@click.option(
    "--keep-samples", default=_SAMPLES, show_default=True, metavar="DIR", help="Raw delays."
)
@click.option(
    "--docs",
    is_flag=True,
    help="Also write docs/performance.md, its charts, and the README's headline.",
)
@click.pass_context
def report_command(
    ctx: click.Context, file: str, curves: str, keep_samples: str, docs: bool
) -> None:
    """Show the tables of a run that was saved."""
    try:
        from shapeagent.lab.bench.document import write_performance
        from shapeagent.lab.bench.report import terminal_table
    except ModuleNotFoundError as error:
        raise missing_package(error) from error
    document = _read_results(Path(file))
    if session_of(ctx).json:
        print_json(document)
    else:
        for title, columns, lines in terminal_table(document["rows"]):
            print_line(title)
            print_table(columns, lines)
            print_line()
    if docs:
        scale = _read_results(Path(curves)) if Path(curves).exists() else None
        for path in write_performance(
            document["rows"], scale, document["facts"], _checkout(), Path(keep_samples)
        ):
            note(f"wrote {path}")


def _read_results(path: Path) -> dict[str, Any]:
    """Return a results file. Raises InputError (bench-file-missing, bench-file-bad)."""
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not document["rows"] or not isinstance(document["facts"], dict):
            raise ValueError("no rows")
    except FileNotFoundError as error:
        raise InputError(
            "bench-file-missing", f"There is no {path}.", hint="make bench writes build/bench.json"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            "bench-file-bad", f"{path} is no result of shapectl bench: {error!r}",
            hint="make bench writes build/bench.json",
        ) from error  # fmt: skip
    return document


@command.command("cells", hidden=True)
@click.argument("cells_file")
@click.argument("rows_file")
@click.option(
    "--clock",
    type=click.Choice(["virtual", "real"]),
    required=True,
    help="Which clock this machine has; it goes into the rows.",
)
@click.option("--keep-samples", required=True, metavar="DIR", help="Raw delays.")
def cells_command(cells_file: str, rows_file: str, clock: str, keep_samples: str) -> None:
    """Run the cells of a JSON file on this kernel.

    One row per line; this is what runs inside the virtual machines.
    """
    from shapeagent.lab.bench.catalog import Cell

    cells = [Cell(**one) for one in json.loads(Path(cells_file).read_text(encoding="utf-8"))]

    def take(row: dict[str, Any]) -> None:
        with open(rows_file, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def note_failure(cell: Cell, error: ShapeError) -> None:
        said = [f"{error.reference}: {error.message}", *error.details]
        take({"key": cell.key, "failed": said})

    _run_real(cells, Path(keep_samples), take, note_failure, clock=clock)


def _run_real(
    cells: Sequence[Any],
    samples: Path,
    take: Callable[[dict[str, Any]], None],
    on_error: Callable[[Any, ShapeError], None] | None = None,
    *,
    clock: str = "real",
) -> None:
    from shapeagent.lab.bench.cell import run_cells

    samples.mkdir(parents=True, exist_ok=True)
    attach = LabAttach(samples, lambda _: None)
    run_cells(
        cells, attach=attach, clock=clock, samples_dir=samples, on_row=take, on_error=on_error
    )


def _checkout() -> Path:
    """Return the checkout that this program runs from. Raises InputError (bench-no-checkout)."""
    import shapeagent

    root = Path(shapeagent.__path__[0]).parents[1]
    if not all((root / name).is_dir() for name in ("agent", "ctl", "bpf")):
        raise InputError(
            "bench-no-checkout",
            "The virtual machines run the sources of a checkout, and this is an installed package.",
            hint="shapectl bench run --real, or make bench in a checkout.",
        )
    return root


class _Rows:
    """The results file: rows by key, saved after each one."""

    def __init__(self, path: Path, clock: str, release_start: str) -> None:
        from shapeagent.lab.bench.curves import read_cpu_model

        self._path = path
        self._clock = clock
        self._release_start = release_start or os.uname().release
        self._rows: dict[str, dict[str, Any]] = {}
        self.facts: dict[str, object] = {
            "host_cpu": f"{os.cpu_count()} × {read_cpu_model()}",
            "host_kernel": os.uname().release,
            "clock": clock,
            "started": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        }

    @property
    def keys(self) -> set[str]:
        """The cells that have a row."""
        return set(self._rows)

    def load(self, durations_s: dict[str, float]) -> None:
        """Take the rows from the file, but those of a cell that now runs for another time.

        Raises: InputError (bench-file-bad).
        """
        try:
            document = json.loads(self._path.read_text(encoding="utf-8"))
            rows = document["rows"]
            for row in rows:
                if (
                    row["clock"] == self._clock
                    and row["kernel"].startswith(self._release_start)
                    and row["duration_s"] == durations_s.get(row["key"], row["duration_s"])
                ):
                    self._rows[row["key"]] = row
            self.facts = document["facts"]
        except FileNotFoundError:
            return
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                "bench-file-bad",
                f"{self._path} is no result of shapectl bench: {error!r}",
                hint="move it away, or leave out --resume.",
            ) from error

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row and save the file. Raises FailedError (bench-file-write)."""
        self._rows[row["key"]] = row
        _write_json(self._path, {"facts": self.facts, "rows": list(self._rows.values())})

    def of(self, cells: Sequence[Any]) -> list[dict[str, Any]]:
        """Return the rows of these cells, in their order."""
        return [self._rows[cell.key] for cell in cells if cell.key in self._rows]


def _write_json(path: Path, document: dict[str, Any]) -> None:
    """Replace a file as a whole. Raises FailedError (bench-file-write)."""
    partial = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise FailedError(
            "bench-file-write", f"{path}: {error.strerror}", hint="--output FILE"
        ) from error
