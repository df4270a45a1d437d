# SPDX-License-Identifier: Apache-2.0
"""What only CAP_SYS_ADMIN can find out, kept for a process without it, until the next boot.

Qdiscs are probed in a namespace of one's own, and making one needs CAP_SYS_ADMIN
(copy_namespaces() in kernel/nsproxy.c). The agent's unit runs `shapectl agent
prepare` with all rights first, and the agent itself without that one.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

from shapeagent.model.errors import PrivilegeError
from shapeagent.model.types import KernelFacts

NAME = "kernel.json"
_SCHEMA = 1
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def write(path: Path, facts: KernelFacts) -> None:
    """Keep the facts in a file of root's (0600), replaced as a whole."""
    found = dataclasses.asdict(facts)
    found["qdiscs"] = sorted(facts.qdiscs)
    text = json.dumps({"schema": _SCHEMA, "boot_id": _boot_id(), "facts": found}) + "\n"
    beside = path.with_suffix(".new")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    beside.rename(path)


def read(path: Path) -> KernelFacts | None:
    """Return the facts, None where there are none of this boot and this kernel."""
    try:
        if os.stat(path).st_uid != 0:
            return None
        kept = json.loads(path.read_text(encoding="utf-8"))
        if (kept["schema"], kept["boot_id"]) != (_SCHEMA, _boot_id()):
            return None
        facts = kept["facts"]
        found = KernelFacts(**{**facts, "qdiscs": frozenset(facts["qdiscs"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if found.release == os.uname().release else None


def needs_root_cli(what: str, command: str) -> PrivilegeError:
    """Return the error for what a process without CAP_SYS_ADMIN leaves to the command line."""
    return PrivilegeError(
        "needs-root-cli",
        f"{what} needs CAP_SYS_ADMIN, which this process lacks.",
        hint=f"sudo {command}",
    )


def _boot_id() -> str:
    return _BOOT_ID.read_text(encoding="ascii").strip()
