# SPDX-License-Identifier: Apache-2.0
"""Whitelists that outlast a reboot: their logs lie in a folder of the agent, by device name.

The folder of the attachment, which a reboot takes away, has a link in the
log's place, so that the command line finds it whether an agent runs or not.
An attachment that begins without a whitelist takes up the one kept there. A
detach removes it; a device that goes away does not.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from shapeagent.kernel.datapath import Control
from shapeagent.policy.entrytable import EntryTable
from shapeagent.service import whitelistlog
from shapeagent.service.liststore import UNKNOWN_MARK
from shapeagent.service.state import put_aside, sync_path, unwritable, write_down
from shapeagent.service.whitelistlog import Marks, WhitelistLog, record_all

if TYPE_CHECKING:
    from shapeagent.service.engine import Attached


def place_of(lists_dir: Path, netns: str | None, device: str) -> Path:
    """Return where the whitelist of a device is kept."""
    return lists_dir / (f"netns/{netns}" if netns else "host") / f"{device}.log"


def place(attached: Attached, control: Control) -> None:
    """Put the log where it outlasts a reboot, if the engine has such a folder. Hold the lock.

    Raises: FailedError state-unwritable; ConflictError state-other-version.

    Effects: the log moves, and a link stands in its place; or what was kept is
        taken up, as a change that is not in force yet.
    """
    folder, link = attached.engine.lists_dir, attached.store.whitelist_link
    if folder is None or link.is_symlink():
        return
    path = place_of(folder, attached.state.netns, attached.state.device)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if link.exists():
            _copy(link, path)
        elif path.exists() and not (attached.state.whitelist_generation or control.list_flags):
            _take_up(attached, path, control.lists_mark)
        _link(link, path)
    except OSError as error:
        raise unwritable(path, error) from error


def _copy(link: Path, path: Path) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write_down(temporary, link.read_bytes(), lasting=True)
        temporary.rename(path)
        sync_path(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _link(link: Path, path: Path) -> None:
    temporary = link.with_name(f".{link.name}.link")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    temporary.symlink_to(path)
    temporary.rename(link)
    sync_path(link.parent)


def _take_up(attached: Attached, path: Path, mark: int) -> None:
    """Make the kept list the next change of this attachment. A damaged one is put aside."""
    loaded = whitelistlog.load(path)
    if loaded.why and not loaded.is_torn:
        attached.engine.warn(f"{path} was damaged ({loaded.why}): put aside, the list is empty")
        put_aside(path)
        return
    table = _without_unknown_classes(attached, path, loaded.table)
    marks = Marks(mark, UNKNOWN_MARK)
    record = record_all(table.columns, table.groups, loaded.generation, marks)
    WhitelistLog.create(path, record).close()


def _without_unknown_classes(attached: Attached, path: Path, table: EntryTable) -> EntryTable:
    """Return the table without entries of classes that the policy of this attachment lacks."""
    names = {one.name for one in attached.policy.classes}
    gone = {
        number for number, group in table.live_groups().items() if group.traffic_class not in names
    }
    if not gone:
        return table
    lost = {table.groups[number].traffic_class for number in gone}
    before = len(table)
    for found, column in table.columns.items():
        table.unload(found, [key for key, number in column.items() if number in gone])
    attached.engine.warn(
        f"{path}: {before - len(table)} entries of {', '.join(sorted(map(repr, lost)))}, which "
        "the policy lacks, were left out"
    )
    return table
