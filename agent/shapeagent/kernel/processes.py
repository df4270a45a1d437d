# SPDX-License-Identifier: Apache-2.0
"""Which process a pid means."""

from __future__ import annotations

from pathlib import Path


def process_start_ticks(pid: int) -> int | None:
    """Return when `pid` started, in clock ticks since boot; None where it does not live.

    With the pid it names a process for good: pids are used again. Source:
    proc(5), field 22 of /proc/PID/stat; a zombie counts as gone.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])
