# SPDX-License-Identifier: Apache-2.0
"""Dumped objects: what is a counter, what the kernel takes back, in which order."""

from __future__ import annotations

import struct

import pytest

from shapeagent.kernel import snapshot
from shapeagent.kernel.rtnl import (
    TCA_OPTIONS,
    TcMessage,
    attribute,
    attribute_text,
    attribute_u32,
    nested,
    parse_attributes,
    parse_tc,
)
from shapeagent.kernel.snapshot import DeviceSnapshot
from shapeagent.kernel.tclines import NoLineError, Surroundings, tree_lines
from shapeagent.kernel.tcobjects import (
    TcObject,
    What,
    build_request,
    codel_us,
    parse_object,
    redirect_targets,
    unknowable,
)
from shapeagent.model.types import GsoLimits

_GSO = GsoLimits(65536, 65535, 65536)
_ROOT = 0xFFFFFFFF


def message(kind: str, options: bytes, **more: int) -> TcMessage:
    fields = {"index": 3, "handle": 0x10000, "parent": _ROOT, "info": 0, **more}
    return TcMessage(**fields, attributes={1: kind.encode() + b"\0", TCA_OPTIONS: options})


def made(one: TcObject) -> bytes:
    """Return the options of the request that makes an object again."""
    _, body = build_request(one, 3, lambda number: number)
    return parse_tc(body).options


def qdisc(
    kind: str, options: bytes | None = b"", handle: int = 0x10000, parent: int = _ROOT
) -> TcObject:
    return TcObject(What.QDISC, parent, handle, 0, kind, options)


def taken(*objects: TcObject) -> DeviceSnapshot:
    return DeviceSnapshot(objects, (), "", _GSO)


@pytest.mark.parametrize("asked_us", [5, 250, 1000, 4999, 5000, 5001, 99_999, 100_000, 1_000_000])
def test_codel_times_are_kept_over_any_number_of_restores(asked_us: int) -> None:
    """It keeps units of 1.024 us and rounds down both ways."""

    def shown(us: int) -> int:
        return ((us * 1000 >> 10) << 10) // 1000

    first = shown(asked_us)
    assert shown(codel_us(first)) == first, f"got {shown(codel_us(first))}, want {first}"


def test_fq_codel_is_asked_for_its_own_times() -> None:
    dumped = b"".join(attribute_u32(number, 4999) for number in (1, 2, 3))
    asked = parse_attributes(made(parse_object(message("fq_codel", dumped), What.QDISC)))
    assert asked[1] == struct.pack("=I", 5000), f"got target {asked[1]!r}"
    assert asked[2] == struct.pack("=I", 4999), f"got limit {asked[2]!r}, which is no time"


def test_htb_counters_are_no_configuration_and_its_version_is_asked_for_by_half() -> None:
    def root(direct: int) -> TcObject:
        init = struct.pack("=5I", 0x30011, 10, 0x20, 0, direct)
        return parse_object(message("htb", attribute(2, init)), What.QDISC)

    assert root(7) == root(0), "got a difference by packets that went by"
    version = struct.unpack_from("=I", parse_attributes(made(root(7)))[2])[0]
    assert version == 3, f"got version {version}, want 3"


def test_sfq_counters_are_no_configuration() -> None:
    def root(dropped: int) -> TcObject:
        return parse_object(
            message("sfq", bytes(48) + struct.pack("=6I", dropped, 0, 0, 0, 0, 0)), What.QDISC
        )

    assert root(9) == root(0)


@pytest.mark.parametrize(
    ("one", "word"),
    [
        (qdisc("netem", struct.pack("=6I", 100, 1000, 0, 0, 0, 5)), "jitter"),
        (qdisc("netem", struct.pack("=6I", 100, 1000, 0, 0, 0, 0)), ""),
        (TcObject(What.QDISC, _ROOT, 1 << 16, 0, "pfifo", b"", b"", True), "estimator"),
    ],
)
def test_what_no_dump_tells_is_named(one: TcObject, word: str) -> None:
    got = unknowable(one)
    assert word in got if word else not got, f"got {got!r}, want {word!r}"


def _mirred(index: int, references: int, target: int = 7) -> bytes:
    parms = struct.pack("=7I", index, 0, 4, references, 1, 1, target)
    options = nested(2, attribute(1, b"times"), attribute(2, parms))
    return nested(1, attribute_text(1, "mirred"), options, attribute(4, b"counters"))


