# SPDX-License-Identifier: Apache-2.0
"""How state files are written, and how damage is told from whole (C44)."""

from __future__ import annotations

import errno
import os
import stat
import zlib
from pathlib import Path

import pytest

from shapeagent.model.errors import ConflictError, FailedError
from shapeagent.service.state import (
    AttachState,
    StateDir,
    seal,
    unseal,
    unseal_list,
)

TEXT = '{"schema": 1, "device": "d0", "note": "ä"}'


def test_a_file_reaches_the_disk_before_its_name_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C44: written beside, fsync, rename, fsync of the folder."""
    done: list[str] = []
    real_sync, real_rename = os.fsync, Path.rename

    def sync(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        kind = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else Path(path).name
        done.append(f"fsync {kind.replace(str(os.getpid()), 'PID')}")
        real_sync(descriptor)

    def rename(self: Path, target: Path) -> Path:
        done.append(f"rename to {target.name}")
        return real_rename(self, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "rename", rename)
    store = StateDir(tmp_path, "1-2")
    store.write_policy("version = 1\n")
    store.write(STATE)
    assert done == [
        "fsync .policy.toml.PID",
        "rename to policy.toml",
        "fsync .state.json.PID",
        "rename to state.json",
        "fsync folder",
    ], f"got {done}"
    mode = (tmp_path / "1-2" / "state.json").stat().st_mode & 0o777
    assert mode == 0o600, f"got mode {mode:o}, want 600"
    assert sorted(path.name for path in (tmp_path / "1-2").iterdir()) == [
        "policy.toml",
        "state.json",
    ]


class _Small(AttachState):
    """As much of a state as is needed to write one."""

    def __init__(self) -> None:
        pass

    def to_json(self) -> str:
        return TEXT


STATE = _Small()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    store = StateDir(tmp_path, "1-2")
    store.write_policy("old\n")

    def fail(_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(FailedError) as caught:
        store.write_policy("new\n")
    assert caught.value.reference == "state-unwritable", f"got {caught.value.reference}"
    assert os.strerror(code) in caught.value.message, f"got {caught.value.message}"
    assert [path.name for path in store.folder.iterdir()] == ["policy.toml"]
    assert store.read_policy() == "old\n"


def test_a_change_that_fails_leaves_the_file(tmp_path: Path) -> None:
    store = StateDir(tmp_path, "1-2")
    store.write(STATE)
    before = {path.name: path.read_bytes() for path in store.folder.iterdir()}
    with pytest.raises(RuntimeError), store.writing(STATE):
        raise RuntimeError("the kernel refused")
    found = {path.name: path.read_bytes() for path in store.folder.iterdir()}
    assert found == before, f"got {found}, want {before}"


def test_every_changed_byte_is_noticed() -> None:
    sealed = seal(TEXT).encode()
    assert unseal(sealed.decode()) == TEXT
    for place in range(len(sealed)):
        for changed in (sealed[:place], sealed[:place] + b"~" + sealed[place + 1 :]):
            text = changed.decode(errors="replace")
            with pytest.raises(ValueError, match=r".*"):
                AttachState.from_json(unseal(text), is_whole=text.startswith('{"checksum": "'))


def test_a_list_that_is_cut_anywhere_is_noticed() -> None:
    text = "192.0.2.1 class=bulk\n192.0.2.2 class=bulk\n"
    sealed = f"{text}# crc32 {zlib.crc32(text.encode()):08x}\n"
    assert unseal_list(sealed).endswith("192.0.2.2 class=bulk\n")
    for place in range(len(sealed)):
        with pytest.raises(ValueError, match="cut or changed"):
            unseal_list(sealed[:place])
    assert unseal_list("# crc32 00000000\n") == ""


@pytest.mark.parametrize("text", ['{"schema": 99}', '{"schema": "2"}', '{"schema": null}'])
def test_another_schema_is_no_damage(tmp_path: Path, text: str) -> None:
    """F4."""
    store = StateDir(tmp_path, "1-2")
    store.folder.mkdir()
    (store.folder / "state.json").write_text(text)
    with pytest.raises(ConflictError) as caught:
        store.read()
    assert caught.value.reference == "state-other-version", f"got {caught.value.reference}"
    assert "detach" in str(caught.value.hint) or "attached it" in str(caught.value.hint)


@pytest.mark.parametrize("text", ["", "\0" * 1887, "[]", "null", "{}", '{"schema": 1}', "\udcff"])
def test_damage_is_named(tmp_path: Path, text: str) -> None:
    store = StateDir(tmp_path, "1-2")
    store.folder.mkdir()
    (store.folder / "state.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(FailedError) as caught:
        store.read()
    assert caught.value.reference == "state-damaged", f"got {caught.value.reference}"
    assert set(store.damage(None)) == {"state.json"}, f"got {store.damage(None)}"
