# SPDX-License-Identifier: Apache-2.0
"""Which nftables chains and flowtables stand at the ingress hook of a device."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from shapeagent.kernel.rtnl import (
    Rtnl,
    iterate_attributes,
    named_error,
    parse_attributes,
    parse_text,
)

_NETLINK_NETFILTER = 12
_NFNL_SUBSYS_NFTABLES = 10 << 8
_GETCHAIN = _NFNL_SUBSYS_NFTABLES | 4
_GETFLOWTABLE = _NFNL_SUBSYS_NFTABLES | 23
_NFGENMSG = struct.Struct("=BBH")  # family, version, resource id

# Family → hook number of ingress: NFPROTO_INET, NF_INET_INGRESS; NFPROTO_NETDEV, NF_NETDEV_INGRESS.
_INGRESS = {1: 5, 5: 0}
_NFTA_TABLE = 1  # of chains and flowtables
_NFTA_CHAIN_NAME, _NFTA_CHAIN_HOOK = 3, 4
_NFTA_HOOK_HOOKNUM, _NFTA_HOOK_DEV, _NFTA_HOOK_DEVS = 1, 3, 4
_NFTA_FLOWTABLE_NAME, _NFTA_FLOWTABLE_HOOK = 2, 3
_NFTA_FLOWTABLE_HOOK_DEVS = 3
_NFTA_DEVICE_PREFIX = 2  # beside NFTA_DEVICE_NAME: all devices that begin so
_NOT_THERE = (errno.EINVAL, errno.EOPNOTSUPP, errno.EPROTONOSUPPORT, errno.ECONNREFUSED)


def list_ingress_users(device: str) -> tuple[str, ...]:
    """Return what nftables has at the ingress hook of a device of this thread's namespace.

    Nothing where nf_tables is not loaded; asking never loads it.

    Raises: PrivilegeError missing-capability.
    """
    if not _is_loaded():
        return ()
    found: list[str] = []
    try:
        with Rtnl(_NETLINK_NETFILTER) as nfnl:
            for kind, parse in ((_GETCHAIN, _parse_chain), (_GETFLOWTABLE, _parse_flowtable)):
                for body in nfnl.dump(kind, _NFGENMSG.pack(socket.AF_UNSPEC, 0, 0)):
                    name, devices = parse(body)
                    if any(_is_meant(device, one, prefix) for one, prefix in devices):
                        found.append(name)
    except OSError as error:
        if error.errno in _NOT_THERE:
            return tuple(found)
        raise named_error(error, "list the nftables chains", device) from error
    return tuple(found)


def _is_loaded() -> bool:
    modules = Path("/proc/modules")
    if not modules.exists() or Path("/sys/module/nf_tables").exists():
        return True  # no module can be loaded, so asking is free
    try:
        folder = Path("/lib/modules", os.uname().release)
        return "/nf_tables.ko" in (folder / "modules.builtin").read_text()
    except OSError:
        return False


def _is_meant(device: str, name: str, prefix: bool) -> bool:
    return device.startswith(name) if prefix else device == name


def _parse_chain(body: bytes) -> tuple[str, list[tuple[str, bool]]]:
    """Return the name of a chain and the devices of its ingress hook, none of another hook."""
    family, _, _ = _NFGENMSG.unpack_from(body)
    attributes = parse_attributes(body[_NFGENMSG.size :])
    table = parse_text(attributes.get(_NFTA_TABLE, b""))
    name = f"nftables chain {table} {parse_text(attributes.get(_NFTA_CHAIN_NAME, b''))}"
    hook = parse_attributes(attributes.get(_NFTA_CHAIN_HOOK, b""))
    if _NFTA_HOOK_HOOKNUM not in hook or family not in _INGRESS:
        return name, []
    (number,) = struct.unpack(">I", hook[_NFTA_HOOK_HOOKNUM])
    if number != _INGRESS[family]:
        return name, []
    devices = list(_devices(hook.get(_NFTA_HOOK_DEVS, b"")))
    if _NFTA_HOOK_DEV in hook:
        devices.append((parse_text(hook[_NFTA_HOOK_DEV]), False))
    return name, devices


def _parse_flowtable(body: bytes) -> tuple[str, list[tuple[str, bool]]]:
    """Return the name of a flowtable and its devices; it has no hook but ingress."""
    attributes = parse_attributes(body[_NFGENMSG.size :])
    table = parse_text(attributes.get(_NFTA_TABLE, b""))
    name = f"nftables flowtable {table} {parse_text(attributes.get(_NFTA_FLOWTABLE_NAME, b''))}"
    hook = parse_attributes(attributes.get(_NFTA_FLOWTABLE_HOOK, b""))
    return name, list(_devices(hook.get(_NFTA_FLOWTABLE_HOOK_DEVS, b"")))


def _devices(data: bytes) -> Iterator[tuple[str, bool]]:
    for kind, payload in iterate_attributes(data):
        yield parse_text(payload), kind == _NFTA_DEVICE_PREFIX
