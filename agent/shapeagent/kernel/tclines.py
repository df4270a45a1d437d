# SPDX-License-Identifier: Apache-2.0
"""A qdisc tree as lines of `tc`, for the day on which only a shell is left.

`detach` does not need them: it writes back what was dumped (snapshot.py).
Kinds that are not here have no line, and the lines of the others are tried on
a scratch device, so that attach can say what `shapectl-panic-off` would not
put back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import struct
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shapeagent.kernel.netns import run_in_new_netns
from shapeagent.kernel.rtnl import TC_H_ROOT, Rtnl, attribute, iterate_attributes, parse_attributes
from shapeagent.kernel.snapshot import DeviceSnapshot, differences, make_scratch, take
from shapeagent.kernel.tcobjects import (
    TCA_CHAIN,
    TCA_STAB,
    TcObject,
    What,
    actions_of,
    codel_us,
    handle_text,
    has_automatic_table,
    is_u32_table,
    program_id_of,
    redirect_targets,
    u32_handle_text,
)

_TICKS_PER_S = 15_625_000  # of 64 ns, see qdisc.py
_NEAR_TICKS = 32
_NETEM_SEED = 14  # since 6.6; a random one where none was asked for
_U32_MAX = 0xFFFFFFFF
_TC_WAIT_S = 30.0

_RATESPEC = struct.Struct("=BBHhHI")  # as in qdisc.py
_SIZESPEC = struct.Struct("=BBhiIIII")  # as in tcobjects.py
_LINKLAYERS = {1: "ethernet", 2: "atm"}
_ACTION_WORDS = {-1: "continue", 0: "pass", 1: "reclassify", 2: "drop", 3: "pipe", 4: "stolen"}
_MIRRED_WORDS = {
    1: ("egress", "redirect"),
    2: ("egress", "mirror"),
    3: ("ingress", "redirect"),
    4: ("ingress", "mirror"),
}
_SKIP_HW, _SKIP_SW = 1, 2
_FQ_DEFAULT_PRIOMAP = bytes((3, 0, 0, 0, 1, 2, 2, 2, 1, 2, 0, 0, *[1] * 8))
_FQ_DEFAULT_WEIGHTS = struct.pack("=3i", 589_824, 196_608, 65_536)


class NoLineError(Exception):
    """This object cannot be said in words of tc."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where the lines will run: what a dump gives by number only."""

    device: str
    netns: str | None
    device_names: Mapping[int, str]  # by index
    program_path: Callable[[int], str]  # of a program's pin


def tool_words(tool: str, netns: str | None) -> str:
    """Return "tc" or "ip", with the words that make it work in a named namespace."""
    return f"{tool} -n {netns}" if netns else tool


