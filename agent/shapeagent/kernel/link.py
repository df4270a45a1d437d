# SPDX-License-Identifier: Apache-2.0
"""Network devices: facts, segmentation-offload limits, and IFBs of our own."""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import re
import socket
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from shapeagent.kernel.rtnl import (
    NLM_F_CREATE,
    NLM_F_EXCL,
    RTM_DELLINK,
    RTM_GETLINK,
    RTM_NEWLINK,
    TC_H_ROOT,
    NetlinkRefusal,
    Rtnl,
    attribute,
    attribute_text,
    attribute_u32,
    iterate_attributes,
    named_error,
    nested,
    parse_attributes,
    parse_tc,
    parse_text,
    qdisc_bodies,
)
from shapeagent.model.errors import (
    ConflictError,
    FailedError,
    InputError,
    ShapeError,
    UnsupportedError,
)
from shapeagent.model.types import DeviceFacts, GsoLimits

NAME_MAX_BYTES = 15  # IFNAMSIZ - 1
ALTNAME_MAX_BYTES = 127  # ALTIFNAMSIZ - 1
IFB_ALIAS = "shapectl ingress of "
_IFB_PREFIX = "shpifb"
_IFB_TRIES = 8

_IFINFOMSG = struct.Struct("=BxHiII")  # family, ARPHRD type, index, flags, change
_IFF_UP = 1
_IFF_LOWER_UP = 0x10000
_ARPHRD_WITH_HEADER = (1, 772)  # ETHER, LOOPBACK: a 14-byte link-layer header
_IFLA_IFNAME = 3
_IFLA_MTU = 4
_IFLA_LINKINFO = 18
_IFLA_IFALIAS = 20
_IFLA_STATS64 = 23
_IFLA_NUM_TX_QUEUES = 31
_IFLA_NUM_RX_QUEUES = 32
_IFLA_GSO_MAX_SEGS = 40
_IFLA_GSO_MAX_SIZE = 41
_IFLA_XDP = 43
_IFLA_PROP_LIST = 52
_IFLA_ALT_IFNAME = 53
_IFLA_GSO_IPV4_MAX_SIZE = 63
_IFLA_XDP_PROG_ID = 4
_IFLA_INFO_KIND = 1
_IFLA_INFO_DATA = 2
_IFLA_VLAN_EGRESS_QOS = 3

# IFLA_AF_SPEC > AF_INET6 > IFLA_INET6_ADDR_GEN_MODE = IN6_ADDR_GEN_MODE_NONE
_NO_IPV6_ADDRESS = nested(26, nested(socket.AF_INET6, attribute(8, b"\1")))

_SIOCETHTOOL = 0x8946
_ETHTOOL_GSET = 1
_ETHTOOL_CMD = struct.Struct("=IIIHBBBBBBIIHBBI8x")  # struct ethtool_cmd
_SPEED_UNKNOWN = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class LinkIdentity:
    """Under which names and index a device is known."""

    name: str
    index: int
    altnames: tuple[str, ...]
    alias: str


def check_device_name(name: str) -> None:
    """Return when `name` can be the name or alternative name of a device.

    Raises: InputError bad-device-name, before anything is asked of the kernel.
    Source: dev_valid_name() in net/core/dev.c. We also refuse what is not
        printable ASCII: such a name cannot be typed back safely.
    """
    problem = ""
    if not name:
        problem = "is empty"
    elif name in (".", ".."):
        problem = "is a folder"
    elif not re.fullmatch(r"[!-~]+", name):
        problem = "has a space or a character that is not printable ASCII"
    elif "/" in name or ":" in name:
        problem = "has a '/' or ':'"
    elif len(name) > ALTNAME_MAX_BYTES:
        problem = f"is longer than {ALTNAME_MAX_BYTES} bytes"
    if problem:
        raise InputError(
            "bad-device-name",
            f"Device name {name!r} {problem}.",
            hint="Give a name as `ip -br link` prints it.",
        )


def list_devices(rtnl: Rtnl) -> tuple[LinkIdentity, ...]:
    """Return all devices of the socket's namespace."""
    try:
        bodies = rtnl.dump(RTM_GETLINK, _IFINFOMSG.pack(0, 0, 0, 0, 0))
    except OSError as error:
        raise named_error(error, "list the network devices") from error
    return tuple(_parse_identity(body) for body in bodies)


