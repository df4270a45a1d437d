# SPDX-License-Identifier: Apache-2.0
"""The policy that is kept resolved: exactly what the text gives, or not used at all."""

from __future__ import annotations

import dataclasses
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapeagent.model.types import (
    Budget,
    Direction,
    Policy,
    PortSide,
    Rule,
    RuleKind,
    TrafficClass,
)
from shapeagent.policy.builtin import default_policy_text
from shapeagent.service import keptpolicy
from shapeagent.service.documents import load_policy_text
from shapeagent.service.keptpolicy import FILE_NAME, decode, encode, policy_of, renew

LINK = 10_000_000_000
TEXT = default_policy_text()

_TEXTS = st.text(st.characters(), max_size=20)
_NUMBERS = st.integers(0, 2**63)
_OPTIONAL = st.none() | _NUMBERS
_BUDGETS = st.builds(Budget, _NUMBERS, _NUMBERS, st.floats(0, 1e9), _TEXTS)
_CLASSES = st.builds(
    TrafficClass,
    name=_TEXTS,
    ingress_ceiling_bits_per_s=_OPTIONAL,
    budget=st.none() | _BUDGETS,
    dscp=_OPTIONAL,
    mark=_OPTIONAL,
)
_RULES = st.builds(
    Rule,
    kind=st.sampled_from(RuleKind),
    direction=st.none() | st.sampled_from(Direction),
    side=st.sampled_from(PortSide),
    protocols=st.lists(_NUMBERS, max_size=3).map(tuple),
    ports=st.lists(st.tuples(_NUMBERS, _NUMBERS), max_size=3).map(tuple),
    dscp=st.lists(_NUMBERS, max_size=3).map(tuple),
    mark_value=_NUMBERS,
    mark_mask=_NUMBERS,
    cgroup=_TEXTS,
    protected=st.booleans(),
)
_POLICIES = st.builds(
    Policy,
    classes=st.lists(_CLASSES, max_size=4).map(tuple),
    rules=st.lists(_RULES, max_size=4).map(tuple),
    segment_limit_bytes=_OPTIONAL,
)


def kept(folder: Path, text: str = TEXT, source: str = "p.toml", link: int = LINK) -> Policy | None:
    return keptpolicy._read_kept(folder, text, source, link)


def types_of(value: Any) -> Any:
    """Return the types in a value, since a string equals a StrEnum, and 1 equals True."""
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return type(value), tuple(types_of(getattr(value, one.name)) for one in fields)
    if isinstance(value, tuple):
        return tuple(map(types_of, value))
    return type(value)


@given(_POLICIES)
def test_any_policy_comes_back_exactly(policy: Policy) -> None:
    found = decode(encode(policy), policy.text)
    assert found == policy
    assert types_of(found) == types_of(policy)


@pytest.mark.parametrize("link", [64_000_000, 1_000_000_007, 400_000_000_000])
def test_the_built_in_policy_is_kept_exactly(tmp_path: Path, link: int) -> None:
    wanted = load_policy_text(TEXT, "built-in", link)
    assert kept(tmp_path, TEXT, "built-in", link) is None
    renew(tmp_path, TEXT, "built-in", link)
    found = kept(tmp_path, TEXT, "built-in", link)
    assert found == wanted
    assert types_of(found) == types_of(wanted)
    assert policy_of(tmp_path, TEXT, "built-in", link) == wanted
    mode = stat.S_IMODE((tmp_path / FILE_NAME).stat().st_mode)
    assert mode == 0o600, f"got {mode:o}, want 600"
    assert [one.name for one in tmp_path.iterdir()] == [FILE_NAME]


def test_it_is_used_for_nothing_else(tmp_path: Path) -> None:
    renew(tmp_path, TEXT, "p.toml", LINK)
    changed = TEXT.replace('guarantee = "10%"', 'guarantee = "9%"', 1)
    assert changed != TEXT
    assert kept(tmp_path) is not None
    assert kept(tmp_path, text=changed) is None
    assert kept(tmp_path, source="q.toml") is None
    assert kept(tmp_path, link=LINK + 1) is None
    assert policy_of(tmp_path, changed, "p.toml", LINK).text == changed
    renew(tmp_path, changed, "p.toml", LINK)
    assert kept(tmp_path, text=changed) == load_policy_text(changed, "p.toml", LINK)
    assert kept(tmp_path) is None


def test_a_damaged_one_costs_only_time(tmp_path: Path) -> None:
    renew(tmp_path, TEXT, "p.toml", LINK)
    path = tmp_path / FILE_NAME
    whole = path.read_bytes()
    wanted = load_policy_text(TEXT, "p.toml", LINK)
    damaged = [whole[:size] for size in range(0, len(whole), 97)]
    for at in range(0, len(whole), 53):
        damaged += [whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :] for bit in (1, 0x80)]
    damaged += [whole + b"\n", b"\n", b"null", whole.replace(b"10000000", b"90000000", 1)]
    for data in damaged:
        path.write_bytes(data)
        assert kept(tmp_path) is None, f"got {data[:80]!r}… used"
    assert policy_of(tmp_path, TEXT, "p.toml", LINK) == wanted
    path.unlink()
    path.mkdir()
    assert policy_of(tmp_path, TEXT, "p.toml", LINK) == wanted
    renew(tmp_path, TEXT, "p.toml", LINK)  # cannot, and says nothing
    assert [one.name for one in tmp_path.iterdir()] == [FILE_NAME]


def test_other_code_reads_the_text_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renew(tmp_path, TEXT, "p.toml", LINK)
    schema = next(path for path in keptpolicy._CODE if path.name == "schema.py")
    other = tmp_path / "schema.py"
    other.write_bytes(schema.read_bytes() + b"\n")
    changed = tuple(other if path == schema else path for path in keptpolicy._CODE)
    monkeypatch.setattr(keptpolicy, "_CODE", changed)
    other_code = keptpolicy._digest_of_code()
    with monkeypatch.context() as patch:  # the next process
        patch.setattr(keptpolicy, "_CODE_DIGEST", other_code)
        assert kept(tmp_path) is None
    # replaced under a running process: what it would keep might be of either
    (tmp_path / FILE_NAME).unlink()
    renew(tmp_path, TEXT, "p.toml", LINK)
    assert not (tmp_path / FILE_NAME).exists()


def test_everything_that_a_policy_is_made_by_counts() -> None:
    """What schema.py imports of ours decides a policy too, errors.py apart: it has no numbers."""
    schema = next(path for path in keptpolicy._CODE if path.name == "schema.py")
    lines = schema.read_text().splitlines()
    used = {
        line.split()[1].rpartition(".")[2]
        for line in lines
        if line.startswith("from shapeagent.model.")
    }
    assert used - {"errors"} <= {path.stem for path in keptpolicy._CODE}, f"got {used}"
