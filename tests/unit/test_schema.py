# SPDX-License-Identifier: Apache-2.0
"""The policy file: taken whole or refused whole, every error with its line (F25)."""

from __future__ import annotations

import re
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapeagent.model.errors import InputError
from shapeagent.model.places import find_places, place_of
from shapeagent.model.schema import PROTECTED, check_policy, load_policy
from shapeagent.model.types import Direction, Policy, PortSide, RuleKind
from shapeagent.policy.builtin import default_policy_text

LINK = 10_000_000_000
HEAD = """version = 1
default_class = "normal"
control_class = "signal"
"""
CLASSES = """
[classes.signal]
priority = 0
guarantee = "10%"
[classes.normal]
priority = 2
guarantee = "20%"
[classes.bulk]
priority = 3
guarantee = "10%"
"""


def load(text: str, link: int | None = LINK) -> Policy:
    return load_policy(text, "p.toml", link_rate_bits_per_s=link)


def errors_of(text: str, *, link: int | None = LINK) -> tuple[str, ...]:
    with pytest.raises(InputError) as caught:
        load(text, link)
    assert caught.value.reference == "policy-invalid", caught.value.reference
    assert caught.value.exit_code == 2
    return caught.value.details


def rules(*tables: str) -> str:
    return HEAD + CLASSES + "".join(f"[[rules]]\n{table}\n" for table in tables)


def line_of(text: str, needle: str) -> int:
    return text[: text.index(needle)].count("\n") + 1


def test_rates_are_resolved_against_the_link() -> None:
    policy = load(HEAD + CLASSES.replace('"10%"\n', '"10%"\nceiling = "1.5gbit"\n', 1))
    signal = policy.class_named("signal")
    assert (signal.number, signal.guarantee_bits_per_s) == (0, 1_000_000_000)
    assert signal.ceiling_bits_per_s == signal.safe_ceiling_bits_per_s == 1_500_000_000
    assert policy.class_named("bulk").ceiling_bits_per_s == LINK
    assert [c.name for c in policy.classes] == ["signal", "normal", "bulk"]
    assert (policy.segment_limit_bytes, policy.egress_mark_mask, policy.shadow) == (None, 0, False)


def test_every_error_is_listed_with_its_line() -> None:
    text = (
        HEAD.replace("1", "2", 1)
        + 'foo = 1\nsegment_limit = "64k"\n'
        + '[marks]\negress_mask = "0xffff:0xffff"\n'
        + CLASSES.replace('"20%"', "nan", 1).replace("priority = 3", "priority = 8")
        + 'ceiling = "5%"\nsafe_ceiling = "1Gbps"\n'
        + "[classes.extra]\npriority = 1\n"
        + '[[rules]]\nname = "a"\nclass = "gone"\nprotocol = "tcp"\nport = 70000\n'
    )
    details = errors_of(text)
    wanted = {
        "version:": "version = 2",
        "foo:": "foo",
        "segment_limit:": "segment_limit",
        "marks.egress_mask:": "egress_mask",
        "classes.normal.guarantee:": "guarantee = nan",
        "classes.bulk.priority:": "priority = 8",
        "classes.bulk.ceiling:": 'ceiling = "5%"',
        "classes.bulk.safe_ceiling:": "safe_ceiling",
        "classes.extra.guarantee:": "[classes.extra]",
        "rules[1].port:": "port = 70000",
    }
    for path, needle in wanted.items():
        found = [detail for detail in details if path in detail]
        assert found, f"{path} is not among {details}"
        want = f"line {line_of(text, needle)}: "
        assert found[0].startswith(want), f"got {found[0]!r}, want it to start with {want!r}"
    numbers = [int(re.match(r"line (\d+)", detail)[1]) for detail in details]  # type: ignore[index]
    assert numbers == sorted(numbers), f"got lines {numbers}, want them in order"