def test_an_action_keeps_its_index_only_where_others_know_it() -> None:
    def with_action(action: bytes) -> TcObject:
        options = nested(7, action) + attribute_u32(11, 0x8)
        return parse_object(message("u32", options, handle=0x80000800), What.FILTER)

    assert with_action(_mirred(4, 1)) == with_action(_mirred(9, 1)), "got the automatic index kept"
    assert with_action(_mirred(4, 2)) != with_action(_mirred(9, 2)), "got the shared index lost"
    assert redirect_targets(with_action(_mirred(4, 1))) == [7]
    assert unknowable(with_action(_mirred(4, 1))) == ""
    police = nested(1, attribute_text(1, "police"), nested(2, attribute(1, bytes(60))))
    assert "police" in unknowable(with_action(police)), "got a police action that is not refused"


def u32(handle: int, pref: int, link: int = 0) -> TcObject:
    options = attribute_u32(2, handle & 0xFFFFF000)
    options += attribute_u32(3, link) if link else b""
    return TcObject(What.FILTER, 0x10000, handle, pref << 16 | 8, "u32", options)


def test_u32_keys_go_into_the_table_that_their_preference_gets() -> None:
    _, body = build_request(u32(0x80300800, 1), 3, int)
    asked = parse_tc(body)
    assert asked.handle == 0x800, f"got handle {asked.handle:#x}, want the node alone"
    assert parse_attributes(asked.options)[2] == struct.pack("=I", 0xFFF00000)
    _, body = build_request(u32(0x00203800, 1), 3, int)
    asked = parse_tc(body)
    assert asked.handle == 0x00203800, f"got {asked.handle:#x}, want their own table's handle"


def test_trees_with_other_numbers_of_automatic_tables_are_equal() -> None:
    one, two = taken(u32(0x80000800, 1)), taken(u32(0x80500800, 1))
    assert snapshot.differences(one, two) == ()
    assert snapshot.differences(taken(u32(0x80000801, 1)), one)


def test_differences_name_each_object_and_are_bounded() -> None:
    found = snapshot.differences(taken(qdisc("htb")), taken(qdisc("tbf", handle=0x50000)))
    assert found == (
        "qdisc tbf 5: is not there, or not as it was",
        "qdisc htb 1: was not there, or not so",
    ), f"got {found}"
    many = taken(*(qdisc("pfifo", handle=number << 16) for number in range(1, 40)))
    assert len(snapshot.differences(taken(), many)) == 9


def test_a_part_of_a_tree_is_told_from_another_tree() -> None:
    whole = taken(qdisc("htb"), qdisc("pfifo", handle=0x20000, parent=0x10001))
    assert snapshot.is_part_of(taken(qdisc("htb")), whole)
    assert not snapshot.is_part_of(taken(qdisc("tbf")), whole)
    assert not snapshot.is_part_of(taken(), whole)


def test_a_tree_is_made_from_the_top() -> None:
    """Also where a nested qdisc or a child class has the lower handle."""
    inner = qdisc("htb", handle=0x20000, parent=0x90005)
    objects = [
        qdisc("htb", handle=0x90000),
        *(TcObject(What.CLASS, parent, handle, 0, "htb", b"")
          for handle, parent in ((0x90007, _ROOT), (0x90006, 0x90007), (0x90005, 0x90006))),
        inner,
        TcObject(What.CLASS, _ROOT, 0x20001, 0, "htb", b""),
        qdisc("pfifo", handle=0x10000, parent=0x20001),
    ]  # fmt: skip
    qdiscs = [one for one in objects if one.what is What.QDISC]
    classes = [one for one in objects if one.what is What.CLASS]
    got = snapshot.tree_order(qdiscs[::-1], classes[::-1])
    assert got == objects, f"got {list(map(str, got))}"
    stray = qdisc("pfifo", handle=0x30000, parent=0x70001)
    assert snapshot.tree_order([*qdiscs, stray], classes) == [*objects, stray]


def test_a_snapshot_survives_being_written() -> None:
    one = DeviceSnapshot(
        (qdisc("htb", b"\1\2"), u32(0x80000800, 1), TcObject(What.QDISC, 1, 2, 3, "mq", None)),
        ((_ROOT, "noqueue"),),
        "clsact",
        _GSO,
    )
    assert DeviceSnapshot.from_json(one.to_json()) == one
    for text in ("", "[]", "{}", '{"schema": 99}', '{"schema": 1}', one.to_json()[:-5]):
        with pytest.raises(ValueError, match=r".*"):
            DeviceSnapshot.from_json(text)


