# SPDX-License-Identifier: Apache-2.0
"""Which device it is, whatever its name, index or namespace is by now.

An index can be given again (`ip link add … index N`, or by wrap), and a name
too. The folder of a device in sysfs is made with the device and moves with it,
through renames and into other namespaces; its inode number is never given
again until the next boot (kernfs_new_node() counts a generation above the
number, fs/kernfs/dir.c).
"""

from __future__ import annotations

import os
from pathlib import Path

from shapeagent.kernel.netns import run_in_netns
from shapeagent.kernel.sysfs import sysfs_of_this_namespace

_SYS = Path("/sys")  # may show another namespace: not asked


def read_identity(netns: str | None, name: str, index: int) -> int:
    """Return the number that only this device has, 0 where it cannot be seen."""

    def read() -> int:
        with sysfs_of_this_namespace() as root:
            return 0 if root == _SYS else _identity(root / "class/net" / name, index)

    return run_in_netns(netns, read)


def find_identity(netns: str | None, identity: int) -> tuple[str, int] | None:
    """Return (name, index) of the device with that number in a namespace, None without one."""

    def find() -> tuple[str, int] | None:
        with sysfs_of_this_namespace() as root:
            folder = root / "class/net"
            if root == _SYS:
                return None
            for name in sorted(os.listdir(folder)):
                if _identity(folder / name, None) == identity:
                    return name, int((folder / name / "ifindex").read_text())
        return None

    try:
        return run_in_netns(netns, find)
    except (OSError, ValueError):
        return None  # it went away while we looked


def _identity(folder: Path, index: int | None) -> int:
    try:
        if index is not None and int((folder / "ifindex").read_text()) != index:
            return 0
        return folder.stat().st_ino
    except (OSError, ValueError):
        return 0
