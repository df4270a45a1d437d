# SPDX-License-Identifier: Apache-2.0
"""`doctor`: look at the host and its devices, and say what is wrong. Changes nothing."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from shapeagent.kernel import hostfacts, link, livefacts
from shapeagent.kernel.compile import image_path, read_source
from shapeagent.kernel.netns import read_netns_cookie, run_in_netns
from shapeagent.kernel.rtnl import Rtnl
from shapeagent.kernel.sysfs import sysfs_of_this_namespace
from shapeagent.model.errors import ShapeError
from shapeagent.model.hostfacts import (
    DeviceAnswers,
    HostFacts,
    InterfaceFacts,
    KernelAnswers,
    TrafficSample,
)
from shapeagent.model.reports import DoctorReport, Finding, Severity
from shapeagent.model.types import DeviceFacts
from shapeagent.policy.doctor import examine_host
from shapeagent.policy.doctor_device import examine_device, examine_rdma, neighbours
from shapeagent.service.state import RUN_DIR

_RDMA_WINDOW_S = 0.1


@dataclass(frozen=True, slots=True)
class Sight:
    """Everything that was seen, before anything is judged."""

    host: HostFacts
    kernel: KernelAnswers = field(default_factory=KernelAnswers)
    interfaces: tuple[InterfaceFacts, ...] = ()
    answers: dict[str, DeviceAnswers] = field(default_factory=dict)
    first: TrafficSample = field(default_factory=lambda: TrafficSample(0.0))
    last: TrafficSample = field(default_factory=lambda: TrafficSample(0.0))


def examine(device: str | None = None, *, netns: str | None = None) -> DoctorReport:
    """Return what is wrong with the host, and with a device or every physical one.

    Raises: InputError bad-device-name, no-such-device, no-such-netns;
        PrivilegeError missing-capability, only to enter another namespace.
    """
    name, sight = run_in_netns(netns, lambda: look(device))
    return judge(sight, name, netns=netns)


def judge(sight: Sight, device: str | None = None, *, netns: str | None = None) -> DoctorReport:
    """Return the report about what was seen; pure."""
    known = {one.name: one for one in sight.interfaces}
    findings: list[Finding] = list(examine_host(sight.host, sight.kernel))
    for name in chosen(sight.interfaces, device):
        findings += examine_device(known[name], sight.answers.get(name), sight.host, known)
        findings += examine_rdma(sight.first, sight.last, name)
    if device is None:
        # RDMA devices without a network device of their own stand for themselves
        findings += [
            one for one in examine_rdma(sight.first, sight.last) if one.subject not in known
        ]
    return DoctorReport(
        device=device,
        netns=netns,
        errors=sum(one.severity is Severity.ERROR for one in findings),
        warnings=sum(one.severity is Severity.WARNING for one in findings),
        unseen=sight.host.unseen,
        findings=tuple(findings),
    )


def look(device: str | None) -> tuple[str | None, Sight]:
    """Return the device's own name and what is to be seen from this thread's namespace."""
    with Rtnl() as rtnl, sysfs_of_this_namespace() as sys_dir:
        # first, so that a wrong name costs nothing; an alternative name becomes the real one
        facts = link.read_device(rtnl, device) if device is not None else None
        name = facts.name if facts else None
        first = hostfacts.read_sample(sys_dir)
        host = hostfacts.read_host()
        kernel = livefacts.probe_kernel(
            host.modules, loads_modules=host.loads_modules, image_cached=_is_cached()
        )
        interfaces = _of_this_namespace(rtnl, hostfacts.read_interfaces(sys_dir, name))
        if facts is not None and name not in {one.name for one in interfaces}:
            host = dataclasses.replace(host, unseen=(*host.unseen, f"/sys/class/net/{name}"))
            interfaces = (_without_sysfs(facts),)
        answers = _answers(rtnl, interfaces, chosen(interfaces, name))
        last = first
        if first.ports:
            time.sleep(max(0.0, first.time_s + _RDMA_WINDOW_S - time.monotonic()))
            last = hostfacts.read_sample(sys_dir)
    return name, Sight(host, kernel, interfaces, answers, first, last)


def _of_this_namespace(
    rtnl: Rtnl, interfaces: Sequence[InterfaceFacts]
) -> tuple[InterfaceFacts, ...]:
    """Return those that netlink knows too: without privilege sysfs may be another namespace's."""
    known = {(one.name, one.index) for one in link.list_devices(rtnl)}
    return tuple(one for one in interfaces if (one.name, one.index) in known)


def _without_sysfs(facts: DeviceFacts) -> InterfaceFacts:
    """Return as much of a device as netlink says."""
    return InterfaceFacts(
        name=facts.name,
        index=facts.index,
        kind=facts.kind,
        hardware=False,
        driver="",
        up=facts.up,
        carrier=None,
        speed_bits_per_s=facts.speed_bits_per_s,
        mtu=facts.mtu,
        tx_queues=facts.tx_queues,
        rx_queues=facts.tx_queues,
        hardware_classes=facts.hardware_classes,
        byte_limits=None,
        tx_bytes=0,
        rx_missed=0,
        master="",
        lowers=(),
        uppers=(),
        placed=False,
    )


def chosen(interfaces: Sequence[InterfaceFacts], device: str | None) -> tuple[str, ...]:
    """Return the device, or all physical ones; those that are down only where all are."""
    if device is not None:
        return tuple(one.name for one in interfaces if one.name == device)
    physical = [one for one in interfaces if one.hardware]
    up = [one for one in physical if one.up]
    return tuple(one.name for one in up or physical)


def _answers(
    rtnl: Rtnl, interfaces: Sequence[InterfaceFacts], names: Sequence[str]
) -> dict[str, DeviceAnswers]:
    trees = livefacts.read_qdiscs(rtnl)
    cookie = read_netns_cookie(rtnl)
    known = {one.name: one for one in interfaces}
    found = {}
    for name in names:
        near = neighbours(known[name], known)
        try:
            facts = link.read_device(rtnl, name)
            found[name] = livefacts.answer_for(
                rtnl,
                facts,
                trees,
                attached=(RUN_DIR / f"{cookie}-{facts.index}").is_dir(),
                neighbours={one: known[one].index for one in near if one in known},
            )
        except ShapeError:
            continue  # it went away while we looked
    return found


def _is_cached() -> bool:
    """Return whether the classifier of this source is compiled already."""
    try:
        _, digest = read_source()
        return image_path(digest).is_file()
    except (ShapeError, OSError):
        return False