def read_device(rtnl: Rtnl, name: str) -> DeviceFacts:
    """Return the facts about a device, found by name or alternative name.

    Raises: InputError bad-device-name, no-such-device (names near ones).
    """
    check_device_name(name)
    kind = _IFLA_IFNAME if len(name) <= NAME_MAX_BYTES else _IFLA_ALT_IFNAME
    for attribute_kind in dict.fromkeys((kind, _IFLA_ALT_IFNAME)):
        question = _IFINFOMSG.pack(0, 0, 0, 0, 0) + attribute_text(attribute_kind, name)
        try:
            return _parse_facts(rtnl, rtnl.get(RTM_GETLINK, question))
        except NetlinkRefusal as error:
            if error.errno not in (errno.ENODEV, errno.EINVAL, errno.ERANGE):
                raise named_error(error, "read the device", name) from error
    known = [other for link in list_devices(rtnl) for other in (link.name, *link.altnames)]
    import difflib

    near = difflib.get_close_matches(name, known, n=3) or sorted(known)[:8]
    if len(name) > NAME_MAX_BYTES:
        raise InputError(
            "bad-device-name",
            f"Device name {name!r} is longer than {NAME_MAX_BYTES} bytes and no alternative name.",
            hint=f"There are: {', '.join(near)}.",
        )
    raise InputError(
        "no-such-device", f"There is no device {name!r}.", hint=f"There are: {', '.join(near)}."
    )


def read_device_by_index(rtnl: Rtnl, index: int) -> DeviceFacts:
    """Return the facts about the device of that index.

    Raises: FailedError interface-gone.
    """
    return _parse_facts(rtnl, _read_link(rtnl, index))


def read_gso(rtnl: Rtnl, index: int) -> GsoLimits:
    """Return the segmentation-offload limits of a device.

    Raises: FailedError interface-gone.
    """
    attributes = parse_attributes(_read_link(rtnl, index)[_IFINFOMSG.size :])
    ipv4 = attributes.get(_IFLA_GSO_IPV4_MAX_SIZE)
    return GsoLimits(
        max_size_bytes=_u32(attributes, _IFLA_GSO_MAX_SIZE, 65536),
        max_segments=_u32(attributes, _IFLA_GSO_MAX_SEGS, 65535),
        ipv4_max_size_bytes=None if ipv4 is None else int(struct.unpack_from("=I", ipv4)[0]),
    )


def read_xdp(rtnl: Rtnl, index: int) -> int:
    """Return the id of the XDP program of a device, 0 where it has none.

    Raises: FailedError interface-gone.
    """
    attributes = parse_attributes(_read_link(rtnl, index)[_IFINFOMSG.size :])
    return _u32(parse_attributes(attributes.get(_IFLA_XDP, b"")), _IFLA_XDP_PROG_ID, 0)


def read_traffic(rtnl: Rtnl, index: int) -> tuple[int, int]:
    """Return the bytes that a device has sent and received, headers included.

    Raises: FailedError interface-gone.
    """
    stats = parse_attributes(_read_link(rtnl, index)[_IFINFOMSG.size :]).get(_IFLA_STATS64)
    if stats is None:
        return 0, 0
    received, sent = struct.unpack_from("=QQ", stats, 16)  # after the packets of both
    return sent, received


def set_gso(rtnl: Rtnl, index: int, limits: GsoLimits) -> None:
    """Return when the device has these limits, read back.

    All three go in one message: setting the first lowers the IPv4 one with it
    (6.3 and later), and the kernel takes them in this order.

    Raises: FailedError interface-gone, gso-refused, readback-differs.
    Effects: new packets of local sockets are at most this large; living TCP
        flows follow after `routes.reroute_ipv4`.
    Undo: the same with the limits that `read_gso` gave before.
    """
    parts = [
        attribute_u32(_IFLA_GSO_MAX_SIZE, limits.max_size_bytes),
        attribute_u32(_IFLA_GSO_MAX_SEGS, limits.max_segments),
    ]
    if limits.ipv4_max_size_bytes is not None:
        parts.append(attribute_u32(_IFLA_GSO_IPV4_MAX_SIZE, limits.ipv4_max_size_bytes))
    try:
        rtnl.request(RTM_NEWLINK, 0, _IFINFOMSG.pack(0, 0, index, 0, 0) + b"".join(parts))
    except NetlinkRefusal as error:
        if error.errno in (errno.EINVAL, errno.ERANGE):
            raise FailedError(
                "gso-refused",
                f"The kernel refused gso_max_size {limits.max_size_bytes} and gso_max_segs "
                f"{limits.max_segments} on device {index}: {error.strerror}.",
                hint="Use --segment-limit off, or a larger number of bytes.",
            ) from error
        raise named_error(error, "set the segment limit", f"device {index}") from error
    found = read_gso(rtnl, index)
    if found != limits:
        raise FailedError(
            "readback-differs",
            f"Segment limits of device {index}: got {found}, want {limits}.",
            hint="Someone else sets them too; see `ip -d link show`.",
        )


