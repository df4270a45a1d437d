# SPDX-License-Identifier: Apache-2.0
"""The queues that the benchmark compares: what people use by hand, and our profiles.

Every shaper gets the same rate and, where it knows the word, the same 24 bytes
of overhead per packet. By hand means `tc` and cls_u32; the commands are here,
so that anyone can repeat them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from shapeagent.kernel.probe import probe_qdiscs
from shapeagent.lab.topology import Port, run_command
from shapeagent.lab.wire import ETHERNET_HEADER_BYTES, WIRE_OVERHEAD_BYTES
from shapeagent.model.errors import InputError, UnsupportedError

# What counts as urgent for cls_u32: (protocol number, field, port). The same that the
# built-in policy puts into `signal` and `stream`, of what the scenarios send.
URGENT = (
    (17, "dport", 123),
    (6, "dport", 2379),
    (6, "sport", 2379),
    (6, "dport", 5600),
    (6, "sport", 5600),
    (6, "sport", 8000),
)
# TBF loses each packet that is larger than its burst: two full frames.
_TBF_BURST_FRAMES = 2
_FLOWS_OF_HTB = ("1:10", "1:20")


class AttachShaper(Protocol):
    """Attaches shapectl to a device while the context lasts; gives bulk's ceiling in bit/s."""

    def __call__(
        self,
        netns: str,
        device: str,
        link_rate_bits_per_s: int,
        *,
        profile: str | None = None,
        ingress: str = "count",
        hook: str | None = None,
    ) -> AbstractContextManager[int]:
        """Return a context whose value is the ceiling of bulk in wire bits per second."""
        ...


@dataclass(frozen=True, slots=True)
class Place:
    """Where a queue is set up, and for which rate."""

    port: Port
    rate_bits_per_s: int
    mtu: int
    attach: AttachShaper

    def tc(self, *words: str) -> str:
        """Return what `tc` printed inside the namespace."""
        return run_command(["tc", "-n", self.port.namespace, *words])

    def ip(self, *words: str) -> str:
        """Return what `ip` printed inside the namespace."""
        return run_command(["ip", "-n", self.port.namespace, *words])

    def batch(self, lines: Sequence[str], device: str | None = None) -> None:
        """Run `tc` once for all lines; `DEV` stands for the device, the port's unless given."""
        name = device or self.port.device
        text = "\n".join(line.replace("DEV", f"dev {name}") for line in lines)
        run_command(["tc", "-n", self.port.namespace, "-batch", "-"], stdin=text + "\n")


@dataclass(frozen=True, slots=True)
class Queue:
    """One set-up of the shaped device."""

    name: str
    about: str
    enter: Callable[[Place], AbstractContextManager[None]]
    kinds: tuple[str, ...] = ()  # qdiscs that the kernel must have
    shapes: bool = True  # holds a rate; else the wire is the bottleneck


def rate_words(rate_bits_per_s: int) -> str:
    """Return the words of a tc rate with our overhead."""
    return f"rate {rate_bits_per_s}bit overhead {WIRE_OVERHEAD_BYTES}"


def u32_lines(parent: str, urgent: str, priority: int = 1) -> list[str]:
    """Return `tc` lines that put the urgent ports into class `urgent` below `parent`."""
    return [
        f"filter add DEV parent {parent} protocol ip prio {priority} u32 "
        f"match ip protocol {protocol} 0xff match ip {field} {port} 0xffff flowid {urgent}"
        for protocol, field, port in URGENT
    ]


def by_hand(
    lines: Callable[[Place], Sequence[str]],
) -> Callable[[Place], AbstractContextManager[None]]:
    """Return an `enter` that runs tc lines; they go away with the namespace."""

    @contextlib.contextmanager
    def enter(place: Place) -> Iterator[None]:
        place.batch(lines(place))
        yield

    return enter


