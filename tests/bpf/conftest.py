# SPDX-License-Identifier: Apache-2.0
"""The compiled image, once a session, and one attachment without a device per module."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shapeagent.kernel import compile as compiler
from shapeagent.kernel import lists, probe
from tests.bpf.kit import POLICY, Rig

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder."""
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.bpf)


@pytest.fixture(scope="session")
def image() -> compiler.Image:
    """Give the compiled programs; from the cache where the source did not change."""
    if os.geteuid() != 0:
        pytest.skip("needs root to load BPF programs")
    probe.ensure_bpffs()
    found, _ = compiler.find_image()
    return found


@pytest.fixture(scope="module")
def shared_rig(image: compiler.Image) -> Iterator[Rig]:
    """Give maps and programs of one module, and take them away after it."""
    rig = Rig(image)
    try:
        yield rig
    finally:
        rig.close()
        assert not rig.folder.exists(), f"got {rig.folder} left behind, want it gone"


@pytest.fixture
def rig(shared_rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """Give the module's rig with the plain policy, no flows and no lists.

    Short lists lie in hashes, too, if they have few prefix lengths.
    """
    monkeypatch.setattr(lists, "NETS_MIN_PREFIXES_PER_LENGTH", 1)
    shared_rig.apply(POLICY)
    return shared_rig
