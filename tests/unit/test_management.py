# SPDX-License-Identifier: Apache-2.0
"""Which device is the way in, decided from names, the operator's list and the SSH session."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path

import pytest

from shapeagent.kernel.sessions import (
    LinkPlace,
    carriers_of,
    has_other_nic,
    read_session_address,
)
from shapeagent.policy.management import judge_management


def judge(*names: str, session: bool = False, other: bool = True) -> tuple[str, bool] | None:
    found = judge_management(
        names, ("oob7", "altname-of-bmc"), "the list", carries_session=session, has_other_nic=other
    )
    return None if found is None else (found.why, found.must_confirm)


@pytest.mark.parametrize(
    ("names", "session", "other", "want"),
    [
        (("eth0",), False, True, None),
        (("mgmt0",), False, False, ("has a management name (mgmt0)", True)),
        (("enp3s0", "mgmt"), False, True, ("has a management name (mgmt)", True)),
        (("oob7",), False, True, ("is listed in the list", True)),
        (("eth0", "altname-of-bmc"), False, False, ("is listed in the list", True)),
        (("eth0",), True, True, ("carries your SSH session", True)),
        (("eth0",), True, False, ("carries your SSH session", False)),
    ],
)
def test_what_makes_a_management_device(
    names: tuple[str, ...], session: bool, other: bool, want: tuple[str, bool] | None
) -> None:
    got = judge(*names, session=session, other=other)
    assert got == want, f"got {got}, want {want}"


def process(proc: Path, pid: int, parent: int, **environment: str) -> None:
    folder = proc / str(pid)
    folder.mkdir()
    (folder / "status").write_text(f"Name:\tx\nPPid:\t{parent}\nUid:\t0\n")
    entries = [f"{key}={value}\0".encode() for key, value in environment.items()]
    (folder / "environ").write_bytes(b"".join(entries))


@pytest.mark.parametrize(
    ("connection", "want"),
    [
        ("192.0.2.1 50000 192.0.2.7 22", "192.0.2.7"),
        ("::ffff:192.0.2.1 50000 ::ffff:192.0.2.7 22", "192.0.2.7"),
        ("fe80::1%eth0 50000 fe80::7%eth0 22", "fe80::7"),
        ("nonsense", None),
        ("1 2 three 4", None),
    ],
)
def test_session_is_found_behind_sudo(tmp_path: Path, connection: str, want: str | None) -> None:
    """sudo's environment has no SSH_CONNECTION, the shell above it has."""
    process(tmp_path, 1, 0, SSH_CONNECTION="198.51.100.1 1 198.51.100.2 22")
    process(tmp_path, 20, 1, SSH_CONNECTION=connection)
    process(tmp_path, 30, 20, SUDO_UID="1000")
    got = read_session_address(pid=30, proc_dir=tmp_path)
    assert got == (want and ip_address(want)), f"got {got}, want {want}"


def test_no_session_without_ssh(tmp_path: Path) -> None:
    process(tmp_path, 1, 0)
    process(tmp_path, 30, 1, MY_SSH_CONNECTION="a b 192.0.2.7 22")
    got = read_session_address(pid=30, proc_dir=tmp_path)
    assert got is None, f"got {got}, want none"


def place(index: int, kind: str = "", **more: int) -> LinkPlace:
    values = {"master": 0, "parent": 0, **more}
    return LinkPlace(index, kind, values["master"], values["parent"], True, index == 1)


def test_a_bond_under_a_vlan_under_a_bridge_carries_the_session() -> None:
    places = (
        place(1),
        place(2, master=4),
        place(3, master=4),
        place(4, "bond"),
        place(5, "vlan", parent=4, master=6),
        place(6, "bridge"),
        place(7, "veth"),
    )
    carriers = carriers_of(6, places)
    assert carriers == {2, 3, 4, 5, 6}, f"got {sorted(carriers)}, want all but lo and the veth"
    assert not has_other_nic(carriers, places), "got another NIC, want none: veth and lo are none"
    assert has_other_nic(carriers, (*places, place(8))), "got no other NIC, want device 8"
