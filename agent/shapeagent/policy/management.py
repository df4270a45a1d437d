# SPDX-License-Identifier: Apache-2.0
"""Which device an operator must not cut off by mistake."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Debian, Arista, Cumulus and cloud images call the out-of-band NIC mgmt0, mgmt, mgmt1.
_PREFIX = "mgmt"


@dataclass(frozen=True, slots=True)
class ManagementFinding:
    """Why a device counts as a management device, and whether attaching needs a yes."""

    why: str  # goes after "eth0 "
    must_confirm: bool


def judge_management(
    names: Sequence[str],
    listed: Sequence[str],
    list_source: str,
    *,
    carries_session: bool,
    has_other_nic: bool,
) -> ManagementFinding | None:
    """Return why the device is a management device; None where it is none.

    A server with one NIC has its SSH sessions on the NIC that is to be shaped:
    there the operator is told, and not stopped.

    Args:
        names: the device's name and alternative names.
        listed: names that the operator wrote into `list_source`.
        carries_session: the caller's SSH session comes in by this device.
        has_other_nic: another NIC is up and is not below or above this one.
    """
    for name in names:
        if name in listed:
            return ManagementFinding(f"is listed in {list_source}", must_confirm=True)
    for name in names:
        if name.startswith(_PREFIX):
            return ManagementFinding(f"has a management name ({name})", must_confirm=True)
    if carries_session:
        return ManagementFinding("carries your SSH session", must_confirm=has_other_nic)
    return None
