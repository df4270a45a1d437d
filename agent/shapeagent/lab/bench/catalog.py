# SPDX-License-Identifier: Apache-2.0
"""What can be measured: scenarios, wires, and the sets of cells behind `make bench`. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from shapeagent.lab.bench.queues import EGRESS, INGRESS, queue_named
from shapeagent.model.errors import InputError

IDLE = "idle"
OUR_QUEUES = ("shapectl-htb", "shapectl-prio", "shapectl-edt")
# Of the wire, both counting 24 bytes per packet: the shaper must be the bottleneck.
SHAPER_SHARE = 0.985
# What arrives is held further below, or the queue stays at the sender's side of the wire.
INGRESS_SHAPER_SHARE = 0.90
LINKS_BITS_PER_S = (100_000_000, 300_000_000)
MTUS = (1500, 9000)
REPEATS = 3
# Rows of our profiles with a queue are long: no loss is claimed of 100,000 probes at each link.
HEADLINE_OURS_S = 22.5
HEADLINE_BY_HAND_S = 3.0
DURATION_S = 6.0
WARM_UP_S = 2.0
# The spread of htb+netem over plausible set-ups is not part of the headline.
NOT_IN_HEADLINE = ("htb+netem-delay", "htb+netem-jitter")
# Wires that one emulated CPU fills with time to spare only by jumbo frames, up to the fastest.
FAST_LINKS_BITS_PER_S = (1_000_000_000, 2_000_000_000)
FAST_MTU = 9000
FAST_S = 4.0
FAST_QUEUES = ("pfifo_fast", "htb+u32", "tbf+prio+fq_codel", "shapectl-htb", "shapectl-prio")


@dataclass(frozen=True, slots=True)
class Scenario:
    """One mix of traffic. The figures of a row are those of `measured`."""

    name: str
    about: str
    measured: str
    ingress: bool = False
    links_bits_per_s: tuple[int, ...] = LINKS_BITS_PER_S
    mtus: tuple[int, ...] = (1500,)


SCENARIOS: dict[str, Scenario] = {
    one.name: one
    for one in (
        Scenario(
            "signal-under-bulk",
            "one-way UDP probes of 92 B every 2 ms, TCP request/response, 8 bulk TCP flows",
            "one-way delay of the probes",
            mtus=MTUS,
        ),
        Scenario(
            "signal-under-flood",
            "the same, and UDP bulk at 1.5 times the link",
            "one-way delay of the probes",
        ),
        Scenario(
            "token-stream",
            "64 SSE streams of 50 tokens/s beside a weight pull of 8 TCP flows",
            "one-way delay of the tokens; gap_* are the gaps between tokens of a stream",
        ),
        Scenario(
            "lease-storm",
            "keep-alives of 20 leases of a real etcd beside 8 bulk TCP flows",
            "round trip of a keep-alive",
        ),
        Scenario(
            "kv-sync",
            "256 B requests with 4 KiB answers on one connection beside 4 flows of KV blocks",
            "round trip of a request",
        ),
        Scenario(
            "ingress",
            "the probes and bulk of signal-under-bulk, shaped where they arrive",
            "one-way delay of the probes",
            ingress=True,
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One run: a scenario over a wire under a queue."""

    scenario: str
    queue: str
    link_bits_per_s: int
    mtu: int
    repeat: int
    duration_s: float
    warm_up_s: float = WARM_UP_S

    @property
    def key(self) -> str:
        """Names the cell, also as a file name."""
        return (
            f"{self.scenario}.{self.queue}.{self.link_bits_per_s // 1_000_000}m"
            f".{self.mtu}.{self.repeat}"
        )

    @property
    def shaper_bits_per_s(self) -> int | None:
        """The rate of the shaper on the wire, None where nothing shapes."""
        ingress = scenario_named(self.scenario).ingress
        if self.queue == IDLE or not queue_named(self.queue, ingress=ingress).shapes:
            return None
        share = INGRESS_SHAPER_SHARE if ingress else SHAPER_SHARE
        return int(self.link_bits_per_s * share)


def scenario_named(name: str) -> Scenario:
    """Return the scenario of that name. Raises InputError (bench-scenario-unknown)."""
    if name not in SCENARIOS:
        raise InputError(
            "bench-scenario-unknown",
            f"There is no scenario {name!r}.",
            hint=f"one of: {', '.join(SCENARIOS)}",
        )
    return SCENARIOS[name]


def queues_of(scenario: Scenario) -> tuple[str, ...]:
    """Return the names of the rows of a scenario, the idle link first."""
    return (IDLE, *(INGRESS if scenario.ingress else EGRESS))


def select_cells(
    scenarios: Sequence[str],
    *,
    queues: Sequence[str] = (),
    links_bits_per_s: Sequence[int] = (),
    mtus: Sequence[int] = (),
    repeats: int = REPEATS,
    duration_s: float = DURATION_S,
) -> tuple[Cell, ...]:
    """Return the cells, repeats outermost, so that a run that is cut short compares all queues.

    Args:
        queues, links_bits_per_s, mtus: empty for all that a scenario has.

    Raises:
        InputError: bench-scenario-unknown, bench-queue-unknown.
    """

    def one_round(repeat: int) -> Iterator[Cell]:
        for name in scenarios:
            scenario = scenario_named(name)
            for queue in queues:
                if queue != IDLE:
                    queue_named(queue, ingress=scenario.ingress)
            for link in links_bits_per_s or scenario.links_bits_per_s:
                for mtu in mtus or scenario.mtus:
                    for queue in queues or queues_of(scenario):
                        yield Cell(name, queue, link, mtu, repeat, duration_s)

    return tuple(cell for repeat in range(1, repeats + 1) for cell in one_round(repeat))


def headline_cells() -> tuple[Cell, ...]:
    """Return the cells of `make bench`: signal-under-bulk at MTU 1500 under each queue."""
    queues = [name for name in (IDLE, *EGRESS) if name not in NOT_IN_HEADLINE]
    return tuple(
        dataclasses.replace(
            cell,
            duration_s=(HEADLINE_OURS_S if cell.queue in OUR_QUEUES else HEADLINE_BY_HAND_S),
        )
        for cell in select_cells(["signal-under-bulk"], queues=queues, mtus=[1500])
    )


def fast_cells() -> tuple[Cell, ...]:
    """Return the cells of the fastest wires."""
    return select_cells(
        ["signal-under-bulk"],
        queues=[IDLE, *FAST_QUEUES],
        links_bits_per_s=FAST_LINKS_BITS_PER_S,
        mtus=[FAST_MTU],
        duration_s=FAST_S,
    )


def all_cells() -> tuple[Cell, ...]:
    """Return the cells of `make bench-full`, the headline's first."""
    headline = headline_cells()
    known = {cell.key for cell in headline}
    rest = (cell for cell in select_cells(list(SCENARIOS)) if cell.key not in known)
    return (*headline, *fast_cells(), *rest)


# By the name that `bench run --set` knows.
SETS: dict[str, Callable[[], tuple[Cell, ...]]] = {
    "headline": headline_cells,
    "fast": fast_cells,
    "all": all_cells,
}