@pytest.mark.parametrize(
    ("old", "new", "want"),
    [
        ('guarantee = "20%"', 'guarantee = "20%"\nceiling = "10%"', "below the guarantee"),
        ('guarantee = "20%"', 'guarantee = "20%"\nsafe_ceiling = "1gbit"', "below the guarantee"),
        ('guarantee = "20%"', 'guarantee = "95%"', "add up to"),
        ('guarantee = "20%"', 'guarantee = "11gbit"', "above the link rate"),
        ('guarantee = "20%"', 'guarantee = "20%"\nsafe_ceiling = "40gbit"', "above the link rate"),
        ('guarantee = "20%"', 'guarantee = "20%"\ningress_ceiling = "0"', "never means unlimited"),
        ('guarantee = "20%"', 'guarantee = "0%"', "never means unlimited"),
        ('guarantee = "20%"', 'guarantee = "-5mbit"', "not a rate"),
        ('guarantee = "20%"', "guarantee = 1000000", "no unit"),
        ('guarantee = "20%"', "guarantee = inf", "no unit"),
        ('guarantee = "20%"', 'guarantee = "0.0001%"', "below the lowest rate"),
        ('guarantee = "20%"', 'guarantee = "20%"\nmark = 3', "both masks"),
        ('guarantee = "20%"', 'guarantee = "20%"\ndscp = 64', "not a DSCP"),
        ('guarantee = "20%"', 'guarantee = "20%"\nceil = "1gbit"', 'did you mean "ceiling"'),
        ("priority = 2", "priority = true", "not a priority"),
        ("priority = 2", 'priority = "2"', "not a number"),
        ("priority = 2", "", "is missing"),
        ("[classes.normal]", "[classes.Normal]", "not a class name"),
        ('default_class = "normal"', 'default_class = "none"', "not a class of this policy"),
        ('default_class = "normal"', 'default_class = "signal"', "also the control class"),
        ('control_class = "signal"', "", "is missing"),
        ("version = 1", "version = 1.5", "not a policy version"),
        ("version = 1", 'version = 1\nsegment_limit = "100"', "between"),
        ("version = 1", 'version = 1\nshadow = "no"', "not true or false"),
        ("version = 1", "version = 1\nclasses2 = 3", "not a known key"),
        ("version = 1", "version = 1\nversion = 1", "not TOML"),
    ],
)
def test_wrong_value_is_refused(old: str, new: str, want: str) -> None:
    details = errors_of((HEAD + CLASSES).replace(old, new, 1))
    assert any(want in detail for detail in details), f"{want!r} is not in {details}"


@pytest.mark.parametrize("text", ["", "[", "version = 1", "classes = 3", "rules = 1", "\x00"])
def test_text_that_is_no_policy_is_refused(text: str) -> None:
    assert errors_of(text)


def test_percentages_are_checked_without_a_link() -> None:
    text = (HEAD + CLASSES).replace('"20%"', '"20%"\nceiling = "10%"').replace('"10%"', '"90%"', 1)
    with pytest.raises(InputError) as caught:
        check_policy(text, "p.toml")
    found = " ".join(caught.value.details)
    assert "add up to 120% of the link" in found, found
    assert "10% is below the guarantee 20%" in found, found
    summary = check_policy(HEAD + CLASSES, "p.toml")
    assert summary.classes == ("signal", "normal", "bulk")
    with pytest.raises(InputError) as caught:
        load(HEAD + CLASSES, None)
    assert caught.value.reference == "link-rate-unknown"


def test_class_mark_must_be_inside_the_masks() -> None:
    text = HEAD + '[marks]\negress_mask = "0xf0"\n' + CLASSES
    policy = load(text + "mark = 0x30\n")
    assert (policy.class_named("bulk").mark, policy.egress_mark_mask) == (0x30, 0xF0)
    assert "outside marks.egress_mask" in errors_of(text + "mark = 0x31\n")[0]


BUDGET = '[classes.signal.budget]\nrate = "5%"\n'


@pytest.mark.parametrize(
    ("budget", "want"),
    [
        ('overflow = "signal"', "into itself"),
        ('overflow = "gone"', "not a class"),
        ('overflow = "normal"\nhold = "500ms"', "between 1s and 1h"),
        ('overflow = "normal"\nburst = "1500b"', "would never conform"),
        ("", "is missing"),
    ],
)
def test_wrong_budget_is_refused(budget: str, want: str) -> None:
    details = errors_of(HEAD + CLASSES + BUDGET + budget)
    assert any(want in detail for detail in details), f"{want!r} is not in {details}"


def test_budget_is_read() -> None:
    policy = load(HEAD + CLASSES + BUDGET + 'overflow = "normal"\nhold = "2s"\nburst = "1MiB"\n')
    budget = policy.class_named("signal").budget
    assert budget is not None
    got = (budget.rate_bits_per_s, budget.burst_bytes, budget.hold_s, budget.overflow_class)
    assert got == (500_000_000, 1 << 20, 2.0, "normal"), f"got {got}"


