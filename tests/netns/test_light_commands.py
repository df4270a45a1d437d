# SPDX-License-Identifier: Apache-2.0
"""Commands on what is attached: what they load, and the policy that is kept resolved."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from enginekit import Bench, environment

from shapeagent.service import keptpolicy
from shapeagent.service.documents import load_policy_text
from tests.unit.test_cli_imports import HEAVY_FOR_THE_ENGINE

pytestmark = [
    pytest.mark.host,
    pytest.mark.netns,
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
]

# The command itself, in an engine with the folders of the test.
_SCRIPT = """
import sys
from pathlib import Path
before = set(sys.modules)
run_dir, bpffs_dir, *words = sys.argv[1:]
from shapectl.cli import main
from shapeagent.service import engine
engine.Engine.__init__.__kwdefaults__.update(run_dir=Path(run_dir), bpffs_dir=Path(bpffs_dir))
code = main(words)
print("modules:", *sorted(set(sys.modules) - before))
sys.exit(code)
"""


@pytest.fixture
def one(bench: Callable[..., Bench]) -> Bench:
    made = bench()
    made.attach()
    return made


def kept_path(one: Bench) -> Path:
    return one.engine.run_dir / one.key / keptpolicy.FILE_NAME


@pytest.mark.parametrize(
    "words",
    [
        ("attach", "DEVICE", "--link-rate", "100mbit"),
        ("status",),
        ("class", "set", "bulk", "--ceiling", "50mbit"),
        ("whitelist", "add", "192.0.2.7", "--class", "signal", "--owner", "o", "--reason", "r"),
    ],
    ids=lambda words: words[0],
)
def test_nothing_heavy_is_loaded(one: Bench, words: tuple[str, ...]) -> None:
    words = tuple(one.device if word == "DEVICE" else word for word in words)
    if words[0] == "attach":
        words = (*words, "--hook", one.status().hook)
    folders = (str(one.engine.run_dir), str(one.engine.bpffs_dir))
    run = subprocess.run(
        [sys.executable, "-c", _SCRIPT, *folders, "--netns", one.netns, *words],
        capture_output=True, text=True, check=False, timeout=60, env=environment(),
    )  # fmt: skip
    assert run.returncode == 0, f"got {run.returncode}: {run.stderr}"
    loaded = run.stdout.split("modules:")[1].split()
    needed = {"shapeagent.policy.whitelist"} if words[0] == "whitelist" else set()
    heavy = HEAVY_FOR_THE_ENGINE - needed & set(loaded)
    assert not heavy, f"shapectl {words[0]} loaded {heavy}"


def test_the_policy_in_force_is_kept_resolved(one: Bench) -> None:
    path = kept_path(one)
    mode = stat.S_IMODE(path.stat().st_mode)
    assert mode == 0o600, f"got {mode:o}, want 600"
    state = one.state()
    text = one.engine.store(one.key).read_policy()
    wanted = load_policy_text(text, state["policy_source"], state["link_rate_bits_per_s"])
    found = keptpolicy._read_kept(
        path.parent, text, state["policy_source"], state["link_rate_bits_per_s"]
    )
    assert found == wanted, f"got {found}, want {wanted}"


def test_without_it_all_goes_on_and_attach_keeps_it_again(one: Bench) -> None:
    path = kept_path(one)
    whole = path.read_bytes()

    def ceilings() -> list[tuple[str, str, int | None, int]]:
        return [
            (row.name, row.direction, row.ceiling_in_force_bits_per_s, row.guarantee_bits_per_s)
            for row in one.status().classes
        ]

    wanted = ceilings()
    for damaged in (b"", whole[:100], whole.replace(b"signal", b"bulk00", 1)):
        path.write_bytes(damaged)
        assert ceilings() == wanted
        assert not one.attach().changed
        assert path.read_bytes() == whole
