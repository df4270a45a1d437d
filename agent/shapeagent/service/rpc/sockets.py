# SPDX-License-Identifier: Apache-2.0
"""Unix sockets, one for each role, whose file mode is right from the first moment.

gRPC binds where it is told and leaves the mode to the umask, which is the
whole process's. So it binds in a folder that only we can enter; the socket
gets its group and mode there, and is then moved to its place, over a stale one
of an agent that was killed. gRPC itself removes nothing there afterwards.
"""

from __future__ import annotations

import contextlib
import grp
import logging
import os
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shapeagent.model.errors import FailedError, InputError
from shapeagent.service.rpc.contracts import Role

_log = logging.getLogger("shapectl.agent.rpc")

FOLDER_MODE = 0o711  # others may open a socket by its name, and list nothing
_MOST_PATH_BYTES = 107  # sun_path less its NUL, unix(7)
_BIND_PREFIX = ".bind-"


@dataclass(frozen=True, slots=True)
class SocketPlan:
    """One socket: who can open it has its role."""

    role: Role
    group: str | None  # None: root alone

    @property
    def file_name(self) -> str:
        """The socket's name in the folder."""
        return f"{self.role}.sock"


def default_plans(
    operator_group: str = "shapectl-operator", observer_group: str = "shapectl"
) -> tuple[SocketPlan, ...]:
    """Return the three sockets of an agent."""
    return (
        SocketPlan(Role.ADMIN, None),
        SocketPlan(Role.OPERATOR, operator_group),
        SocketPlan(Role.OBSERVER, observer_group),
    )


def prepare_folder(folder: Path) -> None:
    """Make the folder of the sockets, and clear what a killed agent left while binding.

    Raises: FailedError socket-folder: it cannot be made, or others may write in it.
    Effects: the folder, 0711.
    """
    try:
        folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        found = folder.stat()
        if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise FailedError(
                "socket-folder",
                f"{folder} belongs to someone else, or others may write in it: "
                "they could put sockets of their own there.",
                hint=f"chown root {folder}; chmod 0711 {folder}",
            )
        folder.chmod(FOLDER_MODE)
        for left in folder.glob(f"{_BIND_PREFIX}*"):
            shutil.rmtree(left, ignore_errors=True)
    except OSError as error:
        raise FailedError(
            "socket-folder", f"Cannot use {folder}: {error.strerror}.", hint=f"ls -ld {folder}"
        ) from error


class BoundSocket:
    """A socket in its place."""

    def __init__(self, server: Any, folder: Path, plan: SocketPlan) -> None:
        """Bind a server that has not started yet.

        Args: server: a `grpc.Server`.
        Raises: FailedError socket-bind; InputError socket-path.
        Effects: the socket file: root's with 0600, or its group's with 0660. Where
            there is no such group it is root's alone, which is said in the log.
        """
        self.path = folder / plan.file_name
        longest = folder / f"{_BIND_PREFIX}12345678" / plan.file_name
        if len(os.fsencode(longest)) > _MOST_PATH_BYTES:
            raise InputError(
                "socket-path",
                f"{folder} is too long a name for a folder of sockets: {longest} has over "
                f"{_MOST_PATH_BYTES} bytes.",
            )
        try:
            private = Path(tempfile.mkdtemp(prefix=_BIND_PREFIX, dir=folder))
        except OSError as error:
            raise _bind_error(self.path, error) from error
        try:
            fresh = private / plan.file_name
            if server.add_insecure_port(f"unix:{fresh}") == 0:
                raise OSError(0, "gRPC could not bind it")
            mode = 0o600
            group = _group_number(plan)
            if group is not None:
                os.chown(fresh, -1, group)
                mode = 0o660
            fresh.chmod(mode)
            found = fresh.lstat()
            self._identity = (found.st_dev, found.st_ino)
            fresh.rename(self.path)
        except (OSError, RuntimeError) as error:
            raise _bind_error(self.path, error) from error
        finally:
            shutil.rmtree(private, ignore_errors=True)

    def remove(self) -> None:
        """Remove the file, unless another agent has put its own there."""
        with contextlib.suppress(OSError):
            found = self.path.lstat()
            if (found.st_dev, found.st_ino) == self._identity:
                self.path.unlink()


def _group_number(plan: SocketPlan) -> int | None:
    if plan.group is None:
        return None
    try:
        return grp.getgrnam(plan.group).gr_gid
    except KeyError:
        _log.warning(
            "there is no group %s: only root can open %s (groupadd --system %s)",
            plan.group,
            plan.file_name,
            plan.group,
        )
        return None


def _bind_error(path: Path, error: OSError | RuntimeError) -> FailedError:
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return FailedError(
        "socket-bind", f"Cannot listen on {path}: {why}.", hint=f"ls -l {path.parent}"
    )
