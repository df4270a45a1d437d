# SPDX-License-Identifier: Apache-2.0
"""Faked trees of /proc, /sys, /etc and /usr, one for each kind of host that doctor meets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shapeagent.kernel.hostfacts import MODULES, read_host, read_interfaces, read_sample
from shapeagent.model.hostfacts import (
    BpfProbe,
    DeviceAnswers,
    KernelAnswers,
    Offloads,
    Ring,
)
from shapeagent.service.doctor import Sight, chosen

GBIT = 1_000_000_000
ALL_CAPABILITIES = 0x1FFFFFFFFFF
ALL_QDISCS = frozenset({"clsact", "htb", "tbf", "prio", "fq", "fq_codel"})
WORKING_BPF = BpfProbe(refusal="", jited=True, full_trie_updates=True)
PLAIN_OFFLOADS = Offloads(tso=True, gso=True, gro=True, lro=False)


def write_tree(root: Path, files: Mapping[str, str]) -> None:
    """Make files with their folders; a text that begins with `->` makes a link."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text.startswith("->"):
            path.symlink_to(text[2:])
        else:
            path.unlink(missing_ok=True)
            path.write_text(f"{text}\n")


def process(*, uid: int = 0, capabilities: int = ALL_CAPABILITIES) -> dict[str, str]:
    """Return the files about the asking process."""
    return {
        "proc/self/status": f"Name:\tshapectl\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n"
        f"CapEff:\t{capabilities:016x}",
        "proc/self/uid_map": "         0          0 4294967295",
        "proc/self/limits": "Max locked memory         8388608   8388608   bytes",
        "proc/self/cgroup": "0::/user.slice",
        "sys/fs/cgroup/user.slice/memory.max": "max",
        "proc/self/mountinfo": "30 20 0:27 / /sys/fs/bpf rw,nosuid - bpf bpf rw,mode=700",
        "sys/kernel/security/lockdown": "[none] integrity confidentiality",
        "proc/sys/net/core/bpf_jit_enable": "1",
        "proc/sys/net/ipv4/tcp_mtu_probing": "0",
        "proc/sys/kernel/modules_disabled": "0",
    }


def modules(
    release: str,
    *,
    builtin: Iterable[str] = (),
    loaded: Iterable[str] = (),
    loadable: Iterable[str] = MODULES,
) -> dict[str, str]:
    """Return the files that say which modules a kernel has."""
    folder = f"lib/modules/{release}"
    return {
        f"{folder}/modules.builtin": "\n".join(f"kernel/net/sched/{one}.ko" for one in builtin),
        f"{folder}/modules.dep": "\n".join(f"kernel/net/sched/{one}.ko.xz:" for one in loadable),
        "proc/modules": "\n".join(f"{one} 16384 1 - Live 0x0" for one in loaded),
    }


def headers(release: str) -> dict[str, str]:
    """Return a whole header tree of a kernel."""
    folder = f"usr/src/linux-headers-{release}/include"
    return {f"{folder}/linux/kconfig.h": "", f"{folder}/generated/autoconf.h": ""}


def bcc(version: str = "0.26.0", library: str = "0.26.0") -> dict[str, str]:
    """Return Debian's packages python3-bpfcc and libbpfcc."""
    package, folder = "usr/lib/python3/dist-packages/bcc", "usr/lib/x86_64-linux-gnu"
    return {
        f"{package}/__init__.py": "",
        f"{package}/libbcc.py": "",
        f"{package}/version.py": f"__version__ = '{version}'",
        f"{folder}/libbcc.so.{library}": "",
        f"{folder}/libbcc.so.0": f"->libbcc.so.{library}",
    }