# --- lines of tc


def lines(*objects: TcObject) -> tuple[str, ...]:
    around = Surroundings("d0", None, {7: "e7"}, lambda number: f"/pins/{number}")
    made_lines, missing = tree_lines(taken(*objects), around)
    assert not missing, f"got no line for {missing}"
    return tuple(line.removeprefix("tc ") for line in made_lines)


def _codel(**values: int) -> bytes:
    numbers = {"target": 1, "limit": 2, "interval": 3, "ecn": 4, "flows": 5, "quantum": 6}
    return b"".join(attribute_u32(numbers[name], value) for name, value in values.items())


@pytest.mark.parametrize(
    ("one", "want"),
    [
        (
            qdisc("fq_codel", _codel(target=4999, limit=10240, interval=99_999, ecn=1, flows=1024)),
            "fq_codel limit 10240 flows 1024 target 5000us interval 100000us ecn",
        ),
        (
            qdisc("prio", struct.pack("=i16B", 3, *range(16))),
            "prio bands 3 priomap " + " ".join(map(str, range(16))),
        ),
        (qdisc("pfifo", struct.pack("=I", 5)), "pfifo limit 5"),
        (qdisc("mq", None), "mq"),
        (
            qdisc("netem", struct.pack("=6I", 15_625, 1000, 0xFFFFFFFF // 2, 0, 0, 0)),
            "netem limit 1000 delay 1000us loss 49.999999988%",
        ),
        (
            qdisc("sfq", struct.pack("=IiIIIII", 1514, 10, 127, 1024, 128, 127, 0)),
            "sfq limit 127 perturb 10 quantum 1514 divisor 1024 flows 128 depth 127",
        ),
        (qdisc("hfsc", struct.pack("=H", 0x20)), "hfsc default 20"),
    ],
)
def test_qdiscs_in_words_of_tc(one: TcObject, want: str) -> None:
    got = lines(one)
    assert got == (f"qdisc add dev d0 root handle 1: {want}",), f"got {got}"


def test_netems_random_seed_needs_no_words() -> None:
    options = struct.pack("=6I", 0, 1000, 0, 0, 0, 0) + attribute(14, bytes(range(1, 9)))
    assert lines(qdisc("netem", options)) == ("qdisc add dev d0 root handle 1: netem limit 1000",)


def test_classes_and_filters_in_words_of_tc() -> None:
    curve = attribute(1, struct.pack("=3I", 1000, 5, 2000))
    got = lines(
        TcObject(What.CLASS, 0x10000, 0x10010, 0, "hfsc", curve),
        TcObject(What.CLASS, _ROOT, 0x10010, 0, "drr", attribute_u32(1, 1500)),
        TcObject(
            What.FILTER, 0x10000, 5, 9 << 16 | 8, "fw",
            attribute_u32(1, 0x10010) + attribute_u32(5, 0xFF),
        ),
        TcObject(
            What.FILTER, 0x10000, 1, 9 << 16 | 0x300, "matchall",
            attribute_u32(1, 0x10010) + nested(2, _mirred(0, 0)),
        ),
        TcObject(
            What.FILTER, 0x10000, 1, 8 << 16 | 0x300, "bpf",
            attribute_u32(11, 44) + attribute_u32(8, 1),
        ),
    )  # fmt: skip
    place = "filter add dev d0 parent 1: protocol 0x0003"
    assert got == (
        "class add dev d0 parent 1: classid 1:10 hfsc rt m1 8000bit d 5us m2 16000bit",
        "class add dev d0 parent 1: classid 1:10 drr quantum 1500",
        "filter add dev d0 parent 1: protocol 0x0800 pref 9 handle 0x5/0xff fw flowid 1:10",
        f"{place} pref 9 handle 0x1 matchall flowid 1:10 action mirred egress redirect dev e7",
        f"{place} pref 8 handle 0x1 bpf object-pinned /pins/44 direct-action",
    ), f"got {got}"


def test_what_has_no_words_is_named() -> None:
    around = Surroundings("d0", None, {}, str)
    _, missing = tree_lines(taken(qdisc("cake"), qdisc("htb", attribute(99, b""))), around)
    assert missing == ("qdisc cake 1:", "qdisc htb 1:"), f"got {missing}"
    assert issubclass(NoLineError, Exception)
