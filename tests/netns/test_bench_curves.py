# SPDX-License-Identifier: Apache-2.0
"""The scale curves, whole, with few points: each classifier does the job, nothing stays."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shapeagent.lab import topology
from shapeagent.lab.bench.curves import run_curves
from shapeagent.model.errors import InputError
from shapectl.labattach import LabAttach

pytestmark = [
    pytest.mark.netns,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
]


def test_curves_measure_ours_and_u32_and_leave_nothing(tmp_path: Path) -> None:
    steps: list[str] = []
    before = set(topology.NETNS_DIR.iterdir()) if topology.NETNS_DIR.exists() else set()
    curves = run_curves(
        attach=LabAttach(tmp_path, lambda _: None),
        clock="real",
        progress=steps.append,
        points={"prefixes": [64], "classes": [2]},
    )
    rows = {(row["curve"], row["classifier"]): row for row in curves["rows"]}
    wanted = {
        ("prefixes", "shapectl"), ("prefixes", "shapectl-first"), ("prefixes", "u32"),
        ("prefixes", "u32-hashed"), ("classes", "shapectl"), ("classes", "u32"),
    }  # fmt: skip
    missing = {one["classifier"] for one in curves["left_out"]}
    assert missing <= {"u32", "flower"}, f"got {curves['left_out']}"
    assert {key for key in wanted if key[1] not in missing} <= set(rows)
    for row in rows.values():
        assert row["kernel"] == os.uname().release
        assert row["packets"] >= 5 * 64
        assert row["base_ns_per_packet"] > 0
    assert any("measure u32" in step for step in steps) or "u32" in missing
    after = set(topology.NETNS_DIR.iterdir()) if topology.NETNS_DIR.exists() else set()
    # other labs of this host may come and go meanwhile; ours would be new and owned by us
    owned = {path for path in after - before if _is_owned_by_us(path.name)}
    assert owned == set()


def _is_owned_by_us(name: str) -> bool:
    owner = topology.OWNER_DIR / name
    return owner.exists() and f'"pid": {os.getpid()}' in owner.read_text()


def test_unknown_point_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        run_curves(
            attach=LabAttach(tmp_path, lambda _: None),
            clock="real",
            progress=lambda _: None,
            points={"rules": [5_000]},
        )
    assert caught.value.reference == "bench-point-invalid"
