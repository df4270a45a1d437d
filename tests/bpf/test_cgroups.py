# SPDX-License-Identifier: Apache-2.0
"""Rules and budgets by cgroup.

A test run's socket belongs to the cgroup of the caller, so the explaining
program asks no cgroup rule: these look at what the shaping one counts.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shapeagent.kernel.cgroup import CgroupRef, find_cgroup_mount, resolve_cgroup
from shapeagent.model.codes import Code
from shapeagent.model.errors import ShapeError
from tests.bpf.frames import tcp4, tcp6, udp4
from tests.bpf.kit import BULK, EGRESS, INGRESS, NORMAL, POLICY, SIGNAL, STREAM, Rig
from tests.bpf.test_budget import BIG, budget_policy


@pytest.fixture
def tree() -> Iterator[Path]:
    """Give the folder of a new cgroup v2 with some below it; empty and gone afterwards."""
    try:
        mount = find_cgroup_mount()
    except ShapeError as error:
        pytest.skip(f"needs cgroup v2: {error.message}")
    top = mount.folder / f"shp_test_{secrets.token_hex(4)}"
    folders = [
        top,
        top / "svc",
        top / "svc" / "worker",
        top / "svc" / "worker" / "a",
        top / "other",
    ]
    try:
        for folder in folders:
            folder.mkdir()
    except OSError as error:
        for folder in reversed(folders):
            if folder.is_dir():
                folder.rmdir()
        pytest.skip(f"cannot make a cgroup: {error}")
    try:
        yield top
    finally:
        for folder in reversed(folders):
            folder.rmdir()


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Run the body in a cgroup."""
    mount = find_cgroup_mount()
    text = Path("/proc/self/cgroup").read_text()
    home = next(line[3:] for line in text.splitlines() if line.startswith("0::"))
    back = mount.folder / home.lstrip("/") / "cgroup.procs"
    (folder / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        back.write_text(str(os.getpid()))


def policy_for(top: Path, *more: str) -> str:
    """Return the test policy with cgroup rules for `svc` (bulk) and what is in `more`."""
    rules = [("svc", "bulk"), *((path, "stream") for path in more)]
    return POLICY + "".join(
        f'[[rules]]\nname = "cg{number}"\nclass = "{name}"\ncgroup = "{top.name}/{path}"\n'
        for number, (path, name) in enumerate(rules)
    )


def resolve(path: str) -> CgroupRef | None:
    """Return a cgroup as the engine resolves it."""
    return resolve_cgroup(path)


def test_a_rule_takes_a_cgroup_and_all_below_it_and_nothing_beside(rig: Rig, tree: Path) -> None:
    rig.apply(policy_for(tree), resolve=resolve)
    got = {}
    for name in ("", "svc", "svc/worker", "svc/worker/a", "other"):
        with inside(tree / name):
            rig.clear()
            got[name] = rig.classify(tcp4(1, 2)), rig.classify(tcp6(1, 2)), rig.classify(udp4(1, 2))
    rig.clear()
    got["home"] = (rig.classify(tcp4(1, 2)),) * 3
    bulk, default = ((BULK, Code.CGROUP),) * 3, ((NORMAL, Code.DEFAULT),) * 3
    want = {"": default, "svc": bulk, "svc/worker": bulk, "svc/worker/a": bulk}
    want |= {"other": default, "home": default}
    assert got == want, f"got {got}, want {want}"


def test_the_deepest_cgroup_that_a_rule_names_wins(rig: Rig, tree: Path) -> None:
    rig.apply(policy_for(tree, "svc/worker"), resolve=resolve)
    got = {}
    for name in ("svc", "svc/worker", "svc/worker/a"):
        rig.clear()
        with inside(tree / name):
            got[name] = rig.classify(tcp4(1, 2))
    want = dict.fromkeys(("svc/worker", "svc/worker/a"), (STREAM, Code.CGROUP))
    assert got == {"svc": (BULK, Code.CGROUP), **want}, f"got {got}"


def test_cgroup_rules_beat_ports_but_not_protected_ones_and_are_blind_on_ingress(
    rig: Rig, tree: Path
) -> None:
    rig.apply(policy_for(tree), resolve=resolve)
    with inside(tree / "svc"):
        got = [
            rig.classify(tcp4(1, 7000), EGRESS),
            rig.classify(tcp4(1, 179), EGRESS),
            rig.classify(tcp4(1, 7000), INGRESS),
            rig.classify(tcp4(1, 2), INGRESS),
        ]
    want = [(BULK, Code.CGROUP), (SIGNAL, Code.CONTROL), (SIGNAL, Code.PORT)]
    assert got == [*want, (NORMAL, Code.DEFAULT)], f"got {got}"


def test_a_cgroup_that_is_not_there_is_left_out_and_named(rig: Rig, tree: Path) -> None:
    rig.apply(
        policy_for(tree, "svc/gone"),
        resolve=lambda path: None if path.endswith("gone") else resolve_cgroup(path),
    )
    with inside(tree / "svc"):
        got = rig.classify(tcp4(1, 2))
    assert got == (BULK, Code.CGROUP), f"got {got}, want the rule that resolves in force"


def test_the_flows_of_one_cgroup_share_one_budget_on_egress(rig: Rig, tree: Path) -> None:
    rig.apply(budget_policy())
    with inside(tree / "svc"):
        got = [rig.classify(udp4(port, 7000), wire_len=BIG) for port in range(4)]
    want = [(SIGNAL, Code.PORT)] * 2 + [(NORMAL, Code.OVERFLOW)] * 2
    assert got == want, f"one cgroup: got {got}, want {want}"
    with inside(tree / "other"):
        other = rig.classify(udp4(9, 7000), wire_len=BIG)
    assert other == (SIGNAL, Code.PORT), f"another cgroup: got {other}, want in budget"


def test_explain_does_not_answer_for_the_cgroup_of_who_asks(rig: Rig, tree: Path) -> None:
    rig.apply(policy_for(tree), resolve=resolve)
    with inside(tree / "svc"):
        got = rig.verdict(tcp4(1, 7000))
    assert got == (SIGNAL, Code.PORT), f"got {got}, want the port rule"
