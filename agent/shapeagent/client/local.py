# SPDX-License-Identifier: Apache-2.0
"""The agent of this host, where one runs: it holds the lock. Loads no gRPC."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from pathlib import Path

from shapeagent.client.address import AgentAddress

RUN_DIR = SOCKET_FOLDER = Path("/run/shapectl")
#: The strongest first.
_SOCKETS = ("admin.sock", "operator.sock", "observer.sock")
_MOST_LOCK_BYTES = 4_096


def agent_of(run_dir: Path) -> AgentAddress | None:
    """Return where the agent listens that holds the lock of a run folder, None where none does.

    A command that holds it for a moment names no sockets; it is no agent.
    """
    try:
        descriptor = os.open(run_dir / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if _is_free(descriptor):
            return None  # what stands there is of an agent that is gone
        text = os.pread(descriptor, _MOST_LOCK_BYTES, 0)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return parse_holder(text)


def _is_free(descriptor: int) -> bool:
    """Return whether nobody holds the lock; shared, so that two who look do not meet."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return True


def parse_holder(text: bytes) -> AgentAddress | None:
    """Return the agent that a lock file names: `{"pid": 123, "sockets": "/run/shapectl"}`.

    With `"netns": "lab"` it serves that namespace, and not the one that it was started in.
    """
    with contextlib.suppress(ValueError):
        found = json.loads(text)
        if isinstance(found, dict):
            pid, folder = found.get("pid"), found.get("sockets")
            netns = found.get("netns")
            if (
                isinstance(pid, int)
                and isinstance(folder, str)
                and folder.startswith("/")
                and (netns is None or isinstance(netns, str))
            ):
                return AgentAddress(f"unix:{Path(folder) / _SOCKETS[0]}", pid, netns)
    return None


def usable_socket(folder: Path = SOCKET_FOLDER) -> AgentAddress | None:
    """Return the strongest socket that this user may open, None where there is none.

    For users who cannot read the lock: the groups that an agent listens for.
    """
    for name in _SOCKETS:
        path = folder / name
        if path.is_socket() and os.access(path, os.R_OK | os.W_OK):
            return AgentAddress(f"unix:{path}")
    return None
