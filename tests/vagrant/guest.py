# SPDX-License-Identifier: Apache-2.0
"""Runs inside the VM, as root: the README's promises about its NICs, with real traffic.

Prints a line per promise. Exit status 0, or 1 at the first that is broken.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PEER = "10.77.0.2"
IPERF_S = 8


def run(*words: str, want: int = 0, **environment: str) -> str:
    """Return what a command printed, both streams. Fails unless it exits with `want`."""
    done = subprocess.run(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == want, (
        f"got exit {done.returncode} from {' '.join(words)}, want {want}: {done.stdout}"
    )
    return done.stdout


def say(text: str) -> None:
    print(f"  ok  {text}", flush=True)


def check_nics() -> None:
    links = {one["ifname"]: one for one in json.loads(run("ip", "-j", "address"))}
    assert set(links) == {"lo", "mgmt0", "eth0"}, f"got {sorted(links)}, want lo, mgmt0, eth0"
    lines = run("ethtool", "eth0")
    assert "Speed: 100Mb/s" in lines, f"got {lines}, want 100 Mbit/s"
    driver = run("ethtool", "-i", "eth0")
    assert "driver: virtio_net" in driver, f"got {driver}, want a virtio NIC"
    own = [one["local"] for one in links["eth0"]["addr_info"] if one["family"] == "inet"]
    assert own == ["10.77.0.1"], f"got {own} on eth0, want 10.77.0.1 and nothing from DHCP"
    dynamic = [one for one in links["mgmt0"]["addr_info"] if one.get("dynamic")]
    defaults = [one["dev"] for one in json.loads(run("ip", "-j", "route", "show", "default"))]
    assert defaults == ["mgmt0"], f"got default routes by {defaults}, want mgmt0 alone"
    # RX of the far NIC shows that packets leave by one emulated NIC and come in by the other.
    before = peer_packets()
    run("ping", "-c", "5", "-i", "0.2", "-W", "5", PEER)
    assert peer_packets() >= before + 5, "got no packets at peer0, want the pings"
    say(
        f"eth0 is a virtio NIC of 100 Mbit/s, cabled to peer0; mgmt0 has the default route"
        f"{' and a DHCP address' if dynamic else ''}"
    )
    total_kib = int(re.findall(r"MemTotal: +(\d+)", Path("/proc/meminfo").read_text())[0])
    assert total_kib > 1_800_000, f"got {total_kib} KiB of memory, want 2 GB less the kernel's"
    headers = Path(f"/usr/src/linux-headers-{os.uname().release}/include/generated/autoconf.h")
    assert headers.is_file(), f"got no {headers}, want the headers of the kernel that runs"
    say(f"Linux {os.uname().release}, {os.cpu_count()} CPUs, {total_kib // 1024} MiB")


def peer_packets() -> int:
    found = json.loads(run("ip", "-n", "peer", "-j", "-s", "link", "show", "peer0"))
    return int(found[0]["stats64"]["rx"]["packets"])


def check_management() -> None:
    before = run("tc", "qdisc", "show")
    text = run("shapectl", "attach", "mgmt0", "--link-rate", "1gbit", want=5)
    assert "error: management-device" in text, f"got {text}"
    plan = ("shapectl", "attach", "mgmt0", "--link-rate", "1gbit", "--dry-run")
    text = run(*plan, "--yes-management")
    assert "management name (mgmt0)" in text, f"got {text}, want a warning that says why"
    say("attaching to mgmt0 is refused (management-device, exit 5) without --yes-management")
    text = run(
        "shapectl", "attach", "eth0", "--dry-run", want=5, SSH_CONNECTION=f"{PEER} 1 10.77.0.1 22"
    )
    assert "carries your SSH session" in text, f"got {text}"
    assert run("tc", "qdisc", "show") == before, "got changed qdiscs, want them as they were"
    say("so is eth0 for someone who is logged in by it, since mgmt0 is there")


def iperf() -> float:
    """Return the Mbit/s that arrived at the peer, and ping beside it."""
    server = subprocess.Popen(
        ["ip", "netns", "exec", "peer", "iperf3", "-s", "-1", "--forceflush"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        deadline_s = time.monotonic() + 30
        while "listening" not in server.stdout.readline():
            assert time.monotonic() < deadline_s, "got no iperf3 server after 30 s"
        out = run("iperf3", "-J", "-c", PEER, "-P", "4", "-t", str(IPERF_S))
        end: dict[str, Any] = json.loads(out)["end"]
        return float(end["sum_received"]["bits_per_second"]) / 1e6
    finally:
        server.kill()
        server.wait()


def pinged_iperf() -> tuple[float, str]:
    ping = subprocess.Popen(
        ["ping", "-q", "-i", "0.2", "-c", str(4 * IPERF_S), "-W", "5", PEER],
        stdout=subprocess.PIPE,
        text=True,
    )
    mbit = iperf()
    out, _ = ping.communicate(timeout=120)
    found = re.search(r"= ([\d.]+)/([\d.]+)/([\d.]+)/", out)
    assert found is not None, f"got {out}, want a round-trip line"
    return mbit, f"ping min/avg/max {found[1]}/{found[2]}/{found[3]} ms"


def check_attach() -> None:
    before = run("tc", "qdisc", "show", "dev", "eth0")
    features = run("ip", "-d", "link", "show", "eth0")
    mbit, ping = pinged_iperf()
    say(f"without shapectl: bulk {mbit:.0f} Mbit/s, {ping}")
    began = time.monotonic()
    run("shapectl", "attach", "eth0")
    say(f"shapectl attach eth0 ({time.monotonic() - began:.1f} s)")
    try:
        mbit, ping = pinged_iperf()
        assert mbit <= 100, f"got {mbit:.1f} Mbit/s through eth0, want at most the link's 100"
        status = json.loads(run("shapectl", "status", "eth0", "--json"))
        classes = status["interfaces"][0]["classes"]
        packets = {one["name"]: one["packets"] for one in classes if one["direction"] == "egress"}
        assert sum(packets.values()) > 1000, f"got {packets}, want the traffic counted"
        say(f"with shapectl: bulk {mbit:.0f} Mbit/s, {ping}; egress packets {packets}")
    finally:
        text = run("shapectl", "detach", "eth0")
    after = run("tc", "qdisc", "show", "dev", "eth0")
    assert after == before, f"got {after} after detach, want {before}"
    assert run("ip", "-d", "link", "show", "eth0") == features, "got other link settings"
    pins = Path("/sys/fs/bpf/shapectl")
    left = sorted(path.name for path in pins.iterdir()) if pins.exists() else []
    assert not left, f"got pins {left} after detach, want none"
    say(text.strip())


def main() -> int:
    """Return the exit status."""
    try:
        check_nics()
        check_management()
        check_attach()
    except AssertionError as error:
        print(f"FAIL  {error}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