def test_at_most_sixteen_classes() -> None:
    more = "".join(f'[classes.c{n}]\npriority = 4\nguarantee = "1%"\n' for n in range(13))
    assert len(load(HEAD + CLASSES + more).classes) == 16
    more += '[classes.c99]\npriority = 4\nguarantee = "1%"\n'
    assert "at most 16" in errors_of(HEAD + CLASSES + more)[0]


def test_each_kind_of_rule_is_read() -> None:
    policy = load(
        rules(
            'name = "a"\nclass = "signal"\nprotocol = ["udp", "tcp"]\nport = [2381, "2379-2380", '
            "9]",
            'name = "b"\nclass = "bulk"\nprotocol = "tcp"\nremote_port = "100-170"\n'
            'direction = "egress"',
            'name = "c"\nclass = "bulk"\nprotocol = ["sctp", 50]',
            'name = "d"\nclass = "signal"\ndscp = ["ef", 46, "CS6"]',
            'name = "e"\nclass = "bulk"\nmark = "0x10/0xff"',
            'name = "f"\nclass = "bulk"\ncgroup = "/sys/fs/cgroup//system.slice/vllm.service/"',
        )
    )
    assert [rule.number for rule in policy.rules] == list(range(1, len(policy.rules) + 1))
    assert [r.name for r in policy.rules[: len(PROTECTED)]] == [name for name, _, _ in PROTECTED]
    assert all(rule.protected for rule in policy.rules[: len(PROTECTED)])
    a, b, c, d, e, f = policy.rules[len(PROTECTED) :]
    assert (a.kind, a.protocols, a.ports) == (RuleKind.PORT, (6, 17), ((9, 9), (2379, 2381)))
    assert (b.side, b.direction) == (PortSide.REMOTE, Direction.EGRESS)
    assert (c.kind, c.protocols) == (RuleKind.PROTOCOL, (132, 50))
    assert d.dscp == (46, 48)
    assert (e.mark_value, e.mark_mask) == (0x10, 0xFF)
    assert (f.cgroup, f.direction) == ("system.slice/vllm.service", Direction.EGRESS)


@pytest.mark.parametrize(
    ("rule", "want"),
    [
        ("", "selects nothing"),
        ("port = 80", "needs protocol"),
        ('protocol = "tcp"\nport = 80\nlocal_port = 90', "exactly one of"),
        ('protocol = "tcp"\ndscp = "ef"', "exactly one of"),
        ('dscp = "ef"\nmark = 1', "exactly one of"),
        ('protocol = "sctp"\nport = 80', "tcp and udp only"),
        ('protocol = "tcp"\nport = 0', "not within"),
        ('protocol = "tcp"\nport = "0xffff:0xffff"', "not a port"),
        ('protocol = "tcp"\nport = "90-80"', "backwards"),
        ('protocol = "tcp"\nport = 65536', "not within"),
        ('protocol = "tcp"\nport = []', "empty list"),
        ('protocol = "tcp"\nport = true', "not a port"),
        ('protocol = "tpc"', "not a protocol name"),
        ("protocol = 44", "extension header"),
        ('protocol = "ospf"', "always in the control class"),
        ('mark = "0x1/0x0"', "empty mask"),
        ('mark = "0x100/0xff"', "outside its mask"),
        ('mark = "0xffff:0xffff"', "not a mark"),
        ('cgroup = "/"', "every process"),
        ('cgroup = "a/../b"', "not a plain path"),
        ('cgroup = "a"\ndirection = "ingress"', "no socket yet"),
        ('dscp = "ef"\ndirection = "out"', "is not"),
        ('dscp = "ef"\noverrides = ["y"]', "is not a rule of this policy"),
        ('dscp = "ef"\nnarrower = true', "not a known key"),
        ('protocol = "udp"\nport = "1-70"', 'protected rule "dhcp"'),
        ('protocol = "tcp"\nlocal_port = 179', "cannot be overridden"),
    ],
)
def test_wrong_rule_is_refused(rule: str, want: str) -> None:
    details = errors_of(rules(f'name = "x"\nclass = "bulk"\n{rule}'))
    assert any(want in detail for detail in details), f"{want!r} is not in {details}"