def derive_ifb_name(device: str, taken: Collection[str]) -> str:
    """Return a name for the IFB of `device`: at most 15 bytes, hashed, none of `taken`.

    Raises: ConflictError ifb-names-taken.
    """
    for name in _ifb_names(device):
        if name not in taken:
            return name
    raise ConflictError(
        "ifb-names-taken",
        f"All {_IFB_TRIES} names for the IFB of {device} are taken.",
        hint="See `ip link show type ifb` and delete those that are not in use.",
    )


def _ifb_names(device: str) -> list[str]:
    import hashlib

    digests = (
        hashlib.sha256(f"{device}\0{salt}".encode()).hexdigest() for salt in range(_IFB_TRIES)
    )
    return [f"{_IFB_PREFIX}{digest[:9]}" for digest in digests]


def create_ifb(rtnl: Rtnl, device: str, *, queues: int = 1) -> DeviceFacts:
    """Return a new IFB that is up, named after `device` and marked as ours by its alias.

    It has no IPv6 address, so that it sends no solicitations through the tree.

    Raises: UnsupportedError ifb-missing; ConflictError ifb-names-taken.
    Undo: `delete_ifb`.
    """
    taken = {other for link in list_devices(rtnl) for other in (link.name, *link.altnames)}
    while True:
        name = derive_ifb_name(device, taken)
        body = (
            _IFINFOMSG.pack(0, 0, 0, 0, 0)
            + attribute_text(_IFLA_IFNAME, name)
            + attribute_u32(_IFLA_NUM_TX_QUEUES, queues)
            + attribute_u32(_IFLA_NUM_RX_QUEUES, queues)
            + nested(_IFLA_LINKINFO, attribute_text(_IFLA_INFO_KIND, "ifb"))
        )
        try:
            rtnl.request(RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, body)
            break
        except NetlinkRefusal as error:
            if error.errno == errno.EEXIST:
                taken.add(name)
                continue
            if error.errno == errno.EOPNOTSUPP:
                raise UnsupportedError(
                    "ifb-missing",
                    f"The kernel has no IFB device: {error.strerror}.",
                    hint="Use --ingress police, or load the module: modprobe ifb numifbs=0",
                ) from error
            raise named_error(error, "create the IFB", name) from error
    facts = read_device(rtnl, name)
    body = _IFINFOMSG.pack(0, 0, facts.index, 0, 0)
    try:
        mark_ifb(rtnl, facts.index, device)
        with contextlib.suppress(NetlinkRefusal):  # no IPv6 here: nothing to silence
            rtnl.request(RTM_NEWLINK, 0, body + _NO_IPV6_ADDRESS)
        set_up(rtnl, facts.index)
    except (OSError, ShapeError) as error:
        rtnl.request(RTM_DELLINK, 0, body)
        if isinstance(error, ShapeError):
            raise
        raise named_error(error, "mark the IFB", name) from error
    return read_device_by_index(rtnl, facts.index)


def mark_ifb(rtnl: Rtnl, index: int, device: str) -> None:
    """Return when an IFB of ours says that it is the one of `device`, which has a new name.

    Raises: FailedError interface-gone.
    """
    body = _IFINFOMSG.pack(0, 0, index, 0, 0)
    try:
        rtnl.request(RTM_NEWLINK, 0, body + attribute_text(_IFLA_IFALIAS, IFB_ALIAS + device))
    except OSError as error:
        raise named_error(error, "mark the IFB", f"device {index}") from error


def find_ifbs(rtnl: Rtnl, device: str) -> tuple[LinkIdentity, ...]:
    """Return the IFBs that `create_ifb` made for `device`.

    By the alias; by the name where the maker was killed before it could write one.
    """
    wanted, names = IFB_ALIAS + device, _ifb_names(device)
    return tuple(
        link
        for link in list_devices(rtnl)
        if link.alias == wanted or (not link.alias and link.name in names)
    )


