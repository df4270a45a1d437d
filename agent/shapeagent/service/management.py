# SPDX-License-Identifier: Apache-2.0
"""Attaching to the management device needs a yes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shapeagent.kernel import link, sessions
from shapeagent.kernel.rtnl import Rtnl
from shapeagent.model.errors import ConflictError, InputError
from shapeagent.model.types import DeviceFacts
from shapeagent.policy.management import ManagementFinding, judge_management
from shapeagent.service.documents import read_document

MANAGEMENT_PATH = Path("/etc/shapectl/management")


@dataclass(frozen=True, slots=True)
class ManagementCheck:
    """What is known about a device as a way in for its operator."""

    finding: ManagementFinding | None
    unknown_names: tuple[str, ...]  # listed, and no such device

    def refuse_unconfirmed(self, device: str) -> None:
        """Return where attaching needs no yes.

        Raises: ConflictError management-device.
        """
        if self.finding is not None and self.finding.must_confirm:
            raise ConflictError(
                "management-device",
                f"{device} {self.finding.why}: it is the way in to this host.",
                hint=f"attach the data NIC; or, if you mean it: shapectl attach {device} "
                "--yes-management",
            )

    def warnings(self, device: str) -> tuple[str, ...]:
        """Return what the plan says about it."""
        found = [
            f"{MANAGEMENT_PATH} names {name}, and there is no such device"
            for name in self.unknown_names
        ]
        if self.finding is not None:
            found.append(
                f"{device} {self.finding.why}; if you lose it, on the console: shapectl detach "
                f"{device}"
            )
        return tuple(found)


def check_management(rtnl: Rtnl, device: DeviceFacts, *, own_netns: bool) -> ManagementCheck:
    """Return whether the device is the way in: listed, so named, or under the SSH session.

    Args:
        own_netns: the device is in the caller's namespace, as the session is.
    """
    listed = read_management_names()
    links = link.list_devices(rtnl)
    names = next(
        ((one.name, *one.altnames) for one in links if one.index == device.index), (device.name,)
    )
    known = {name for one in links for name in (one.name, *one.altnames)}
    carries, other = _session_by(rtnl, device.index) if own_netns else (False, False)
    finding = judge_management(
        names, listed, str(MANAGEMENT_PATH), carries_session=carries, has_other_nic=other
    )
    return ManagementCheck(finding, tuple(name for name in listed if name not in known))


def _session_by(rtnl: Rtnl, index: int) -> tuple[bool, bool]:
    """Return whether the caller's session comes in by the device, and whether another NIC is up."""
    address = sessions.read_session_address()
    if address is None:
        return False, False
    holder = sessions.find_device_of_address(rtnl, address)
    if holder is None:
        return False, False
    places = sessions.list_places(rtnl)
    carriers = sessions.carriers_of(holder, places)
    return index in carriers, sessions.has_other_nic(carriers, places)


def read_management_names() -> tuple[str, ...]:
    """Return the names in /etc/shapectl/management: one a line, # begins a comment.

    Raises: InputError file-unreadable; PrivilegeError file-forbidden.
    """
    try:
        text = read_document(str(MANAGEMENT_PATH))
    except InputError as error:
        if error.reference == "file-missing":
            return ()
        raise
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return tuple(dict.fromkeys(line for line in lines if line))
