# SPDX-License-Identifier: Apache-2.0
"""What we wrote, read by somebody else's netlink code: pyroute2."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from enginekit import Bench
from pyroute2 import IPRoute

from shapeagent.kernel import filters, link, netns
from shapeagent.policy.plan import MAJOR

GBIT = 1_000_000_000


@pytest.mark.parametrize("link_rate_bits_per_s", [GBIT, 10 * GBIT, 40 * GBIT, 100 * GBIT])
def test_c52_c60_pyroute2_reads_the_rates_that_the_plan_gives(
    bench: Callable[..., Bench], link_rate_bits_per_s: int
) -> None:
    one = bench()
    one.attach(profile="htb", link_rate_bits_per_s=link_rate_bits_per_s)
    with netns.open_rtnl(one.netns) as rtnl:
        index = link.read_device(rtnl, one.device).index
    with IPRoute(netns=one.netns) as ipr:
        found = {}
        for message in ipr.get_classes(index=index):
            if message.get_attr("TCA_KIND") != "htb":
                continue
            options = message.get_attr("TCA_OPTIONS")
            rate = options.get_attr("TCA_HTB_RATE64")
            ceil = options.get_attr("TCA_HTB_CEIL64")
            parms = options.get_attr("TCA_HTB_PARMS")
            found[message["handle"] & 0xFFFF] = (
                rate if rate is not None else parms["rate"],
                ceil if ceil is not None else parms["ceil"],
            )
    # one frame of 1,538 wire bytes in 1,514 as HTB counts it, once per packet
    for minor, (rate, ceil) in found.items():
        assert 0 < rate <= ceil, f"{minor:x}: got rate {rate}, ceil {ceil}"
        assert 8 * ceil <= link_rate_bits_per_s, f"{minor:x}: got {8 * ceil} bit/s over the link"
    root_bits_per_s = 8 * found[0x10][1]
    assert root_bits_per_s >= 0.98 * link_rate_bits_per_s, f"got {root_bits_per_s} bit/s"


@pytest.mark.hooks("clsact")
def test_pyroute2_finds_one_filter_of_ours_per_direction(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.attach(profile="police")
    with netns.open_rtnl(one.netns) as rtnl:
        index = link.read_device(rtnl, one.device).index
    with IPRoute(netns=one.netns) as ipr:
        for parent in (0xFFFFFFF2, 0xFFFFFFF3):  # clsact ingress, egress
            ours = [
                message
                for message in ipr.get_filters(index=index, parent=parent)
                if message["handle"] == filters.HANDLE and message["info"] >> 16 == filters.PREF
            ]
            assert len(ours) == 1, f"got {len(ours)} filters at {parent:x}, want one"
    assert MAJOR == 0x5348