def is_ifb_of_ours(rtnl: Rtnl, device: LinkIdentity) -> bool:
    """Return whether a device is an IFB with a name of the form that `create_ifb` gives."""
    if not re.fullmatch(rf"{_IFB_PREFIX}[0-9a-f]{{9}}", device.name):
        return False
    try:
        answer = _read_link(rtnl, device.index)
    except ShapeError:
        return False  # it went away meanwhile
    return _parse_linkinfo(parse_attributes(answer[_IFINFOMSG.size :]))[0] == "ifb"


def delete_ifb(rtnl: Rtnl, index: int) -> bool:
    """Return True when an IFB of ours was deleted, False when it was gone already.

    Remove the redirecting filter first: without its IFB it loses every packet.

    Raises: ConflictError ifb-not-ours.
    """
    body = _IFINFOMSG.pack(0, 0, index, 0, 0)
    try:
        answer = rtnl.get(RTM_GETLINK, body)
    except NetlinkRefusal as error:
        if error.errno == errno.ENODEV:
            return False
        raise named_error(error, "read the IFB", f"device {index}") from error
    identity = _parse_identity(answer)
    kind, _ = _parse_linkinfo(parse_attributes(answer[_IFINFOMSG.size :]))
    unmarked = not identity.alias and identity.name.startswith(_IFB_PREFIX)
    if kind != "ifb" or not (unmarked or identity.alias.startswith(IFB_ALIAS)):
        raise ConflictError(
            "ifb-not-ours",
            f"Device {identity.name} ({kind or 'hardware'}) is no IFB of ours: left alone.",
            hint=f"See `ip -d link show {identity.name}`.",
        )
    try:
        rtnl.request(RTM_DELLINK, 0, body)
    except NetlinkRefusal as error:
        if error.errno == errno.ENODEV:
            return False
        raise named_error(error, "delete the IFB", identity.name) from error
    return True


def set_up(rtnl: Rtnl, index: int) -> None:
    """Return when the device is up. Raises: FailedError interface-gone."""
    try:
        rtnl.request(RTM_NEWLINK, 0, _IFINFOMSG.pack(0, 0, index, _IFF_UP, _IFF_UP))
    except OSError as error:
        raise named_error(error, "bring the device up", f"device {index}") from error


def _read_link(rtnl: Rtnl, index: int) -> bytes:
    try:
        return rtnl.get(RTM_GETLINK, _IFINFOMSG.pack(0, 0, index, 0, 0))
    except OSError as error:
        raise named_error(error, "read the device", f"device {index}") from error


def _u32(attributes: dict[int, bytes], kind: int, default: int) -> int:
    payload = attributes.get(kind)
    return default if payload is None else int(struct.unpack_from("=I", payload)[0])


def _parse_identity(body: bytes) -> LinkIdentity:
    _, _, index, _, _ = _IFINFOMSG.unpack_from(body)
    attributes = parse_attributes(body[_IFINFOMSG.size :])
    return LinkIdentity(
        name=parse_text(attributes.get(_IFLA_IFNAME, b"")),
        index=index,
        altnames=tuple(_altnames(attributes)),
        alias=parse_text(attributes.get(_IFLA_IFALIAS, b"")),
    )


def _altnames(attributes: dict[int, bytes]) -> Iterator[str]:
    for kind, payload in iterate_attributes(attributes.get(_IFLA_PROP_LIST, b"")):
        if kind == _IFLA_ALT_IFNAME:
            yield parse_text(payload)


def _parse_linkinfo(attributes: dict[int, bytes]) -> tuple[str, dict[int, bytes]]:
    info = parse_attributes(attributes.get(_IFLA_LINKINFO, b""))
    data = parse_attributes(info.get(_IFLA_INFO_DATA, b""))
    return parse_text(info.get(_IFLA_INFO_KIND, b"")), data


