# SPDX-License-Identifier: Apache-2.0
"""Qdisc trees of other people's, and what `tc` says of them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from typing import Any

from netlab import tc

# Each line is one `tc` command; DEV stands for the device.
HTB = """
qdisc add dev DEV root handle 5: htb default 20
class add dev DEV parent 5: classid 5:1 htb rate 80mbit burst 20k quantum 3000
class add dev DEV parent 5:1 classid 5:10 htb rate 30mbit ceil 80mbit prio 1 quantum 3000
class add dev DEV parent 5:1 classid 5:20 htb rate 33333kbit burst 15k ceil 77777kbit cburst 1600 \
quantum 3000 overhead 24
class add dev DEV parent 5:20 classid 5:21 htb rate 1mbit quantum 1600
qdisc add dev DEV parent 5:10 handle 50: pfifo limit 77
qdisc add dev DEV parent 5:21 bfifo limit 12345
filter add dev DEV parent 5: protocol ip prio 3 u32 match ip dport 2379 0xffff flowid 5:10
filter add dev DEV parent 5: protocol ipv6 prio 4 u32 match ip6 dport 2379 0xffff flowid 5:10
filter add dev DEV parent 5: protocol ip prio 5 handle 2: u32 divisor 16
filter add dev DEV parent 5: protocol ip prio 5 u32 ht 2:3: match ip src 192.0.2.9 flowid 5:20
filter add dev DEV parent 5: protocol ip prio 5 u32 link 2: hashkey mask 0xf at 12 \
match ip tos 0 0
filter add dev DEV parent 5:1 protocol ip prio 7 u32 match ip dport 8000 0xffff flowid 5:21
"""
NESTED_HTB = """
qdisc add dev DEV root handle 1: stab overhead 18 htb default 1 r2q 5
class add dev DEV parent 1: classid 1:1 htb rate 400mbit quantum 3000
qdisc add dev DEV parent 1:1 handle 20: htb default 2
class add dev DEV parent 20: classid 20:1 htb rate 5gbit ceil 40gbit quantum 60000
class add dev DEV parent 20:1 classid 20:2 htb rate 1gbit ceil 40gbit quantum 60000
qdisc add dev DEV parent 20:2 handle 30: tbf rate 7777777bit burst 5555 limit 66666
qdisc add dev DEV parent 30:1 handle 31: pfifo limit 9
"""
TBF = """
qdisc add dev DEV root handle 8001: tbf rate 11111kbit burst 7777 limit 54321
"""
TBF_WITH_PEAK = """
qdisc add dev DEV root handle 3: stab linklayer atm mpu 64 overhead 8 tbf rate 80mbit \
burst 20000 latency 20ms peakrate 95mbit mtu 2000 overhead 14
qdisc add dev DEV parent 3:1 handle 4: pfifo limit 3
"""
MQ = """
qdisc add dev DEV root handle 9: mq
qdisc add dev DEV parent 9:1 handle 91: pfifo limit 55
qdisc add dev DEV parent 9:2 handle 92: htb default 1
class add dev DEV parent 92: classid 92:1 htb rate 100mbit quantum 3000
filter add dev DEV parent 92: protocol all prio 1 u32 match u32 0 0 flowid 92:1
qdisc add dev DEV parent 9:4 handle 94: tbf rate 1gbit burst 100k limit 1m
"""
BARE_MQ = """
qdisc add dev DEV root handle 9: mq
"""
MIRROR = """
qdisc add dev DEV root handle 6: htb default 1
class add dev DEV parent 6: classid 6:1 htb rate 100mbit quantum 3000
filter add dev DEV parent 6: protocol ip prio 2 u32 match ip dport 9999 0xffff flowid 6:1 \
action mirred egress mirror dev lo
filter add dev DEV parent 6: protocol ip prio 2 u32 match ip dport 9998 0xffff \
action mirred egress redirect dev lo
"""
ONE_QUEUE: Mapping[str, str] = {
    "htb": HTB,
    "nested htb": NESTED_HTB,
    "tbf": TBF,
    "tbf with peak": TBF_WITH_PEAK,
    "mirror": MIRROR,
}
MANY_QUEUES: Mapping[str, str] = {"mq": MQ, "bare mq": BARE_MQ}


def build(text: str, netns: str, device: str) -> None:
    """Run the commands of a tree."""
    for line in text.strip().splitlines():
        tc(*(word.replace("DEV", device) for word in shlex.split(line)), netns=netns)


def tc_says(netns: str, device: str) -> dict[str, Any]:
    """Return what `tc -j` shows of a device: qdiscs, classes, and the filters of each.

    Without the counters: `tc` prints them only with -s, but for HTB's direct
    packets. What a tc cannot say in JSON stays text.
    """
    qdiscs = _shown("qdisc", netns, device)
    found = {"qdisc": qdiscs, "class": _shown("class", netns, device)}
    classes = re.findall(r"class \S+ (\S+)", str(found["class"]))
    if isinstance(qdiscs, str):
        handles = set(re.findall(r"qdisc \S+ (\S+)", qdiscs))
    else:
        handles = {str(one["handle"]) for one in qdiscs}
    for place in sorted(handles | {*classes}):
        if place not in ("0:", "ffff:"):
            found[f"filter {place}"] = _shown("filter", netns, device, "parent", place)
    return found


def _shown(what: str, netns: str, device: str, *more: str) -> Any:
    text = tc("-d", "-j", what, "show", "dev", device, *more, netns=netns)
    text = re.sub(r'"direct_packets_stat":\d+,?', "", text)
    try:
        rows = json.loads(text or "[]")
    except ValueError:
        return "\n".join(sorted(text.splitlines()))
    if what == "class":  # of these the classes are the flows that happen to be there
        rows = [row for row in rows if row["class"] not in ("cake", "fq_codel", "sfq")]
    return sorted(rows, key=str) if what == "qdisc" else rows
