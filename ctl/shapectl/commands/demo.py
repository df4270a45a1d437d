# SPDX-License-Identifier: Apache-2.0
"""`shapectl demo`: the same traffic without and with shapectl, measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from shapeagent.model.errors import InputError
from shapectl.labattach import LabAttach
from shapectl.output import note, print_json, print_line, print_table
from shapectl.params import duration
from shapectl.session import ShapeCommand, missing_package, session_of


@click.command("demo", cls=ShapeCommand)
@click.option(
    "--keep-samples",
    "output_dir",
    metavar="DIR",
    default="build/demo",
    show_default=True,
    help="Where the raw samples go, one CSV file per run and kind of traffic.",
)
@click.option(
    "--duration",
    "duration_s",
    type=duration,
    metavar="TIME",
    default="10s",
    show_default=True,
    help="How long each of the two runs sends (1s to 5m).",
)
@click.pass_context
def command(ctx: click.Context, output_dir: str, duration_s: float) -> None:
    """Measure real traffic without and with shapectl.

    Builds network namespaces of its own with a modelled 100 Mbit/s wire, sends
    heartbeats, a token stream and eight bulk flows through it twice, and
    removes all of it again, after Ctrl-C too. Touches no interface of the host.
    """
    session = session_of(ctx)
    if not 1 <= duration_s <= 300:
        raise InputError(
            "demo-duration",
            f"--duration is from 1s to 5m, got {duration_s:g}s.",
            hint="shapectl demo --duration 10s",
        )
    try:
        from shapeagent.lab.demo import run_demo
    except ModuleNotFoundError as error:
        raise missing_package(error) from error
    folder = Path(output_dir)
    with session.progress() as progress:
        result: Mapping[str, Any] = run_demo(
            attach=LabAttach(folder, progress.step),
            output_dir=folder,
            progress=progress.step,
            duration_s=duration_s,
        )
    if session.json:
        print_json(dict(result))
        return
    _print_result(result)
    note(f"raw samples: {output_dir}")


def _print_result(result: Mapping[str, Any]) -> None:
    rows: list[tuple[object, ...]] = []
    for traffic in ("signal", "stream"):
        for run in ("before", "after"):
            row = result[run][traffic]
            rows.append(
                (
                    traffic,
                    run,
                    _microseconds(row["p50_us"]),
                    _microseconds(row["p99_us"]),
                    _microseconds(row["max_us"]),
                    f"{row['lost']:,} of {row['sent']:,}",
                    None,
                    None,
                )
            )
    for run in ("before", "after"):
        row = result[run]["bulk"]
        throughput, ceiling = _megabits(row["throughput_bits_per_s"]), row["ceiling_bits_per_s"]
        rows.append(
            (
                "bulk", run, None, None, None, None, throughput,
                None if ceiling is None else _megabits(ceiling),
            )
        )  # fmt: skip
    print_table(
        ("traffic", "run", ">p50", ">p99", ">max", ">lost", ">throughput", ">ceiling"), rows
    )
    print_line()
    print_line(
        f"wire {_megabits(result['wire_bits_per_s'])}, queue at most {result['queue_ms']:g} ms "
        f"({result['queue_bytes']:,} B) in both runs; shaper at "
        f"{_megabits(result['link_rate_bits_per_s'])}"
    )
    print_line(f"load: {result['load']}")
    better = result["improvement_p99"]
    print_line(
        "signal p99: "
        + (f"{better:,.1f} times better with shapectl" if better else "no samples to compare")
    )


def _microseconds(value: float | None) -> str | None:
    if value is None:
        return None
    return f"{value / 1000:,.2f} ms" if value >= 1000 else f"{value:,.0f} µs"


def _megabits(bits_per_s: float) -> str:
    return f"{bits_per_s / 1e6:,.1f} Mbit/s"