def _htb(place: Place, leaves: tuple[str, str]) -> list[str]:
    rate = place.rate_bits_per_s
    tail = f"ceil {rate}bit overhead {WIRE_OVERHEAD_BYTES}"
    return [
        "qdisc replace DEV root handle 1: htb default 20",
        f"class add DEV parent 1: classid 1:1 htb rate {rate}bit {tail}",
        f"class add DEV parent 1:1 classid 1:10 htb rate {rate // 10}bit {tail} prio 0",
        f"class add DEV parent 1:1 classid 1:20 htb rate {rate - rate // 10}bit {tail} prio 1",
        *(
            f"qdisc add DEV parent {flow} handle {flow[2:]}: {leaf}"
            for flow, leaf in zip(_FLOWS_OF_HTB, leaves, strict=True)
        ),
        *u32_lines("1:", "1:10"),
    ]


def _htb_with(
    leaf: str, bulk_leaf: str | None = None
) -> Callable[[Place], AbstractContextManager[None]]:
    return by_hand(lambda place: _htb(place, (leaf, bulk_leaf or leaf)))


def _tbf_words(place: Place) -> str:
    frame = place.mtu + ETHERNET_HEADER_BYTES + WIRE_OVERHEAD_BYTES
    return f"tbf {rate_words(place.rate_bits_per_s)} burst {_TBF_BURST_FRAMES * frame}"


def _tbf(child: str | None) -> Callable[[Place], AbstractContextManager[None]]:
    def lines(place: Place) -> list[str]:
        root = (
            f"qdisc replace DEV root handle 1: {_tbf_words(place)} "
            f"limit {place.rate_bits_per_s // 8 // 20}"
        )
        return [root] if child is None else [root, f"qdisc add DEV parent 1:1 handle 2: {child}"]

    return by_hand(lines)


def _tbf_prio(place: Place) -> list[str]:
    return [
        f"qdisc replace DEV root handle 1: {_tbf_words(place)} limit 1000000",
        "qdisc add DEV parent 1:1 handle 2: prio bands 2 priomap 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1",
        "qdisc add DEV parent 2:1 handle 10: fq_codel",
        "qdisc add DEV parent 2:2 handle 20: fq_codel",
        *u32_lines("2:", "2:1"),
    ]


def _ours(
    profile: str | None, ingress: str = "count", hook: str | None = None
) -> Callable[[Place], AbstractContextManager[None]]:
    @contextlib.contextmanager
    def enter(place: Place) -> Iterator[None]:
        with place.attach(
            place.port.namespace,
            place.port.device,
            place.rate_bits_per_s,
            profile=profile,
            ingress=ingress,
            hook=hook,
        ):
            yield

    return enter


@contextlib.contextmanager
def _our_tree_with_u32(place: Place) -> Iterator[None]:
    """Our HTB tree, segment limit, bursts, quanta and leaves, but cls_u32 for the classifier."""
    with _ours("htb", hook="clsact")(place):
        place.tc("filter", "del", "dev", place.port.device, "egress")
        place.batch(
            [
                *u32_lines("5348:", "5348:100"),
                (
                    "filter add DEV parent 5348: protocol ip prio 2 u32 "
                    "match ip dport 2049 0xffff flowid 5348:400"
                ),
            ]
        )
        yield


@contextlib.contextmanager
def _nothing(place: Place) -> Iterator[None]:
    yield


def _ifb(
    lines: Callable[[Place], Sequence[str]],
) -> Callable[[Place], AbstractContextManager[None]]:
    """Return an `enter` that shapes what arrives on an IFB, by hand."""

    @contextlib.contextmanager
    def enter(place: Place) -> Iterator[None]:
        place.ip("link", "add", "ifb-hand", "type", "ifb")
        place.ip("link", "set", "ifb-hand", "up")
        place.batch(
            [
                "qdisc add DEV clsact",
                (
                    "filter add DEV ingress protocol ip prio 1 matchall "
                    "action mirred egress redirect dev ifb-hand"
                ),
            ]
        )
        place.batch(lines(place), "ifb-hand")
        yield

    return enter