def _parse_facts(rtnl: Rtnl, body: bytes) -> DeviceFacts:
    _, hardware_type, index, flags, _ = _IFINFOMSG.unpack_from(body)
    attributes = parse_attributes(body[_IFINFOMSG.size :])
    kind, data = _parse_linkinfo(attributes)
    name = parse_text(attributes.get(_IFLA_IFNAME, b""))
    ipv4 = attributes.get(_IFLA_GSO_IPV4_MAX_SIZE)
    return DeviceFacts(
        name=name,
        index=index,
        kind=kind,
        l3_only=hardware_type not in _ARPHRD_WITH_HEADER,
        mtu=_u32(attributes, _IFLA_MTU, 1500),
        tx_queues=_u32(attributes, _IFLA_NUM_TX_QUEUES, 1),
        up=bool(flags & _IFF_UP),
        # Only hardware knows its speed: veth, tun and bridge invent one.
        speed_bits_per_s=None if kind else _read_speed(rtnl, name),
        gso_max_size=_u32(attributes, _IFLA_GSO_MAX_SIZE, 65536),
        gso_max_segs=_u32(attributes, _IFLA_GSO_MAX_SEGS, 65535),
        gso_ipv4_max_size=None if ipv4 is None else int(struct.unpack_from("=I", ipv4)[0]),
        hardware_classes=_read_hardware_classes(rtnl, name, index),
        egress_qos_map=kind == "vlan" and bool(data.get(_IFLA_VLAN_EGRESS_QOS)),
        carrier=bool(flags & _IFF_LOWER_UP),
    )


def _read_speed(rtnl: Rtnl, name: str) -> int | None:
    """Return the speed that the driver reports in bits per second, None where it has none.

    The ioctl goes to the netlink socket: it asks in that socket's namespace.
    """
    command = array.array("B", struct.pack("=I", _ETHTOOL_GSET) + bytes(_ETHTOOL_CMD.size - 4))
    address, _ = command.buffer_info()
    request = struct.pack("@16sP16x", name.encode(), address)
    try:
        fcntl.ioctl(rtnl.raw.fileno(), _SIOCETHTOOL, request)
    except OSError:
        return None  # no driver support: as good as unknown
    fields = _ETHTOOL_CMD.unpack(command.tobytes())
    megabits = int(fields[3]) | int(fields[12]) << 16
    return None if megabits in (0, 0xFFFF, _SPEED_UNKNOWN) else megabits * 1_000_000


def _read_hardware_classes(rtnl: Rtnl, name: str, index: int) -> int:
    """Return the number of hardware traffic classes: from an mqprio root, else from sysfs.

    A driver that sets them for DCB shows them only in sysfs, and sysfs shows
    only the namespace it was mounted in: elsewhere mqprio is all we can see.
    """
    try:
        bodies = qdisc_bodies(rtnl, index)
    except OSError as error:
        raise named_error(error, "list the qdiscs", name) from error
    for message in map(parse_tc, bodies):
        if message.parent == TC_H_ROOT and message.kind == "mqprio":
            return message.options[0] if message.options else 0
    folder = Path("/sys/class/net", name)
    try:
        if int((folder / "ifindex").read_text()) != index:
            return 0
        texts = [path.read_text() for path in folder.glob("queues/tx-*/traffic_class")]
    except (OSError, ValueError):
        return 0  # no multi-queue device, or none in this sysfs
    highest = max((int(text.split("-")[0]) for text in texts if text.strip()), default=0)
    return highest + 1 if highest > 0 else 0


def create_scratch(rtnl: Rtnl, name: str, *, queues: int, index: int = 0) -> int:
    """Return the index of a new device to try things on: a dummy, an IFB or a veth.

    Args:
        index: which index it gets; 0 lets the kernel choose.
    Raises: UnsupportedError scratch-missing where the kernel has none of them.
    Effects: a device that is down, in the socket's namespace (use a private one).
    """
    for kind in ("dummy", "ifb", "veth"):
        body = (
            _IFINFOMSG.pack(0, 0, index, 0, 0)
            + attribute_text(_IFLA_IFNAME, name)
            + attribute_u32(_IFLA_NUM_TX_QUEUES, queues)
            + nested(_IFLA_LINKINFO, attribute_text(_IFLA_INFO_KIND, kind))
        )
        try:
            rtnl.request(RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, body)
        except NetlinkRefusal as error:
            if error.errno == errno.EOPNOTSUPP:
                continue
            raise named_error(error, "create a scratch device", name) from error
        return read_device(rtnl, name).index
    raise UnsupportedError(
        "scratch-missing",
        "The kernel has no dummy, IFB or veth device to try qdiscs on.",
        hint="Load one: modprobe dummy",
    )
