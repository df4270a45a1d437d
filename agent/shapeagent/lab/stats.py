# SPDX-License-Identifier: Apache-2.0
"""Statistics of delay samples: pure functions, no clock and no I/O."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DelayStats:
    """What one kind of traffic met. Delays are None where nothing came back."""

    sent: int
    lost: int
    p50_us: float | None
    p90_us: float | None
    p99_us: float | None
    p999_us: float | None
    max_us: float | None
    mean_jitter_us: float | None
    p99_jitter_us: float | None

    def as_dict(self) -> dict[str, object]:
        """Return the row as `--json` prints it, microseconds to one decimal."""
        return {
            "sent": self.sent,
            "lost": self.lost,
            "p50_us": _rounded(self.p50_us),
            "p90_us": _rounded(self.p90_us),
            "p99_us": _rounded(self.p99_us),
            "p999_us": _rounded(self.p999_us),
            "max_us": _rounded(self.max_us),
            "mean_jitter_us": _rounded(self.mean_jitter_us),
            "p99_jitter_us": _rounded(self.p99_jitter_us),
        }


def quantile_nearest_rank(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of the values do not exceed.

    Args:
        values: at least one number, in any order.
        share: 0 < share <= 1; 0.99 is the 99th percentile.

    Raises:
        ValueError: no values, or `share` outside (0, 1].
    """
    if not values:
        raise ValueError("no values")
    if not 0 < share <= 1:
        raise ValueError(f"share {share} is not in (0, 1]")
    ordered = sorted(values)
    # The product of two floats may lie a hair above a whole number (0.07 * 100);
    # nearest rank must not step up for that.
    rank = math.ceil(round(share * len(ordered), 9))
    return ordered[max(rank, 1) - 1]


def jitter_us(delays_us: Sequence[float]) -> list[float]:
    """Return the absolute differences between neighbouring delays, in order of sending."""
    return [abs(b - a) for a, b in itertools.pairwise(delays_us)]


def summarize_delays(sent: int, delays_us: Sequence[float]) -> DelayStats:
    """Return the statistics of `delays_us`, the delays of the probes that came back.

    Args:
        sent: how many probes were sent; what is missing in `delays_us` was lost.
        delays_us: in order of sending.

    Raises:
        ValueError: more delays than probes.
    """
    lost = sent - len(delays_us)
    if lost < 0:
        raise ValueError(f"{len(delays_us)} delays for {sent} probes")
    if not delays_us:
        return DelayStats(sent, lost, None, None, None, None, None, None, None)
    steps = jitter_us(delays_us)
    return DelayStats(
        sent=sent,
        lost=lost,
        p50_us=quantile_nearest_rank(delays_us, 0.50),
        p90_us=quantile_nearest_rank(delays_us, 0.90),
        p99_us=quantile_nearest_rank(delays_us, 0.99),
        p999_us=quantile_nearest_rank(delays_us, 0.999),
        max_us=max(delays_us),
        mean_jitter_us=sum(steps) / len(steps) if steps else None,
        p99_jitter_us=quantile_nearest_rank(steps, 0.99) if steps else None,
    )


def improvement(before: float | None, after: float | None) -> float | None:
    """Return how many times smaller `after` is than `before`; None where one is missing."""
    if before is None or after is None or after <= 0:
        return None
    return round(before / after, 1)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)
