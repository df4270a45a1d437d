# SPDX-License-Identifier: Apache-2.0
"""Files that are taken up when they change, and left alone when they do not."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from shapeagent.model.errors import InputError
from shapeagent.service.identity import watched
from shapeagent.service.identity.watched import MOST_FILE_BYTES, WatchedFiles


def load(contents: Sequence[bytes]) -> bytes:
    """Return both contents where they begin alike, as a certificate and its key belong together."""
    first, second = contents
    if first[:1] != second[:1]:
        raise InputError("differ", "They do not belong together.")
    return first + second


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    found = tmp_path / "a", tmp_path / "b"
    for path in found:
        path.write_bytes(b"1")
    return found


@pytest.fixture
def files(paths: tuple[Path, Path]) -> WatchedFiles[bytes]:
    return WatchedFiles(paths, load)


def write(paths: Sequence[Path], *contents: bytes) -> None:
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)


def test_a_pair_is_taken_up_as_a_whole(
    files: WatchedFiles[bytes], paths: tuple[Path, Path]
) -> None:
    write(paths, b"2", b"1")
    assert not files.refresh()
    assert (files.value, files.generation, files.refusals) == (b"11", 1, 1)
    assert str(files.error) == "They do not belong together."
    write(paths, b"2", b"2")
    assert files.refresh()
    assert (files.value, files.generation, str(files.error)) == (b"22", 2, "None")


def test_what_is_written_again_as_it_was_is_nothing_new(
    files: WatchedFiles[bytes], paths: tuple[Path, Path]
) -> None:
    write(paths, b"1", b"1")
    assert not files.refresh()
    write(paths, b"2", b"1")
    files.refresh()
    write(paths, b"1", b"1")  # taken back
    assert not files.refresh()
    assert (files.generation, files.error) == (1, None)


def test_each_wrong_content_is_counted_once(
    files: WatchedFiles[bytes], paths: tuple[Path, Path]
) -> None:
    for first, refusals in ((b"2", 1), (b"2", 1), (b"3", 2), (b"3", 2), (b"2", 3)):
        write(paths, first, b"1")
        files.refresh()
        files.refresh()
        assert files.refusals == refusals, f"got {files.refusals}, want {refusals}"
    paths[0].unlink()
    files.refresh()
    files.refresh()
    assert files.refusals == 4
    assert files.value == b"11"


def test_a_link_that_is_turned_round_is_a_change(tmp_path: Path) -> None:
    """As kubelet changes a mounted secret: one link, ..data, from one folder to the next."""
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        for file in ("a", "b"):
            (tmp_path / name / file).write_bytes(name[:1].encode())
    data = tmp_path / "..data"
    data.symlink_to("old")
    found = WatchedFiles([data / "a", data / "b"], load)
    (tmp_path / "..tmp").symlink_to("new")
    (tmp_path / "..tmp").replace(data)
    assert found.refresh()
    assert found.value == b"nn"


def test_a_change_that_no_time_stamp_shows_is_seen(
    paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stamps go by the tick, and a file can change twice in one."""
    tick_ns = time.time_ns()

    def stamp(found: os.stat_result) -> tuple[int, int, int, int, int]:
        return found.st_dev, found.st_ino, found.st_size, tick_ns, tick_ns

    monkeypatch.setattr(watched, "_stamp", stamp)
    files = WatchedFiles(paths, load)
    write(paths, b"2", b"2")
    assert files.refresh()
    assert files.value == b"22"


def test_files_that_rest_are_not_read(
    paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real_stamp, real_read = watched._stamp, watched._read_file
    reads: list[Path] = []

    def stamp(found: os.stat_result) -> tuple[int, int, int, int, int]:
        device, inode, size, changed_ns, status_ns = real_stamp(found)
        return device, inode, size, changed_ns, status_ns - 10**10  # ten seconds ago

    def read(path: Path) -> tuple[bytes, tuple[int, int, int, int, int]]:
        reads.append(path)
        return real_read(path)

    monkeypatch.setattr(watched, "_stamp", stamp)
    monkeypatch.setattr(watched, "_read_file", read)
    files = WatchedFiles(paths, load)
    for _ in range(10):
        assert not files.refresh()
    assert reads == list(paths), "want each read once, at the start"
    write(paths, b"2", b"2")
    assert files.refresh()


@pytest.mark.parametrize("what", ["fifo", "folder", "large", "absent", "loop"])
def test_what_is_no_plain_file_is_refused_and_holds_nobody_up(
    what: str, files: WatchedFiles[bytes], paths: tuple[Path, Path]
) -> None:
    path = paths[1]
    path.unlink()
    if what == "fifo":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what == "large":
        path.write_bytes(b"1" * (MOST_FILE_BYTES + 1))
    elif what == "loop":
        path.symlink_to(path.name)
    began_s = time.monotonic()
    assert not files.refresh()
    assert time.monotonic() - began_s < 5
    assert files.error is not None
    assert files.error.reference == "file-unreadable"
    assert str(path) in files.error.message
    with pytest.raises(InputError):
        WatchedFiles(paths, load)