EGRESS: dict[str, Queue] = {
    queue.name: queue
    for queue in (
        Queue(
            "pfifo_fast", "the kernel's own queue, no shaping",
            by_hand(lambda _: ["qdisc replace DEV root pfifo_fast"]),
            ("pfifo_fast",), shapes=False,
        ),
        Queue("tbf+fifo", "token bucket over one FIFO", _tbf(None), ("tbf",)),
        Queue("tbf+fq_codel", "token bucket over fq_codel", _tbf("fq_codel"), ("tbf", "fq_codel")),
        Queue(
            "cake", "cake besteffort",
            by_hand(
                lambda place: [
                    (f"qdisc replace DEV root cake bandwidth {place.rate_bits_per_s}bit "
                    f"besteffort overhead {WIRE_OVERHEAD_BYTES}")
                ]
            ),
            ("cake",),
        ),
        Queue(
            "htb+u32", "HTB with two classes and fq_codel leaves, tc's defaults",
            _htb_with("fq_codel"), ("htb", "fq_codel"),
        ),
        Queue(
            "htb+u32-ours", "our HTB tree and segment limit, cls_u32 in place of our program",
            _our_tree_with_u32, ("htb",),
        ),
        Queue(
            "htb+netem", "HTB with two classes, netem leaves without delay",
            _htb_with("netem limit 1000"), ("htb", "netem"),
        ),
        Queue(
            "htb+netem-delay", "the same, netem delay 100us 20us",
            _htb_with("netem limit 1000 delay 100us 20us"), ("htb", "netem"),
        ),
        Queue(
            "htb+netem-jitter", "the same, netem delay 300us 150us",
            _htb_with("netem limit 1000 delay 300us 150us"), ("htb", "netem"),
        ),
        Queue(
            "tbf+prio+fq_codel", "token bucket over strict bands by cls_u32, fq_codel leaves",
            by_hand(_tbf_prio), ("tbf", "prio", "fq_codel"),
        ),
        Queue("shapectl-htb", "shapectl attach --profile htb", _ours("htb"), ("htb",)),
        Queue("shapectl-prio", "shapectl attach --profile prio", _ours("prio"), ("prio", "tbf")),
        Queue("shapectl-edt", "shapectl attach --profile edt", _ours("edt"), ("fq",)),
        Queue("shapectl-police", "shapectl attach --profile police", _ours("police")),
    )
}  # fmt: skip

INGRESS: dict[str, Queue] = {
    queue.name: queue
    for queue in (
        Queue("none", "nothing on what arrives", _nothing, shapes=False),
        Queue(
            "ifb+htb+u32", "IFB with HTB, two classes, fq_codel leaves",
            _ifb(lambda place: _htb(place, ("fq_codel", "fq_codel"))), ("htb", "fq_codel"),
        ),
        Queue(
            "ifb+cake", "IFB with cake besteffort",
            _ifb(
                lambda place: [
                    (f"qdisc replace DEV root cake bandwidth {place.rate_bits_per_s}bit "
                    f"besteffort overhead {WIRE_OVERHEAD_BYTES} ingress")
                ]
            ),
            ("cake",),
        ),
        Queue("shapectl-ifb", "shapectl attach --ingress ifb", _ours(None, "ifb"), ("htb",)),
        Queue("shapectl-ingress-police", "shapectl attach --ingress police", _ours(None, "police")),
    )
}  # fmt: skip


def queue_named(name: str, *, ingress: bool) -> Queue:
    """Return the queue of that name. Raises InputError (bench-queue-unknown)."""
    queues = INGRESS if ingress else EGRESS
    if name not in queues:
        raise InputError(
            "bench-queue-unknown",
            f"There is no queue {name!r} for this scenario.",
            hint=f"one of: {', '.join(queues)}, idle",
        )
    return queues[name]


def require_qdiscs(queue: Queue) -> None:
    """Raise UnsupportedError (bench-qdisc-missing) where the kernel lacks what a queue needs."""
    missing = set(queue.kinds) - probe_qdiscs()
    if missing:
        raise UnsupportedError(
            "bench-qdisc-missing",
            f"{queue.name} needs qdisc {', '.join(sorted(missing))}, which this kernel lacks.",
            hint="make bench runs in a virtual machine whose kernel has them all.",
        )
