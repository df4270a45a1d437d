# SPDX-License-Identifier: Apache-2.0
"""Which cells a benchmark has, and what their keys and rates are."""

from __future__ import annotations

from pathlib import Path

import pytest

from shapeagent.lab.bench.catalog import (
    IDLE,
    NOT_IN_HEADLINE,
    OUR_QUEUES,
    SCENARIOS,
    Cell,
    all_cells,
    headline_cells,
    queues_of,
    scenario_named,
    select_cells,
)
from shapeagent.lab.bench.cell import run_cells
from shapeagent.lab.bench.queues import EGRESS, INGRESS, queue_named
from shapeagent.model.errors import InputError
from shapectl.labattach import LabAttach


def test_headline_compares_every_queue_three_times_at_both_links() -> None:
    cells = headline_cells()
    want = (len(EGRESS) + 1 - len(NOT_IN_HEADLINE)) * 2 * 3
    assert len(cells) == want, f"got {len(cells)} cells, want {want}"
    assert {cell.mtu for cell in cells} == {1500}
    assert {cell.link_bits_per_s for cell in cells} == {100_000_000, 300_000_000}


def test_headline_sends_at_least_100_000_probes_under_our_profiles_at_each_link() -> None:
    for link in (100_000_000, 300_000_000):
        seconds = sum(
            cell.duration_s
            for cell in headline_cells()
            if cell.link_bits_per_s == link and cell.queue in OUR_QUEUES
        )
        assert seconds * 500 >= 100_000, f"got {seconds * 500} probes at {link}"


def test_first_round_has_every_queue_before_any_is_repeated() -> None:
    cells = select_cells(["kv-sync"], repeats=2)
    half = len(cells) // 2
    assert {cell.repeat for cell in cells[:half]} == {1}, "got a repeat in the first round"
    assert {cell.queue for cell in cells[:half]} == set(queues_of(SCENARIOS["kv-sync"]))


def test_every_cell_has_a_key_of_its_own() -> None:
    keys = [cell.key for cell in all_cells()]
    assert len(keys) == len(set(keys)), "got two cells with one key"
    assert all("/" not in key for key in keys)


def test_full_set_begins_with_the_headline() -> None:
    headline = headline_cells()
    assert all_cells()[: len(headline)] == headline


@pytest.mark.parametrize(
    ("scenario", "queue", "want"),
    [
        ("signal-under-bulk", IDLE, None),
        ("signal-under-bulk", "pfifo_fast", None),
        ("signal-under-bulk", "cake", 98_500_000),
        ("ingress", "none", None),
        ("ingress", "ifb+cake", 90_000_000),
    ],
)
def test_shapers_are_under_the_wire(scenario: str, queue: str, want: int | None) -> None:
    (cell,) = select_cells([scenario], queues=[queue], links_bits_per_s=[100_000_000], repeats=1)[
        :1
    ]
    assert cell.shaper_bits_per_s == want


def test_unknown_scenario_is_refused_with_the_names() -> None:
    with pytest.raises(InputError) as caught:
        scenario_named("signal-under-bluk")
    assert caught.value.reference == "bench-scenario-unknown"
    assert "signal-under-bulk" in str(caught.value.hint)


@pytest.mark.parametrize(("queue", "ingress"), [("cakes", False), ("cake", True), ("none", False)])
def test_unknown_queue_is_refused_with_the_names(queue: str, ingress: bool) -> None:
    with pytest.raises(InputError) as caught:
        queue_named(queue, ingress=ingress)
    assert caught.value.reference == "bench-queue-unknown"
    assert next(iter(INGRESS if ingress else EGRESS)) in str(caught.value.hint)


def test_a_cell_that_fails_is_told_and_the_next_one_runs(tmp_path: Path) -> None:
    cells = [
        Cell(name, IDLE, 100_000_000, 1500, 1, duration_s=1.0) for name in ("nonsense", "no sense")
    ]
    failed: list[tuple[str, str]] = []
    run_cells(
        cells,
        attach=LabAttach(tmp_path, lambda _: None),
        clock="real",
        samples_dir=tmp_path,
        on_row=lambda row: pytest.fail(f"got {row}, want no row"),
        on_error=lambda cell, error: failed.append((cell.scenario, error.reference)),
    )
    want = [("nonsense", "bench-scenario-unknown"), ("no sense", "bench-scenario-unknown")]
    assert failed == want, f"got {failed}"
