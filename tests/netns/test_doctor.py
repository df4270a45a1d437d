# SPDX-License-Identifier: Apache-2.0
"""`shapectl doctor` on real devices: what it sees, and that nobody sees it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from enginekit import (
    Bench,
    add_bpf_filter,
    environment,
    load_counter,
    loaded_programs,
    shapectl,
    wait_until,
)
from netlab import VethPair, ip, tc

from shapeagent.kernel import bpf, hostfacts
from shapeagent.model.errors import InputError
from shapeagent.model.reports import Finding
from shapeagent.model.types import Direction
from shapeagent.policy.doctor import kernel_version
from shapeagent.service import doctor

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
]

_LIMIT_S = 0.5
_QUIET_START_S = 0.05  # `python -c pass` on an idle development machine, rounded up
_RUNS = 5


def findings(netns: str, device: str | None = None) -> dict[str, Finding]:
    return {one.id: one for one in doctor.examine(device, netns=netns).findings}


def host_wide() -> dict[str, Any]:
    """Return what doctor could have changed outside its namespace.

    Not what others on the machine change meanwhile: only modules, mounts, and files of ours.
    """
    modules = Path("/proc/modules")
    loaded = modules.read_text().splitlines() if modules.exists() else []
    folders = (Path("/var/cache/shapectl"), Path("/run/shapectl"), Path("/sys/fs/bpf/shapectl"))
    return {
        "modules": sorted(line.split()[0] for line in loaded),
        "bpffs": hostfacts.read_host().bpffs,
        "folders": [folder.exists() and folder.stat().st_mtime_ns for folder in folders],
    }


def doctor_programs() -> list[int]:
    """Return the ids of the programs that doctor loads to see whether it can."""
    found = []
    for number in loaded_programs():
        with contextlib.suppress(FileNotFoundError):
            descriptor = bpf.program_by_id(number)
            try:
                if bpf.program_facts(descriptor).name == "shp_doctor":
                    found.append(number)
            finally:
                os.close(descriptor)
    return found


@pytest.mark.host
def test_doctor_changes_nothing(bench: Callable[..., Bench]) -> None:
    one = bench(queues=2)
    before, wide = one.host_state(), host_wide()
    for words in ((), (one.device,), (one.device, "--json")):
        ran = shapectl("--netns", one.netns, "doctor", *words)
        assert ran.code in (0, 1), f"got exit {ran.code}: {ran.err}"
        assert ran.err == "", f"got {ran.err} on stderr, want nothing"
    assert one.host_state() == before
    assert host_wide() == wide
    wait_until(lambda: not doctor_programs(), "the programs of doctor to be freed")


@pytest.mark.host
@pytest.mark.rates
def test_doctor_takes_half_a_second(bench: Callable[..., Bench]) -> None:
    """The best of five; a machine that starts Python slower than usual gets as much more."""
    one = bench()

    def best(*words: str) -> float:
        spent = []
        for _ in range(_RUNS):
            started_s = time.monotonic()
            subprocess.run(
                [sys.executable, *words], env=environment(), capture_output=True, check=False
            )
            spent.append(time.monotonic() - started_s)
        return min(spent)

    start_s = best("-c", "pass")
    limit_s = _LIMIT_S * max(1.0, start_s / _QUIET_START_S)
    took_s = best("-m", "shapectl", "--netns", one.netns, "doctor", one.device)
    assert took_s <= limit_s, f"got {took_s:.3f} s, want {limit_s:.3f} (python: {start_s:.3f} s)"


def test_kernel_is_asked_and_answers(bench: Callable[..., Bench]) -> None:
    one = bench(queues=3)
    found = findings(one.netns, one.device)
    for identity in ("kernel", "capabilities", "bpf", "jit", "bpffs", "programs"):
        assert found[identity].severity == "ok", f"got {found.get(identity)}"
    assert found["queues"].what == "3 transmit, 3 receive", f"got {found['queues']}"
    assert "htb" in found["qdiscs"].what, f"got {found['qdiscs']}, want htb: attach uses it here"
    offloads = found.get("offloads") or found["gro-off"]
    assert "tso on, gso on" in offloads.what, f"got {offloads}"
    assert found["link-rate-unknown"].what.startswith("d0 (veth)"), "a veth invents its speed"
    assert "gso-large" not in found, f"got {found['gso-large']}, want no time at an invented speed"
    if kernel_version(os.uname().release) >= (6, 13):
        assert found["lpm-trie"].severity == "ok", f"got {sorted(found)}, want C73's fix seen"


def test_owners_of_a_device_are_named(bench: Callable[..., Bench]) -> None:
    one = bench()
    tc("qdisc", "add", "dev", one.device, "root", "handle", "7:", "htb", netns=one.netns)
    tc("qdisc", "add", "dev", one.device, "clsact", netns=one.netns)
    program, counter = load_counter()
    try:
        add_bpf_filter(one.netns, one.device, Direction.EGRESS, program, pref=3)
        found = findings(one.netns, one.device)
        assert '"htb 7:"' in found["root-qdisc-foreign"].what, f"got {found['root-qdisc-foreign']}"
        assert "foreign" in found["filters-shared"].what, f"got {found['filters-shared']}"
        assert "programs" not in found
    finally:
        os.close(program)
        os.close(counter)
        tc("qdisc", "del", "dev", one.device, "clsact", netns=one.netns)
        tc("qdisc", "del", "dev", one.device, "root", netns=one.netns)
    tc("qdisc", "add", "dev", one.device, "ingress", netns=one.netns)
    found = findings(one.netns, one.device)
    assert found["ingress-qdisc-foreign"].severity == "error"
    tc("qdisc", "del", "dev", one.device, "ingress", netns=one.netns)


def test_what_shapectl_set_is_not_foreign(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = bench()
    monkeypatch.setattr(doctor, "RUN_DIR", one.engine.run_dir)
    one.attach()
    found = findings(one.netns, one.device)
    assert found["attached"].severity == "ok", f"got {sorted(found)}"
    assert not {"root-qdisc-foreign", "filters-shared", "filter-slot-foreign"} & set(found)
    one.engine.detach(one.device)
    assert "attached" not in findings(one.netns, one.device)


@pytest.mark.host
@pytest.mark.parametrize("name", ["eth0.100.200", "abcdefghijklmno", "a-b_c.d"])
def test_names_with_dots_and_fifteen_characters(
    veth_pair: Callable[..., VethPair], name: str
) -> None:
    pair = veth_pair()
    ip("link", "set", pair.device, "down", netns=pair.netns)
    ip("link", "set", pair.device, "name", name, netns=pair.netns)
    ip("link", "property", "add", "dev", name, "altname", "alternative-name-of-a-device",
       netns=pair.netns)  # fmt: skip
    for word in (name, "alternative-name-of-a-device"):
        report = doctor.examine(word, netns=pair.netns)
        assert report.device == name, f"got {report.device} for {word}"
        ids = {one.id for one in report.findings if one.subject == name}
        assert {"link-down", "mtu", "queues"} <= ids, f"got {ids}"


def test_bridge_and_its_ports_are_placed(veth_pair: Callable[..., VethPair]) -> None:
    pair = veth_pair()
    try:
        ip("link", "add", "br0.x", "type", "bridge", netns=pair.netns)
    except AssertionError as error:
        pytest.skip(f"this kernel makes no bridge: {error}")
    ip("link", "set", pair.device, "master", "br0.x", netns=pair.netns)
    found = findings(pair.netns, "br0.x")
    assert found["placement-bridge"].fix == f"shapectl attach {pair.device}"
    assert findings(pair.netns, pair.device)["placement-port"].what.endswith("bridge br0.x.")


@pytest.mark.host
def test_unknown_device_and_namespace_are_named(bench: Callable[..., Bench]) -> None:
    one = bench()
    ran = shapectl("--netns", one.netns, "doctor", "d9")
    assert ran.code == 2, f"got exit {ran.code}"
    assert ran.err.startswith("error: no-such-device\n"), f"got {ran.err}"
    with pytest.raises(InputError) as caught:
        doctor.examine("d0", netns="shp-not-there")
    assert caught.value.reference == "no-such-netns"


@pytest.mark.host
def test_without_privilege_it_says_what_it_could_not_see(bench: Callable[..., Bench]) -> None:
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv (util-linux) is not installed")
    one = bench()
    prefix = ("ip", "netns", "exec", one.netns, "setpriv", "--reuid", "65534", "--clear-groups",
              "--bounding-set=-all")  # fmt: skip
    ran = shapectl("doctor", one.device, "--json", prefix=prefix)
    assert ran.code in (0, 1), f"got exit {ran.code}: {ran.out}{ran.err}"
    found = {each["id"]: each for each in json.loads(ran.out)["findings"]}
    assert found["capabilities-missing"]["severity"] == "warning"
    assert "CAP_NET_ADMIN" in found["capabilities-missing"]["what"]
    assert found["programs-unknown"]["subject"] == one.device
    assert "bpf-refused" not in found, "a missing privilege is no fault of the kernel"
    assert "queues" in found


@pytest.mark.host
def test_sysfs_of_another_namespace_is_not_believed(bench: Callable[..., Bench]) -> None:
    """`nsenter --net` leaves /sys as it was, and without privilege no other can be opened."""
    for tool in ("setpriv", "nsenter"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} (util-linux) is not installed")
    one = bench(queues=2)
    prefix = ("nsenter", f"--net=/run/netns/{one.netns}", "setpriv", "--reuid", "65534",
              "--clear-groups", "--bounding-set=-all")  # fmt: skip
    out = json.loads(shapectl("doctor", one.device, "--json", prefix=prefix).out)
    found = {each["id"]: each for each in out["findings"]}
    assert f"/sys/class/net/{one.device}" in out["unseen"], f"got {out['unseen']}"
    assert found["queues"]["what"] == "2 transmit, 2 receive", f"got {found['queues']}"
    assert "placement-unknown" in found, "what is not seen is not called well"
    subjects = {
        each["subject"]
        for each in json.loads(shapectl("doctor", "--json", prefix=prefix).out)["findings"]
    }
    assert subjects == {"host"}, f"got {subjects}, want no device of the host's namespace"


@pytest.mark.host
def test_nothing_heavy_is_loaded(bench: Callable[..., Bench]) -> None:
    """bcc is found without its 73 MB."""
    one = bench()
    script = (
        "import sys; from shapectl.cli import main; main(sys.argv[1:]);"
        "print('modules:', *sorted(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "--netns", one.netns, "doctor", one.device],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    loaded = done.stdout.rpartition("modules:")[2].split()
    heavy = [name for name in ("bcc", "pyroute2", "pydantic", "rich") if name in loaded]
    assert heavy == [], f"got {heavy} loaded"


@pytest.mark.vm
def test_asking_what_the_kernel_has_loads_no_module(bench: Callable[..., Bench]) -> None:
    """A qdisc that is a module is told by its file, and not added to anything."""
    one = bench()
    names = ("sch_prio", "sch_tbf", "sch_fq", "act_mirred", "ifb", "dummy")
    for name in names:
        subprocess.run(["modprobe", "-r", name], check=False, capture_output=True, timeout=60)
    before = host_wide()
    assert "sch_prio" not in before["modules"], "got sch_prio loaded, want not"
    ran = shapectl("--netns", one.netns, "doctor", one.device, "--json")
    after = host_wide()
    assert after == before, f"got {set(after['modules']) - set(before['modules'])} loaded"
    qdiscs = next(each for each in json.loads(ran.out)["findings"] if each["id"] == "qdiscs")
    assert "prio" in qdiscs["what"], f"got {qdiscs}, want the module on disk counted"


@pytest.mark.host
def test_state_of_another_namespace_is_not_mixed_in(veth_pair: Callable[..., VethPair]) -> None:
    """Two namespaces with a device of the same name: each sysfs is asked in its own."""
    one, other = veth_pair(queues=1), veth_pair(queues=4)
    assert one.device == other.device
    assert findings(one.netns, one.device)["queues"].what == "1 transmit, 1 receive"
    assert findings(other.netns, other.device)["queues"].what == "4 transmit, 4 receive"