def tree_lines(
    wanted: DeviceSnapshot, around: Surroundings
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (lines that make the tree, objects that no line can make)."""
    lines, missing = [], []
    for one in wanted.objects:
        try:
            lines.append(_line(one, around))
        except (NoLineError, struct.error, KeyError):
            missing.append(str(one))
    return tuple(lines), tuple(missing)


def try_lines(wanted: DeviceSnapshot, *, queues: int) -> tuple[str, ...]:
    """Return what the lines of a tree would not put back; empty where they put back all.

    They are run by the `tc` of this host on a scratch device in a private
    namespace. Programs are not pinned by then, so bpf filters are not tried.
    """
    tried = DeviceSnapshot(
        tuple(one for one in wanted.objects if not program_id_of(one)),
        wanted.defaults,
        wanted.hook,
        wanted.gso,
    )

    def here() -> tuple[str, ...]:
        with Rtnl() as rtnl:
            index = make_scratch(rtnl, tried, queues)
            targets = {each for one in tried.objects for each in redirect_targets(one)}
            names = {each: f"target{each}" for each in targets} | {1: "lo"}
            around = Surroundings("scratch", None, names, str)
            lines, missing = tree_lines(tried, around)
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(
                    ["tc", "-force", "-batch", "-"],  # goes on behind a line that fails
                    input="".join(line.removeprefix("tc ") + "\n" for line in lines),
                    text=True,
                    capture_output=True,
                    timeout=_TC_WAIT_S,
                    check=False,
                )
            found = differences(_with_near_bursts(take(rtnl, index, tried.gso), tried), tried)
        return tuple(dict.fromkeys((*(f"{one} has no line of tc" for one in missing), *found)))

    try:
        return run_in_new_netns(here)
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise
        return ("nothing was tried: tc is not installed",)


def _with_near_bursts(found: DeviceSnapshot, wanted: DeviceSnapshot) -> DeviceSnapshot:
    """Return what was found, with the wanted bursts where they are 2 us apart at most.

    tc knows whole microseconds only; other programs than tc set finer bursts.
    netem's random seed is nothing that anybody configured either.
    """
    by_handle = {one.handle: one for one in wanted.objects if one.what is not What.FILTER}
    objects = []
    for one in found.objects:
        like = by_handle.get(one.handle)
        if like and one.kind == like.kind == "netem" and _seedless(one) == _seedless(like):
            one = like
        if one.what is What.CLASS and like and one.kind == like.kind == "htb":
            have, want = _attributes(one).get(1, b""), _attributes(like).get(1, b"")
            same = len(have) == len(want) == 44 and have[:24] + have[32:] == want[:24] + want[32:]
            if same and all(
                abs(mine - theirs) <= _NEAR_TICKS
                for mine, theirs in zip(
                    struct.unpack_from("=2I", have, 24),
                    struct.unpack_from("=2I", want, 24),
                    strict=True,
                )
            ):
                one = like
        objects.append(one)
    return dataclasses.replace(found, objects=tuple(objects))


def _seedless(one: TcObject) -> bytes:
    options = one.options or b""
    parts = iterate_attributes(options[24:])
    return options[:24] + b"".join(attribute(*part) for part in parts if part[0] != _NETEM_SEED)


def _line(one: TcObject, around: Surroundings) -> str:
    words = [tool_words("tc", around.netns), str(one.what), "add", "dev", around.device]
    root = one.parent == TC_H_ROOT
    # the parent of a topmost class is its qdisc, which the dump calls the root
    above = one.handle & 0xFFFF0000 if root and one.what is What.CLASS else one.parent
    words += ["root"] if root and one.what is not What.CLASS else ["parent", handle_text(above)]
    if one.what is What.FILTER:
        return " ".join([*words, *_filter_words(one, around)])
    if one.what is What.CLASS:
        words += ["classid", handle_text(one.handle), one.kind, *_CLASS_WORDS[one.kind](one)]
        return " ".join(words)
    words += ["handle", handle_text(one.handle), *_stab_words(one)]
    return " ".join([*words, one.kind, *_QDISC_WORDS[one.kind](one)])


def _attributes(one: TcObject) -> dict[int, bytes]:
    return parse_attributes(one.options or b"")


def _u32(payload: bytes) -> int:
    return int(struct.unpack_from("=I", payload)[0])


def _only(attributes: Mapping[int, object], *known: int) -> None:
    """Raise where there is an attribute that nobody here can say."""
    if set(attributes) - set(known):
        raise NoLineError


# --- qdiscs


def _stab_words(one: TcObject) -> list[str]:
    base = parse_attributes(parse_attributes(one.extra).get(TCA_STAB, b"")).get(1, b"")
    if len(base) < _SIZESPEC.size:
        return []
    _, _, _, overhead, linklayer, mpu, mtu, slots = _SIZESPEC.unpack_from(base)
    words = ["stab", "overhead", str(overhead)]
    words += ["linklayer", _LINKLAYERS[linklayer]] if linklayer else []
    words += ["mpu", str(mpu), "mtu", str(mtu), "tsize", str(slots)] if slots else []
    return words


def _no_words(one: TcObject) -> list[str]:
    return []


def _limit_words(one: TcObject) -> list[str]:
    return ["limit", str(_u32(one.options or b""))]


def _prio_words(one: TcObject) -> list[str]:
    options = one.options or b""
    bands, *priomap = struct.unpack_from("=i16B", options)
    if len(options) > 20:
        raise NoLineError
    return ["bands", str(bands), "priomap", *map(str, priomap)]


def _rate_words(spec: bytes, name: str, rate64: bytes | None) -> list[str]:
    rate = _RATESPEC.unpack_from(spec)[5] if rate64 is None else struct.unpack("=Q", rate64)[0]
    return [name, f"{8 * rate}bit"]


def _spec_words(spec: bytes) -> list[str]:
    _, linklayer, overhead, _, mpu, _ = _RATESPEC.unpack_from(spec)
    words = ["overhead", str(overhead)] if overhead else []
    words += ["mpu", str(mpu)] if mpu else []
    words += ["linklayer", _LINKLAYERS[linklayer]] if linklayer > 1 else []
    return words


def _rate_of(spec: bytes, rate64: bytes | None) -> int:
    return int(_RATESPEC.unpack_from(spec)[5] if rate64 is None else struct.unpack("=Q", rate64)[0])


def _burst_bytes(ticks: int, rate_bytes_per_s: int) -> int:
    """Return the bytes of which tc makes these ticks: it rounds down to microseconds first.

    Source: tc_calc_xmittime() in iproute2's tc/tc_core.c, 6.1.
    """
    microseconds = -(-ticks * 1_000_000 // _TICKS_PER_S)
    return -(-microseconds * rate_bytes_per_s // 1_000_000)


def _htb_words(one: TcObject) -> list[str]:
    found = _attributes(one)
    _only(found, 2, 5, 9)
    _, to_quantum, default, _, _ = struct.unpack_from("=5I", found[2])
    words = ["default", f"{default:x}", "r2q", str(to_quantum)]
    words += ["direct_qlen", str(_u32(found[5]))] if 5 in found else []
    return words + (["offload"] if 9 in found else [])


def _htb_class_words(one: TcObject) -> list[str]:
    found = _attributes(one)
    _only(found, 1, 6, 7, 9)
    parms = found[1]
    rate, ceil = parms[: _RATESPEC.size], parms[_RATESPEC.size : 2 * _RATESPEC.size]
    buffer, cbuffer, quantum, _, priority = struct.unpack_from("=5I", parms, 2 * _RATESPEC.size)
    burst = _burst_bytes(buffer, _rate_of(rate, found.get(6)))
    cburst = _burst_bytes(cbuffer, _rate_of(ceil, found.get(7)))
    return [
        *_rate_words(rate, "rate", found.get(6)),
        *("burst", str(burst)),
        *_rate_words(ceil, "ceil", found.get(7)),
        *("cburst", str(cburst), "quantum", str(quantum), "prio", str(priority)),
        *_spec_words(rate),
    ]


def _tbf_words(one: TcObject) -> list[str]:
    found = _attributes(one)
    _only(found, 1, 4, 5)
    parms = found[1]
    rate, peak = parms[: _RATESPEC.size], parms[_RATESPEC.size : 2 * _RATESPEC.size]
    limit, buffer, mtu = struct.unpack_from("=3I", parms, 2 * _RATESPEC.size)
    overhead = _RATESPEC.unpack_from(rate)[2]
    # the kernel turns the bytes into time and rounds down; the overhead is counted in
    burst = -(-buffer * _rate_of(rate, found.get(4)) // _TICKS_PER_S) - overhead
    words = [*_rate_words(rate, "rate", found.get(4)), "burst", str(burst), "limit", str(limit)]
    if _rate_of(peak, found.get(5)):
        mtu_bytes = -(-mtu * _rate_of(peak, found.get(5)) // _TICKS_PER_S) - overhead
        words += [*_rate_words(peak, "peakrate", found.get(5)), "mtu", str(mtu_bytes)]
    return words + _spec_words(rate)


def _codel_words(one: TcObject, numbers: Mapping[str, int]) -> list[str]:
    found = _attributes(one)
    _only(found, *numbers.values())
    words = []
    for name, number in numbers.items():
        if number not in found:
            continue
        value = _u32(found[number])
        if name == "ecn":
            words.append("ecn" if value else "noecn")
        elif name in ("target", "interval", "ce_threshold"):
            words += [name, f"{codel_us(value)}us"]
        else:
            words += [name, str(value)]
    return words


def _plain_codel_words(one: TcObject) -> list[str]:
    numbers = {"limit": 2, "target": 1, "interval": 3, "ecn": 4, "ce_threshold": 5}
    return _codel_words(one, numbers)


def _fq_codel_words(one: TcObject) -> list[str]:
    numbers = {"limit": 2, "flows": 5, "quantum": 6, "target": 1, "interval": 3, "ecn": 4}
    return _codel_words(one, {**numbers, "ce_threshold": 7, "drop_batch": 8, "memory_limit": 9})


def _fq_words(one: TcObject) -> list[str]:
    found = _attributes(one)
    if found.pop(16, b"")[:20] not in (b"", _FQ_DEFAULT_PRIOMAP):
        raise NoLineError
    if found.pop(17, b"")[:12] not in (b"", _FQ_DEFAULT_WEIGHTS):
        raise NoLineError
    if any(found.pop(18, b"")):
        raise NoLineError
    values = {number: payload[0] for number, payload in found.items() if number == 15}
    values |= {number: _u32(payload) for number, payload in found.items() if len(payload) >= 4}
    known: dict[int, Callable[[int], list[str]]] = {
        1: lambda value: ["limit", str(value)],
        2: lambda value: ["flow_limit", str(value)],
        3: lambda value: ["quantum", str(value)],
        4: lambda value: ["initial_quantum", str(value)],
        5: lambda value: ["pacing" if value else "nopacing"],
        7: lambda value: [] if value == _U32_MAX else ["maxrate", f"{8 * value}bit"],
        8: lambda value: ["buckets", str(1 << value)],
        9: lambda value: ["refill_delay", f"{value}us"],
        10: lambda value: ["orphan_mask", str(value)],
        11: lambda value: ["low_rate_threshold", f"{8 * value}bit"],
        12: lambda value: [] if value == _U32_MAX else ["ce_threshold", f"{value}us"],
        13: lambda value: ["timer_slack", f"{value}ns"],
        14: lambda value: ["horizon", f"{value}us"],
        15: lambda value: ["horizon_drop" if value else "horizon_cap"],
    }
    _only(values, *known)
    return [word for number, value in sorted(values.items()) for word in known[number](value)]


def _sfq_words(one: TcObject) -> list[str]:
    options = (one.options or b"").ljust(44, b"\0")
    quantum, perturb, limit, divisor, flows, depth, headdrop = struct.unpack_from(
        "=IiIIIII", options
    )
    if any(options[28:]):  # RED inside
        raise NoLineError
    words = ["limit", str(limit), "perturb", str(perturb), "quantum", str(quantum)]
    words += ["divisor", str(divisor), "flows", str(flows), "depth", str(depth)]
    return words + (["headdrop"] if headdrop else [])


def _netem_words(one: TcObject) -> list[str]:
    options = one.options or b""
    latency, limit, loss, gap, duplicate, _ = struct.unpack_from("=6I", options)
    for number, payload in iterate_attributes(options[24:]):
        # correlations, reorder, corruption, rate, loss model, slot: only where they are off
        if number not in (10, 11, 12, 13, _NETEM_SEED) and any(payload):
            raise NoLineError
        if number == 10:
            latency = -(-struct.unpack("=q", payload)[0] // 64)
    if gap:
        raise NoLineError
    words = ["limit", str(limit)]
    words += ["delay", f"{latency * 64 // 1000}us"] if latency else []
    words += ["loss", f"{100 * loss / _U32_MAX:.9f}%"] if loss else []
    return words + (["duplicate", f"{100 * duplicate / _U32_MAX:.9f}%"] if duplicate else [])


_QDISC_WORDS: Mapping[str, Callable[[TcObject], list[str]]] = {
    "mq": _no_words,
    "multiq": _no_words,
    "pfifo_fast": _no_words,
    "drr": _no_words,
    "pfifo": _limit_words,
    "bfifo": _limit_words,
    "pfifo_head_drop": _limit_words,
    "prio": _prio_words,
    "htb": _htb_words,
    "tbf": _tbf_words,
    "codel": _plain_codel_words,
    "fq_codel": _fq_codel_words,
    "fq": _fq_words,
    "sfq": _sfq_words,
    "netem": _netem_words,
    "hfsc": lambda one: ["default", f"{struct.unpack_from('=H', one.options or b'')[0]:x}"],
}


# --- classes


def _hfsc_class_words(one: TcObject) -> list[str]:
    words = []
    for number, name in ((1, "rt"), (2, "ls"), (3, "ul")):
        curve = _attributes(one).get(number)
        if curve is not None:
            first, delay, second = struct.unpack_from("=3I", curve)
            words += [name, "m1", f"{8 * first}bit", "d", f"{delay}us", "m2", f"{8 * second}bit"]
    return words


_CLASS_WORDS: Mapping[str, Callable[[TcObject], list[str]]] = {
    "htb": _htb_class_words,
    "hfsc": _hfsc_class_words,
    "drr": lambda one: ["quantum", str(_u32(_attributes(one)[1]))],
    "qfq": lambda one: [
        *("weight", str(_u32(_attributes(one)[1]))),
        *("maxpkt", str(_u32(_attributes(one)[2]))),
    ],
}


# --- filters


def _filter_words(one: TcObject, around: Surroundings) -> list[str]:
    protocol = struct.unpack(">H", struct.pack("=H", one.info & 0xFFFF))[0]
    words = ["protocol", f"{protocol:#06x}", "pref", str(one.info >> 16)]
    chain = _u32(parse_attributes(one.extra).get(TCA_CHAIN, bytes(4)))
    words += ["chain", str(chain)] if chain else []
    return [*words, *_FILTER_WORDS[one.kind](one, around)]


def _flowid_words(found: Mapping[int, bytes], number: int) -> list[str]:
    return ["flowid", handle_text(_u32(found[number]))] if number in found else []


def _skip_words(found: Mapping[int, bytes], number: int) -> list[str]:
    flags = _u32(found.get(number, bytes(4)))
    if flags & ~(_SKIP_HW | _SKIP_SW):
        raise NoLineError
    words = ["skip_hw"] if flags & _SKIP_HW else []
    return words + (["skip_sw"] if flags & _SKIP_SW else [])


def _action_words(one: TcObject, around: Surroundings) -> list[str]:
    words = []
    for kind, options in actions_of(one):
        parms = parse_attributes(options).get(2, b"")
        index, _, control, _, _ = struct.unpack_from("=IIiII", parms)
        if kind == "mirred":
            how, target = struct.unpack_from("=iI", parms, 20)
            words += ["action", "mirred", *_MIRRED_WORDS[how], "dev", around.device_names[target]]
            # redirect steals the packet and mirror passes it on, unless something else was said
            usual = "stolen" if how in (1, 3) else "pipe"
            words += [_ACTION_WORDS[control]] if _ACTION_WORDS[control] != usual else []
        elif kind == "gact" and set(parse_attributes(options)) == {2}:
            words += ["action", _ACTION_WORDS[control]]
        else:
            raise NoLineError
        words += ["index", str(index)] if index else []
    return words


def _u32_words(one: TcObject, around: Surroundings) -> list[str]:
    found = _attributes(one)
    if is_u32_table(one):
        return ["handle", u32_handle_text(one.handle), "u32", "divisor", str(_u32(found[4]))]
    _only(found, 1, 2, 3, 5, 7, 10, 11)
    node = one.handle & 0xFFF
    if has_automatic_table(one):
        words = ["handle", f"::{node:x}", "u32"]
    else:
        table, bucket = one.handle >> 20, one.handle >> 12 & 0xFF
        words = ["handle", u32_handle_text(one.handle), "u32", "ht", f"{table:x}:{bucket:x}:"]
    selector = found[5]
    words += _selector_words(selector)
    if 10 in found:
        value, mask = struct.unpack_from("=2I", found[10])
        words += ["match", "mark", f"{value:#x}", f"{mask:#x}"]
    words += ["link", u32_handle_text(_u32(found[3]))] if 3 in found else []
    return [
        *words,
        *_skip_words(found, 11),
        *_flowid_words(found, 1),
        *_action_words(one, around),
    ]


def _selector_words(selector: bytes) -> Iterator[str]:
    """Yield struct tc_u32_sel: where the next header is, how to hash, and what to compare."""
    flags, shift, count, _ = struct.unpack_from("=4B", selector)
    (offset_mask,) = struct.unpack_from(">H", selector, 4)
    plus, at, hash_at = struct.unpack_from("=Hhh", selector, 6)
    (hash_mask,) = struct.unpack_from(">I", selector, 12)
    for number in range(count):
        mask, value = struct.unpack_from(">2I", selector, 16 + 16 * number)
        where, relative = struct.unpack_from("=2i", selector, 24 + 16 * number)
        place = f"nexthdr+{where}" if relative else str(where)
        yield from ("match", "u32", f"{value:#010x}", f"{mask:#010x}", "at", place)
    if hash_mask:
        yield from ("hashkey", "mask", f"{hash_mask:#010x}", "at", str(hash_at))
    if flags & 0b1110:
        yield "offset"
        if flags & 0b0010:
            yield from ("plus", str(plus))
        if flags & 0b0100:
            yield from ("at", str(at), "mask", f"{offset_mask:#06x}", "shift", str(shift))
        if flags & 0b1000:
            yield "eat"


def _fw_words(one: TcObject, around: Surroundings) -> list[str]:
    found = _attributes(one)
    _only(found, 1, 4, 5)
    mask = _u32(found.get(5, struct.pack("=I", _U32_MAX)))
    handle = f"{one.handle:#x}" + (f"/{mask:#x}" if mask != _U32_MAX else "")
    return ["handle", handle, "fw", *_flowid_words(found, 1), *_action_words(one, around)]


def _matchall_words(one: TcObject, around: Surroundings) -> list[str]:
    found = _attributes(one)
    _only(found, 1, 2, 3)
    words = ["handle", f"{one.handle:#x}", "matchall", *_skip_words(found, 3)]
    return [*words, *_flowid_words(found, 1), *_action_words(one, around)]


def _bpf_words(one: TcObject, around: Surroundings) -> list[str]:
    found = _attributes(one)
    _only(found, 1, 3, 7, 8, 9, 11)
    path = around.program_path(program_id_of(one))
    words = ["handle", f"{one.handle:#x}", "bpf", "object-pinned", path]
    words += ["direct-action"] if _u32(found.get(8, bytes(4))) & 1 else []
    words += [*_skip_words(found, 9), *_flowid_words(found, 3)]
    return [*words, *_action_words(one, around)]


_FILTER_WORDS: Mapping[str, Callable[[TcObject, Surroundings], Sequence[str]]] = {
    "u32": _u32_words,
    "fw": _fw_words,
    "matchall": _matchall_words,
    "bpf": _bpf_words,
}
