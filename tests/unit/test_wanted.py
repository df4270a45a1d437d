# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shapeagent.model.errors import FailedError
from shapeagent.model.reports import AttachRequest
from shapeagent.service import wanted
from shapeagent.service.wanted import FILE_NAME, WantedStore

ETH0 = AttachRequest("eth0", link_rate_bits_per_s=1_000_000_000)
ETH1 = AttachRequest("eth1", profile="prio")


class Fault(Exception):
    """What goes wrong in a body."""


@pytest.fixture
def warned() -> list[str]:
    return []


@pytest.fixture
def store(tmp_path: Path, warned: list[str]) -> WantedStore:
    return WantedStore(tmp_path, warned.append)


@contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:

        def refuse(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patched.setattr(wanted, "write_down", refuse)
        yield


def again(tmp_path: Path) -> WantedStore:
    return WantedStore(tmp_path, lambda text: pytest.fail(f"got a warning {text}"))


def test_what_was_said_is_read_again(store: WantedStore, tmp_path: Path) -> None:
    with store.saying("eth1", ETH1, [ETH0]):
        pass
    with store.saying("eth0", None, [ETH0]):
        pass
    for one in (store, again(tmp_path)):
        assert one.effective([ETH0]) == [ETH1], f"got {one.effective([ETH0])}"
    assert sorted(path.name for path in tmp_path.iterdir()) == [FILE_NAME]


def test_a_changed_table_overrules_what_was_said(store: WantedStore) -> None:
    with store.saying("eth0", None, [ETH0]):
        pass
    assert store.effective([ETH0]) == []
    changed = AttachRequest("eth0", link_rate_bits_per_s=2_000_000_000)
    assert store.effective([changed]) == [changed]


def test_what_failed_was_not_said(store: WantedStore, tmp_path: Path) -> None:
    with pytest.raises(Fault), store.saying("eth1", ETH1, []):
        raise Fault
    assert store.effective([]) == []
    assert list(tmp_path.iterdir()) == [], "got a file left"


def test_an_attach_on_a_full_disk_is_refused_before_it_is_done(
    store: WantedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    with (
        full_disk(monkeypatch),
        pytest.raises(FailedError) as caught,
        store.saying("eth1", ETH1, []),
    ):
        done.append("attached")
    assert caught.value.reference == "state-unwritable"
    assert done == [], "got it attached, want nothing done"
    assert store.effective([]) == []


def test_a_detach_on_a_full_disk_is_done_and_written_later(
    store: WantedStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, warned: list[str]
) -> None:
    with full_disk(monkeypatch):
        with store.saying("eth0", None, [ETH0]):
            pass
        store.catch_up()
        assert store.effective([ETH0]) == [], "got it attached again, want it left alone"
    assert len(warned) == 1, f"got {warned}"
    assert "a restart attaches eth0" in warned[0], f"got {warned}"
    assert again(tmp_path).effective([ETH0]) == [ETH0]
    store.catch_up()
    assert again(tmp_path).effective([ETH0]) == []


def test_what_is_said_next_brings_along_what_a_full_disk_kept_back(
    store: WantedStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with full_disk(monkeypatch), store.saying("eth0", None, [ETH0]):
        pass
    with store.saying("eth1", ETH1, [ETH0]):
        pass
    assert again(tmp_path).effective([ETH0]) == [ETH1]


def test_a_detach_that_fails_on_a_full_disk_was_not_said(
    store: WantedStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with full_disk(monkeypatch), pytest.raises(Fault), store.saying("eth0", None, [ETH0]):
        raise Fault
    assert store.effective([ETH0]) == [ETH0]
    store.catch_up()
    assert again(tmp_path).effective([ETH0]) == [ETH0]


@pytest.mark.parametrize("keep", [0, 5, -10])
def test_a_damaged_file_is_put_aside(tmp_path: Path, warned: list[str], keep: int) -> None:
    with WantedStore(tmp_path, warned.append).saying("eth1", ETH1, []):
        pass
    path = tmp_path / FILE_NAME
    path.write_bytes(path.read_bytes()[:keep])
    assert WantedStore(tmp_path, warned.append).effective([]) == []
    assert len(warned) == 1, f"got {warned}"
    assert not path.exists(), "got it left where it was"