@pytest.mark.parametrize(
    ("rule", "want"),
    [
        ('protocol = "tcp"\nport = "1000-1032"', "at most 32"),
        ('protocol = "tcp"\nport = ["1000-1020", "2000-2020"]', "at most 32"),
        ('protocol = "tcp"', "all of tcp or udp"),
        ("dscp = 0", "every unmarked packet"),
    ],
)
def test_wide_rule_is_never_urgent(rule: str, want: str) -> None:
    details = errors_of(rules(f'name = "x"\nclass = "signal"\n{rule}'))
    assert want in details[0], f"{want!r} is not in {details}"
    load(rules(f'name = "x"\nclass = "bulk"\n{rule}'))
    load(rules('name = "x"\nclass = "signal"\nprotocol = "tcp"\nport = "1000-1031"'))


WIDE = 'name = "wide"\nclass = "bulk"\nprotocol = ["tcp", "udp"]\nport = "1000-1999"'
NARROW = 'name = "narrow"\nclass = "normal"\nprotocol = "tcp"\nlocal_port = "1900-2100"'


def test_overlap_of_other_class_needs_the_narrower_to_say_so() -> None:
    details = errors_of(rules(WIDE, NARROW))
    assert '"narrow" overrides = ["wide"]' in details[0], details
    policy = load(rules(WIDE, f'{NARROW}\noverrides = ["wide"]'))
    names = [rule.name for rule in policy.rules[len(PROTECTED) :]]
    assert names == ["narrow", "wide"], f"got {names}, want the narrower first"
    details = errors_of(rules(f'{WIDE}\noverrides = ["narrow"]', NARROW))
    assert "not narrower" in details[0], details


@pytest.mark.parametrize(
    "other",
    [
        'name = "o"\nclass = "bulk"\nprotocol = "tcp"\nlocal_port = "1900-2100"',  # same class
        'name = "o"\nclass = "normal"\nprotocol = "tcp"\nport = "2000-2100"',  # beside
    ],
)
def test_rules_that_agree_or_lie_apart_may_stand(other: str) -> None:
    load(rules(WIDE, other))


def test_sides_and_directions_keep_rules_apart() -> None:
    local = 'name = "a"\nclass = "normal"\nprotocol = "tcp"\nlocal_port = 8000'
    load(rules(local, 'name = "b"\nclass = "bulk"\nprotocol = "tcp"\nremote_port = 8000'))
    load(rules(local, 'name = "b"\nclass = "bulk"\nprotocol = "udp"\nlocal_port = 8000'))
    assert errors_of(rules(local, 'name = "b"\nclass = "bulk"\nprotocol = "tcp"\nport = 8000'))
    egress = f'{local}\ndirection = "egress"'
    other = 'name = "b"\nclass = "bulk"\nprotocol = "tcp"\nport = 8000\ndirection = "{}"'
    load(rules(egress, other.format("ingress")))
    assert errors_of(rules(egress, other.format("egress")))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ('dscp = ["ef", "cs5"]', 'dscp = "cs5"'),
        ('protocol = ["sctp", 50]', 'protocol = "sctp"'),
        ('mark = "0x10/0xf0"', 'mark = "0x11/0xff"'),
    ],
)
def test_other_kinds_overlap_too(first: str, second: str) -> None:
    a, b = f'name = "a"\nclass = "bulk"\n{first}', f'name = "b"\nclass = "normal"\n{second}'
    assert "overlaps" in errors_of(rules(a, b))[0]
    policy = load(rules(a, f'{b}\noverrides = "a"'))
    assert [rule.name for rule in policy.rules[-2:]] == ["b", "a"]


def test_one_cgroup_has_one_rule_and_its_children_may_have_others() -> None:
    a, b = 'name = "a"\nclass = "bulk"\ncgroup = "x"', 'name = "b"\nclass = "normal"\ncgroup = "{}"'
    assert "both name x" in errors_of(rules(a, b.format("/x/")))[0]
    load(rules(a, b.format("x/y")))


def test_overrides_in_a_circle_or_without_overlap_are_refused() -> None:
    a = 'name = "a"\nclass = "bulk"\nprotocol = "tcp"\nport = "1000-1010"\noverrides = ["b"]'
    b = 'name = "b"\nclass = "normal"\nprotocol = "tcp"\nport = "1005-1015"\noverrides = ["a"]'
    assert any("circle" in detail for detail in errors_of(rules(a, b)))
    c = 'name = "b"\nclass = "normal"\nprotocol = "tcp"\nport = 2000'
    assert any("does not overlap" in detail for detail in errors_of(rules(a, c)))


