# SPDX-License-Identifier: Apache-2.0
"""Cgroup v2 paths and the ids that packets of their processes carry."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shapeagent.model.errors import InputError, UnsupportedError

_MOUNTINFO = Path("/proc/thread-self/mountinfo")


@dataclass(frozen=True, slots=True)
class CgroupMount:
    """Where cgroup v2 is mounted, and how deep the mount's root lies in the hierarchy."""

    folder: Path
    root_level: int


@dataclass(frozen=True, slots=True)
class CgroupRef:
    """A cgroup as it is now. A path deleted and made again has another id."""

    path: str  # relative to the mount, "" = the root
    id: int  # bpf_skb_ancestor_cgroup_id() at this level
    level: int  # 0 = the root


def find_cgroup_mount(mountinfo: Path = _MOUNTINFO) -> CgroupMount:
    """Return the cgroup v2 mount; on a hybrid host that beside the v1 ones.

    Raises: UnsupportedError no-cgroup2.
    """
    for line in mountinfo.read_text().splitlines():
        before, _, after = line.partition(" - ")
        if after.split()[0] == "cgroup2":
            fields = before.split()
            folder = Path(fields[4].encode().decode("unicode_escape"))
            depth = len([part for part in fields[3].split("/") if part not in ("", "..")])
            return CgroupMount(folder, depth)
    raise UnsupportedError(
        "no-cgroup2",
        "No cgroup v2 file system is mounted, and a rule names a cgroup.",
        hint="mount -t cgroup2 none /sys/fs/cgroup/unified",
    )


def resolve_cgroup(path: str, mount: CgroupMount | None = None) -> CgroupRef:
    """Return id and level of a cgroup.

    Args:
        path: relative to the mount, with or without a leading "/", or a full
            path below the mount.
    Raises: InputError no-such-cgroup; UnsupportedError no-cgroup2.
    """
    mount = mount or find_cgroup_mount()
    text = path
    if Path(path).is_relative_to(mount.folder):
        text = str(Path(path).relative_to(mount.folder))
    parts = [part for part in text.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in text:
        raise InputError(
            "no-such-cgroup",
            f"Cgroup {path!r} leaves the hierarchy.",
            hint="Give the path as /proc/PID/cgroup prints it.",
        )
    folder = mount.folder.joinpath(*parts)
    if not (folder / "cgroup.controllers").exists():
        raise InputError(
            "no-such-cgroup",
            f"There is no cgroup {path!r} under {mount.folder}.",
            hint="Start the service first, or see `systemd-cgls`; a rule can wait for its cgroup.",
        )
    return CgroupRef("/".join(parts), folder.stat().st_ino, mount.root_level + len(parts))


def find_cgroup(path: str) -> CgroupRef | None:
    """Return id and level of a cgroup, None where there is none now.

    Raises: UnsupportedError no-cgroup2.
    """
    try:
        return resolve_cgroup(path)
    except InputError:
        return None