def device(
    name: str,
    index: int,
    *,
    driver: str = "",
    speed_mbits: int = -1,
    mtu: int = 1500,
    queues: int = 1,
    up: bool = True,
    bql: int = 0,
    master: str = "",
    lowers: Iterable[str] = (),
    uppers: Iterable[str] = (),
    more: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return a device of /sys/class/net. `more`: further files of it → text."""
    folder = f"sys/class/net/{name}"
    files = {
        "ifindex": str(index),
        "type": "1",
        "flags": "0x1003" if up else "0x1002",
        "carrier": "1" if up else "0",
        "speed": str(speed_mbits),
        "mtu": str(mtu),
        "uevent": f"INTERFACE={name}\nIFINDEX={index}",
        "statistics/tx_bytes": "5000000",
        "statistics/rx_missed_errors": "0",
    }
    if driver:
        files["device/driver"] = f"->../../../bus/pci/drivers/{driver}"
    for number in range(queues):
        files[f"queues/tx-{number}/traffic_class"] = ""
        files[f"queues/tx-{number}/byte_queue_limits/limit"] = str(bql)
        files[f"queues/rx-{number}/rps_cpus"] = "0"
    if master:
        files["master"] = f"->../{master}"
    for word, names in (("lower", lowers), ("upper", uppers)):
        files |= {f"{word}_{one}": f"->../{one}" for one in names}
    files |= more or {}
    return {f"{folder}/{key}": text for key, text in files.items()}


def rdma(name: str, netdev: str, *, words: int, link_layer: str = "Ethernet") -> dict[str, str]:
    """Return an RDMA device with one port; its counters are in words of 4 bytes."""
    folder = f"sys/class/infiniband/{name}/ports/1"
    return {
        f"{folder}/link_layer": link_layer,
        f"{folder}/gid_attrs/ndevs/0": netdev,
        f"{folder}/counters/port_xmit_data": str(words),
        f"{folder}/counters/port_rcv_data": "0",
    }


@dataclass
class FakeHost:
    """A tree, and what the kernel of that host would answer."""

    root: Path
    release: str
    kernel: KernelAnswers = field(default_factory=KernelAnswers)
    answers: dict[str, DeviceAnswers] = field(default_factory=dict)
    #: files that differ at the second look, a second later
    later: dict[str, str] = field(default_factory=dict)

    def look(self, device_name: str | None = None) -> Sight:
        """Return what `service.doctor.look` would see here."""
        sys_dir = self.root / "sys"
        host = read_host(
            self.root,
            release=self.release,
            python_path=[str(self.root / "usr/lib/python3/dist-packages")],
        )
        first = read_sample(sys_dir, lambda: 1.0)
        write_tree(self.root, self.later)
        last = read_sample(sys_dir, lambda: 2.0)
        interfaces = read_interfaces(sys_dir, device_name)
        names = chosen(interfaces, device_name)
        answers = {name: one for name, one in self.answers.items() if name in names}
        return Sight(host, self.kernel, interfaces, answers, first, last)


def healthy(root: Path) -> FakeHost:
    """A server with one 25 Gbit/s NIC, Debian's kernel, everything installed."""
    release = "6.12.107+deb12-amd64"
    tree = {
        **process(),
        **modules(release, loaded=("sch_ingress", "cls_bpf")),
        **headers(release),
        **bcc(),
        **device("enp65s0f0np0", 2, driver="mlx5_core", speed_mbits=25_000, queues=4, bql=30_000),
        "sys/class/net/lo/ifindex": "1",
        "sys/class/net/lo/type": "772",
        "run/systemd/netif/links/2": "ADMIN_STATE=configured\nOPER_STATE=routable",
        "etc/systemd/network/10-data.network": "[Match]\nName=enp*\n[Network]\nDHCP=yes",
        "etc/nginx/nginx.conf": "http {\n  include conf.d/*.conf;\n}",
        "etc/nginx/conf.d/llm.conf": "location / {\n  proxy_pass http://vllm;\n"
        "  proxy_buffering off;\n}",
    }
    write_tree(root, tree)
    kernel = KernelAnswers(WORKING_BPF, ALL_QDISCS, ALL_QDISCS, True)
    answers = DeviceAnswers(
        "", root="mq 0:", offloads=PLAIN_OFFLOADS, ring=Ring(1024, 8192, 1024, 8192)
    )
    return FakeHost(root, release, kernel, {"enp65s0f0np0": answers})


def roce(root: Path) -> FakeHost:
    """A GPU host: 400 Gbit/s RoCE that moves 10 GB/s past TC, tuned, a buffering nginx (C25)."""
    release = "6.8.0-57-generic"
    classes = {f"queues/tx-{n}/traffic_class": str(n // 4) for n in range(16)}
    tree = {
        **process(),
        **modules(release, builtin=("sch_fq_codel",), loaded=("sch_ingress", "cls_bpf")),
        **headers(release),
        **bcc("0.29.1", "0.29.1"),
        **device(
            "ens1np0",
            4,
            driver="mlx5_core",
            speed_mbits=400_000,
            mtu=9000,
            queues=16,
            bql=60_000,
            more={"statistics/rx_missed_errors": "81234", **classes},
        ),
        **rdma("mlx5_0", "ens1np0", words=1_000_000_000),
        **rdma("mlx5_1", "", words=0, link_layer="InfiniBand"),
        "run/tuned/tuned.pid": "812",
        "etc/tuned/active_profile": "network-latency",
        "usr/lib/tuned/network-latency/tuned.conf": "[main]\ninclude=latency-performance\n"
        "[sysctl]\nnet.core.busy_read=50",
        "usr/lib/tuned/latency-performance/tuned.conf": "[cpu]\ngovernor=performance",
        "etc/nginx/nginx.conf": "http {\n  tcp_nodelay off; # saves packets\n"
        "  include sites-enabled/*;\n}",
        "etc/nginx/sites-enabled/llm": "server {\n  # proxy_buffering off;\n"
        "  location /v1/ { proxy_pass http://127.0.0.1:8000; }\n}",
    }
    write_tree(root, tree)
    kernel = KernelAnswers(WORKING_BPF, ALL_QDISCS, ALL_QDISCS, True, image_cached=True)
    answers = DeviceAnswers(
        "",
        root="mq 0:",
        has_fq=True,
        hook="clsact",
        filters=("egress bpf pref 1 handle 0x1 program 77 cil_to_netdev",),
        xdp=78,
        offloads=Offloads(tso=True, gso=True, gro=True, lro=True),
        ring=Ring(1024, 8192, 1024, 8192),
    )
    later = {
        "sys/class/infiniband/mlx5_0/ports/1/counters/port_xmit_data": "3500000000",
        "sys/class/net/ens1np0/statistics/tx_bytes": "5012500",
    }
    return FakeHost(root, release, kernel, {"ens1np0": answers}, later)


def bare(root: Path) -> FakeHost:
    """An unprivileged user on a locked-down kernel without headers, BCC, JIT and bpffs."""
    release = "6.1.0-9-amd64"
    tree = {
        **process(uid=1000, capabilities=0),
        **modules(release, loadable=("sch_ingress", "cls_bpf", "sch_htb", "sch_fq", "ifb")),
        **device("eth0", 2, driver="e1000e", speed_mbits=1_000, bql=0),
        "proc/sys/net/core/bpf_jit_enable": "0",
        "proc/self/mountinfo": "30 20 0:27 / /sys rw - sysfs sysfs rw",
        "sys/kernel/security/lockdown": "none integrity [confidentiality]",
        "sys/fs/cgroup/user.slice/memory.max": str(128 << 20),
        "etc/modprobe.d/hardening.conf": "blacklist sch_fq\ninstall cls_bpf /bin/false",
    }
    write_tree(root, tree)
    kernel = KernelAnswers(bpf=BpfProbe(refusal="Operation not permitted."))
    answers = DeviceAnswers(
        "",
        root="pfifo_fast 0:",
        tcx=None,
        offloads=Offloads(tso=True, gso=True, gro=False, lro=False),
        ring=Ring(256, 4096, 1024, 4096),
    )
    return FakeHost(root, release, kernel, {"eth0": answers})


def mess(root: Path) -> FakeHost:
    """Root of a container on an old kernel: a bridge over a bond over two NICs, and owners."""
    release = "5.10.0-44-amd64"
    long_name = "enx0123456789ab"
    assert len(long_name) == 15
    tree = {
        **process(capabilities=1 << 12),
        "proc/self/uid_map": "0 100000 65536",
        "proc/modules": "sch_ingress 16384 1 - Live 0x0",
        **device(long_name, 3, driver="ixgbe", speed_mbits=10_000, mtu=9000, master="bond0",
                 uppers=("bond0",)),
        **device("eth1.5", 4, driver="ixgbe", up=False, master="bond0", uppers=("bond0",)),
        **device("bond0", 5, speed_mbits=10_000, mtu=9000, master="br0", uppers=("br0", "bond0.7"),
                 lowers=(long_name, "eth1.5"), more={"bonding/mode": "802.3ad 4"}),
        **device("br0", 6, mtu=9000, lowers=("bond0", "veth-a.b"), more={"bridge/stp_state": "0"}),
        **device("bond0.7", 7, mtu=9100, lowers=("bond0",)),
        **device("veth-a.b", 8, master="br0", uppers=("br0",)),
        "sys/class/net/bond0.7/uevent": "DEVTYPE=vlan\nINTERFACE=bond0.7",
        "sys/class/net/bonding_masters": "bond0",
        "usr/lib/python3/dist-packages/bcc/__init__.py": "# blood cell counter",
        "run/systemd/netif/links/5": "ADMIN_STATE=configured",
        "run/NetworkManager/devices/5": "[device]\nmanaged=true",
        "etc/systemd/network/20-bond.network": "[Match]\nName=bond0\n[FairQueueing]\nParent=root",
        "etc/NetworkManager/system-connections/br.nmconnection": "[connection]\nid=br\n[tc]\n"
        "qdisc.root=handle 1: fq_codel",
    }  # fmt: skip
    write_tree(root, tree)
    kernel = KernelAnswers(bpf=BpfProbe(refusal="Operation not permitted."))
    answers = {
        long_name: DeviceAnswers(
            "",
            root="htb 1:",
            default_root=False,
            hook="ingress",
            tcx=None,
            offloads=PLAIN_OFFLOADS,
            ring=Ring(512, 4096, 512, 4096),
            shaped_neighbours=("bond0",),
        ),
        "bond0": DeviceAnswers(
            "bond",
            root="htb 8001:",
            default_root=False,
            hook="clsact",
            filters=("egress bpf pref 21320 handle 0x5348 program 9 other",),
            slot_taken=True,
            tcx=("tcx egress program 12 cil_to_host", "tcx ingress program 13"),
            ingress_chains=("nftables chain filter in",),
            shaped_neighbours=(long_name,),
        ),
    }
    return FakeHost(root, release, kernel, answers)