def test_chain_of_overrides_is_ranked_from_the_narrowest() -> None:
    rule = 'name = "{}"\nclass = "{}"\nprotocol = "tcp"\nport = "{}"\n{}'
    policy = load(
        rules(
            rule.format("plain", "bulk", "5000-5001", ""),
            rule.format("wide", "bulk", "1000-1999", ""),
            rule.format("mid", "normal", "1000-1099", 'overrides = ["wide"]'),
            rule.format("host", "signal", "1000-1009", 'overrides = ["wide", "mid"]'),
        )
    )
    names = [r.name for r in policy.rules if not r.protected]
    assert names == ["host", "mid", "plain", "wide"], f"got {names}"


def test_names_are_unique_and_not_those_of_protected_rules() -> None:
    a = 'name = "a"\nclass = "bulk"\nprotocol = "tcp"\nport = 5'
    assert "two rules" in errors_of(rules(a, a))[0]
    assert "protected" in errors_of(rules(a.replace('"a"', '"bgp"')))[0]


def test_number_of_rules_and_of_mark_rules_is_limited() -> None:
    marks = [f'name = "m{n}"\nclass = "bulk"\nmark = "{n}/0xff"' for n in range(9)]
    load(rules(*marks[:8]))
    assert "at most 8" in errors_of(rules(*marks))[0]
    port = 'name = "p{0}"\nclass = "bulk"\nprotocol = "tcp"\nport = {0}'
    many = [port.format(n) for n in range(1000, 1000 + 4091)]
    assert load(rules(*many[:4090])).rules[-1].number == 4095
    assert "at most 4090" in errors_of(rules(*many))[0]


VALUES = st.sampled_from(
    ['""', '"x"', "0", "-1", "9", "true", "nan", "[]", "{}", "[[1]]", '"10%"', '"a-b"', '["tcp"]',
     "1979-05-27", '"1gbit"', "{a = 1}", '[{name = "z"}]']
)  # fmt: skip


@given(st.integers(0, 200), st.integers(0, 200), VALUES, st.sampled_from([None, LINK]))
def test_any_two_wrong_values_give_a_named_error(
    first: int, second: int, value: str, link: int | None
) -> None:
    lines = default_policy_text().splitlines()
    keys = [at for at, line in enumerate(lines) if re.match(r"\w+ = ", line)]
    for at in {keys[first % len(keys)], keys[second % len(keys)]}:
        lines[at] = f"{lines[at].partition(' = ')[0]} = {value}"
    details: tuple[str, ...] = ()
    try:
        check_policy("\n".join(lines), "p.toml", link_rate_bits_per_s=link)
    except InputError as error:
        assert error.reference == "policy-invalid"  # noqa: PT017
        details = error.details
    assert all(re.match(r"line \d+: |\w+:", detail) for detail in details), details


def test_a_byte_order_mark_is_no_error() -> None:
    load("\ufeff" + HEAD + CLASSES)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_places_are_found_in_any_toml(end: str) -> None:
    text = end.join(
        [
            "# comment",
            'a = "x # no [ comment"  # [ really',
            "b = [",
            '  1, # ] "',
            '  """two',
            'lines ]""", ',
            "]",
            "c.d = { e = 1, f = [ {g = 2} ] }",
            "'q.r' = '''",
            "[x]'''",
            "[t.u]",
            "k = 1",
            "[[v]]",
            "k = 2",
            "[v.w]",
            "z = 1979-05-27T07:32:00Z",
            "[[v]]",
            'k = "\\"]"',
        ]
    )
    tomllib.loads(text)
    places = find_places(text)
    want = {
        ("a",): 2, ("b",): 3, ("c",): 8, ("c", "d"): 8, ("q.r",): 9, ("t", "u"): 11,
        ("t", "u", "k"): 12, ("v", 0): 13, ("v", 0, "k"): 14, ("v", 0, "w"): 15,
        ("v", 0, "w", "z"): 16, ("v", 1): 17, ("v", 1, "k"): 18,
    }  # fmt: skip
    for path, line in want.items():
        assert places.get(path) == line, f"{path}: got {places.get(path)}, want {line}"
    assert place_of(("c", "d", "f", 0), places) == 8
    assert place_of((), places) is None


def test_the_built_in_policy_is_valid_from_one_mbit_to_400_gbit() -> None:
    for link in (1_000_000, 1_000_000_000, 400_000_000_000):
        policy = load_policy(default_policy_text(), "built-in", link_rate_bits_per_s=link)
        assert [c.name for c in policy.classes] == ["signal", "stream", "normal", "bulk"]
        assert sum(c.guarantee_bits_per_s for c in policy.classes) <= link
