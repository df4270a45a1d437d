# SPDX-License-Identifier: Apache-2.0
"""`attach --confirm`: undone by itself unless somebody says in time that all is well.

A note beside the state names a token, the deadline and what waits. The waiting
command detaches only where the note still has its token, so a confirmation, a
detach, or another attach disarms it even where it could not be ended.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shapeagent.kernel.guardian import Guardian, leave_cgroup, start_guardian, stop_guardian
from shapeagent.model.errors import ConflictError, FailedError, InputError

if TYPE_CHECKING:
    from shapeagent.service.engine import Engine
    from shapeagent.service.state import StateDir

LEAST_S, MOST_S = 3.0, 3_600.0
MODULE = "shapeagent.service.confirming"


@dataclass(frozen=True, slots=True)
class Pending:
    """An attach that waits for its confirmation. The deadline is on the boot's clock."""

    token: str
    deadline_s: float
    guardian: Guardian

    @property
    def left_s(self) -> float:
        """Seconds until it is undone, 0 where that is due."""
        return max(0.0, self.deadline_s - _now_s())


def check_confirm(confirm_s: float | None) -> None:
    """Raises: InputError bad-confirm."""
    if confirm_s is not None and not LEAST_S <= confirm_s <= MOST_S:
        raise InputError(
            "bad-confirm",
            f"--confirm {confirm_s:g}s is not between {LEAST_S:g}s and 1h.",
            hint="--confirm 60s",
        )


def arm(engine: Engine, store: StateDir, device: str, confirm_s: float) -> Pending:
    """Return what now waits; before the first change to the device.

    Raises: FailedError guardian-failed.
    """
    import secrets

    token = secrets.token_hex(8)
    words = [str(engine.run_dir), str(engine.bpffs_dir), engine.netns or "", device, token]
    keep = {key: os.environ[key] for key in ("PYTHONPATH", "LANG") if key in os.environ}
    guardian = start_guardian(
        f"shapectl-confirm-{store.folder.name}-{token}",
        confirm_s,
        [sys.executable, "-P", "-m", MODULE, *words],
        keep,
        store.folder / "confirm.ready",
    )
    pending = Pending(token, _now_s() + confirm_s, guardian)
    try:
        store.write_confirm(json.dumps(asdict(pending)))
    except BaseException:
        stop_guardian(guardian)
        raise
    return pending


def read_pending(store: StateDir) -> Pending | None:
    """Return the attach that waits, None where none does. A damaged note counts as none."""
    try:
        raw = store.read_confirm()
        if raw is None:
            return None
        return Pending(raw["token"], float(raw["deadline_s"]), Guardian(**raw["guardian"]))
    except (FailedError, ValueError, KeyError, TypeError):
        return None


def waits_for(store: StateDir, token: str) -> bool:
    """Return whether the attach with this token still waits for its confirmation.

    A note that nobody can read was never removed, so nobody has confirmed.
    """
    pending = read_pending(store)
    if pending is not None:
        return pending.token == token
    try:
        return store.read_confirm() is not None
    except FailedError:
        return True


def disarm(store: StateDir) -> Pending | None:
    """Return what waited, after ending it; None where nothing did."""
    pending = read_pending(store)
    store.remove_confirm()
    if pending is not None:
        stop_guardian(pending.guardian)
    return pending


def confirm(store: StateDir, device: str) -> float:
    """Return the seconds that were left. Raises: ConflictError nothing-to-confirm."""
    pending = disarm(store)
    if pending is None:
        raise ConflictError(
            "nothing-to-confirm",
            f"{device} is attached for good: nothing waits for a confirmation.",
            hint=f"shapectl status {device}",
        )
    return pending.left_s


def _now_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def main(arguments: list[str]) -> int:
    """Detach a device whose attach nobody confirmed. Exit 1: try again."""
    from shapeagent.service.engine import Engine

    run_dir, bpffs_dir, netns, device, token = arguments
    engine = Engine(netns=netns or None, run_dir=Path(run_dir), bpffs_dir=Path(bpffs_dir))
    try:
        engine.detach(device, unless_confirmed=token)
    except InputError:
        return 0  # the device is gone, or its namespace, and what was on it
    except (ConflictError, FailedError):
        return 1
    leave_cgroup()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
