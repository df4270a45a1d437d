# SPDX-License-Identifier: Apache-2.0
"""`make perf`: measures every row, prints the table, writes build/perf.json.

Exit status: 0, or 1 where a row misses its target. Rows are functions in
`rows_<topic>.py`; see perflib.py.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import time
import traceback
from pathlib import Path

from perflib import HERE, ROOT, ROWS, Options, Result

_COLUMNS = ("what", "value", "target", "", "note")


def main() -> int:
    """Return the exit status."""
    for path in sorted(HERE.glob("rows_*.py")):
        importlib.import_module(path.stem)
    arguments = _parser().parse_args()
    if os.geteuid() != 0:
        print("make perf needs root: BPF and network namespaces", file=sys.stderr)
        return 3
    options = Options(quick=arguments.quick, source=arguments.bpf)
    started = time.monotonic()
    results: list[tuple[str, Result]] = []
    for name in arguments.only or list(ROWS):
        begun = time.monotonic()
        try:
            found = list(ROWS[name](options))
        except Exception:  # one broken row must not hide the others
            traceback.print_exc()
            found = [Result(name, float("nan"), "", failure="could not be measured")]
        took = time.monotonic() - begun
        print(f"# {name}: {took:.1f} s", file=sys.stderr, flush=True)
        results += [(name, result) for result in found]
    print_table([result for _, result in results])
    print(
        f"\n{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}, "
        f"Python {platform.python_version()}; {time.monotonic() - started:.0f} s"
    )
    write_json(results, arguments.output, quick=arguments.quick)
    return 0 if all(result.ok for _, result in results) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measure shapectl against its targets.")
    parser.add_argument(
        "--only", nargs="+", metavar="ROW", choices=list(ROWS), help=", ".join(ROWS)
    )
    parser.add_argument("--quick", action="store_true", help="fewer repeats, rougher figures")
    parser.add_argument(
        "--bpf", type=Path, help="measure this copy of bpf/ (rows hit, updates, lists)"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "perf.json")
    return parser


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.4g}"


def print_table(results: list[Result]) -> None:
    """Print one line per result, in columns."""
    lines = [_COLUMNS]
    for result in results:
        sign = ">=" if result.at_least else "<="
        target = "-" if result.target is None else f"{sign} {_number(result.target)}"
        note = "; ".join(part for part in (result.note, result.failure) if part)
        lines.append(
            (
                result.name,
                f"{_number(result.value)} {result.unit}",
                target,
                "ok" if result.ok else "MISS",
                note,
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    for line in lines:
        cells = [line[column].ljust(widths[column]) for column in range(4)]
        print("  ".join([*cells, line[4]]).rstrip())


def write_json(results: list[tuple[str, Result]], path: Path, *, quick: bool) -> None:
    """Write the results as `make perf` promises: name, value, unit, target, ok, how."""
    flag = " --quick" if quick else ""
    rows = [
        {
            "name": result.name,
            "value": None if result.value != result.value else round(result.value, 4),  # NaN
            "unit": result.unit,
            "target": result.target,
            "ok": result.ok,
            "how": f"sudo .venv/bin/python tests/perf/run.py --only {row_name}{flag}",
        }
        for row_name, result in results
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
