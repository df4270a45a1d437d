# SPDX-License-Identifier: Apache-2.0
"""What files say about a host: /proc, /sys, and the settings of other programs.

Reads only. Every function takes the folder that stands for `/` (or `/sys`), so
that a faked tree can be given.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from shapeagent.kernel.headers import header_package, locate_kernel_headers
from shapeagent.kernel.probe import missing_capabilities
from shapeagent.model.hostfacts import (
    BccFacts,
    HostFacts,
    InterfaceFacts,
    Managers,
    ModuleState,
    ProxyFacts,
    RdmaPort,
    TrafficSample,
)

#: Module of the kernel → its line in the kernel's configuration.
MODULES = {
    "sch_ingress": "CONFIG_NET_SCH_INGRESS",
    "cls_bpf": "CONFIG_NET_CLS_BPF",
    "sch_htb": "CONFIG_NET_SCH_HTB",
    "sch_tbf": "CONFIG_NET_SCH_TBF",
    "sch_prio": "CONFIG_NET_SCH_PRIO",
    "sch_fq": "CONFIG_NET_SCH_FQ",
    "sch_fq_codel": "CONFIG_NET_SCH_FQ_CODEL",
    "act_mirred": "CONFIG_NET_ACT_MIRRED",
    "ifb": "CONFIG_IFB",
}

_IB_DATA_BYTES = 4  # port_xmit_data counts words (Documentation/infiniband/sysfs.rst)
_MAX_FILE_BYTES = 1 << 18  # of a configuration file
_MAX_FILES = 200
_NO_LIMIT_BYTES = 1 << 60
_IFF_UP = 1

# Sections of .network and options of .link files that set what attach sets (systemd.network(5)).
_NETWORKD = re.compile(
    r"^\s*(?:\[(?:QDisc|BFIFO|CAKE|ControlledDelay|DeficitRoundRobinScheduler\w*|"
    r"EnhancedTransmissionSelection|FairQueueing\w*|FlowQueuePIE|GenericRandomEarlyDetection|"
    r"HeavyHitterFilter|HierarchyTokenBucket\w*|NetworkEmulator|PFIFO\w*|PIE|QuickFairQueueing\w*|"
    r"StochasticFair\w+|TokenBucketFilter|TrivialLinkEqualizer)\]|"
    r"GenericSegmentOffloadMax(?:Bytes|Segments)\s*=)",
    re.MULTILINE,
)
_NETWORK_MANAGER = re.compile(r"^\s*\[tc\]", re.MULTILINE)
_TUNED = re.compile(
    r"^\s*(?:\[net\w*\]|type\s*=\s*net\b|net\.(?:core|ipv4)\.[\w.]+\s*=)", re.MULTILINE
)
_COMMENT = re.compile(r"#[^\n]*")
_PROXY_PASS = re.compile(r"\bproxy_pass\s")
_BUFFERING_OFF = re.compile(r"\bproxy_buffering\s+off\s*;")
_NODELAY_OFF = re.compile(r"\btcp_nodelay\s+off\s*;")


class _Reader:
    """Reads files under a root, and remembers those that may not be read."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.unseen: list[str] = []

    def text(self, *words: str) -> str | None:
        """Return the content of a file, None where it is missing or may not be read."""
        path = self.root.joinpath(*words)
        try:
            with path.open("rb") as stream:
                return stream.read(_MAX_FILE_BYTES).decode(errors="replace").strip()
        except PermissionError:
            self.unseen.append("/" + "/".join(words))
        except (OSError, ValueError):
            pass
        return None

    def number(self, *words: str) -> int | None:
        """Return the number in a file."""
        return _number(self.text(*words))

    def names(self, *words: str) -> list[str]:
        """Return the sorted names in a folder, none where it may not be read."""
        try:
            return sorted(os.listdir(self.root.joinpath(*words)))
        except PermissionError:
            self.unseen.append("/" + "/".join(words))
        except OSError:
            pass
        return []

    def files(self, folder: str, *endings: str) -> Iterator[tuple[str, str]]:
        """Yield (path, text) of the files of a folder whose names end so."""
        wanted = [name for name in self.names(folder) if name.endswith(endings)]
        for name in wanted[:_MAX_FILES]:
            text = self.text(folder, name)
            if text:
                yield f"/{folder}/{name}", text


def read_host(
    root: Path = Path("/"), *, release: str | None = None, python_path: Sequence[str] | None = None
) -> HostFacts:
    """Return what the files of a host say.

    Args:
        release: the kernel's; None is the running one.
        python_path: where `bcc` is looked for; None is where a child of ours would find it.
    """
    reader = _Reader(root)
    release = release if release is not None else os.uname().release
    status = reader.text("proc/self/status") or ""
    return HostFacts(
        release=release,
        euid=_euid(status),
        missing_capabilities=missing_capabilities(status),
        user_namespace=_in_user_namespace(reader.text("proc/self/uid_map")),
        modules=_read_modules(reader, release),
        loads_modules=_loads_modules(reader),
        header_trees=tuple(
            _shown(path, root)
            for path in locate_kernel_headers(
                release, modules_dir=root / "lib/modules", src_dir=root / "usr/src"
            )
        ),
        header_package=header_package(release),
        bcc=read_bcc(_python_path() if python_path is None else python_path, root),
        jit_sysctl=reader.number("proc/sys/net/core/bpf_jit_enable"),
        bpffs=_bpffs(reader.text("proc/self/mountinfo") or ""),
        lockdown=_lockdown(reader.text("sys/kernel/security/lockdown")),
        memlock_bytes=_memlock(reader.text("proc/self/limits") or ""),
        memory_limit_bytes=_memory_limit(reader),
        tcp_mtu_probing=reader.number("proc/sys/net/ipv4/tcp_mtu_probing"),
        managers=_managers(reader),
        proxies=_proxies(reader),
        unseen=tuple(dict.fromkeys(reader.unseen)),
    )


def _read_modules(reader: _Reader, release: str) -> dict[str, ModuleState]:
    """Return for each of MODULES whether the kernel has it at hand. Loads nothing."""
    loaded_text = reader.text("proc/modules")
    loaded = {line.split()[0] for line in (loaded_text or "").splitlines() if line}
    folder = f"lib/modules/{release}"
    builtin = _whole_text(reader.root / folder / "modules.builtin")
    loadable = _whole_text(reader.root / folder / "modules.dep")
    blocked = _blocked_modules(reader)
    no_loading = not _loads_modules(reader)
    config = ""
    if builtin is None and loaded_text is None:
        config = _kernel_config(reader.root, release)
    found = {}
    for name, option in MODULES.items():
        if name in loaded:
            state = ModuleState.LOADED
        elif builtin is not None and f"/{name}.ko" in builtin:
            state = ModuleState.BUILTIN
        elif loadable is not None and f"/{name}.ko" in loadable:
            is_blocked = no_loading or name in blocked
            state = ModuleState.BLOCKED if is_blocked else ModuleState.LOADABLE
        elif f"\n{option}=y" in config:
            state = ModuleState.BUILTIN
        elif config or (builtin is not None and (loadable is not None or no_loading)):
            state = ModuleState.ABSENT
        else:
            state = ModuleState.UNKNOWN
        found[name] = state
    return found


def read_bcc(python_path: Sequence[str], root: Path = Path("/")) -> BccFacts:
    """Return where the package `bcc` and its library are, without importing it (73 MB)."""
    folder = None
    for entry in python_path:
        for candidate in (Path(entry, "bcc", "__init__.py"), Path(entry, "bcc.py")):
            if folder is None and candidate.is_file():
                folder = candidate
    version = None
    is_compiler = False
    if folder is not None and folder.name == "__init__.py":
        is_compiler = (folder.parent / "libbcc.py").is_file()
        found = re.search(
            r"__version__\s*=\s*['\"]([^'\"]+)",
            _whole_text(folder.parent / "version.py") or "",
        )
        version = found[1] if found else None
    library = next(iter(_libraries(root)), None)
    library_version = None
    if library is not None:
        with contextlib.suppress(OSError):
            found = re.search(r"\.so\.(\d+\.\d+\.\d+)$", os.readlink(library))
            library_version = found[1] if found else None
    return BccFacts(
        path=_shown(folder.parent if folder.name == "__init__.py" else folder, root)
        if folder
        else None,
        version=version,
        is_compiler=is_compiler,
        library=_shown(library, root) if library else None,
        library_version=library_version,
    )


def read_interfaces(
    sys_dir: Path = Path("/sys"), device: str | None = None
) -> tuple[InterfaceFacts, ...]:
    """Return a device, or all physical ones, and those above and below them, sorted by name."""
    reader = _Reader(sys_dir / "class/net")
    names = [device] if device is not None else reader.names()
    wanted = [one for one in names if device is not None or (reader.root / one / "device").exists()]
    found: dict[str, InterfaceFacts] = {}
    for _ in range(3):  # them, their neighbours, and the other members of their bond
        for name in wanted:
            facts = None if name in found else _read_interface(reader, name)
            if facts is not None:
                found[name] = facts
        near = {one for facts in found.values() for one in (*facts.lowers, *facts.uppers)}
        wanted = sorted(near - found.keys())
    return tuple(found[name] for name in sorted(found))


def read_sample(
    sys_dir: Path = Path("/sys"), clock: Callable[[], float] = time.monotonic
) -> TrafficSample:
    """Return the counters of the RDMA ports, and those of their devices, of this moment."""
    ports = read_rdma(sys_dir)
    reader = _Reader(sys_dir / "class/net")
    sent = {
        name: reader.number(name, "statistics/tx_bytes") or 0
        for name in sorted({port.netdev for port in ports if port.netdev})
    }
    return TrafficSample(clock(), ports, sent)


def read_rdma(sys_dir: Path = Path("/sys")) -> tuple[RdmaPort, ...]:
    """Return the RDMA ports of a sysfs with their counters in bytes."""
    reader = _Reader(sys_dir / "class/infiniband")
    found = []
    for device in reader.names():
        below = reader.names(device, "device/net")
        for port in reader.names(device, "ports"):
            number = _number(port)
            if number is None:
                continue
            folder = f"{device}/ports/{port}"
            netdev = reader.text(folder, "gid_attrs/ndevs/0")
            if not netdev:
                netdev = below[0] if len(below) == 1 else ""
            sent, received = (
                reader.number(folder, "counters", name)
                for name in ("port_xmit_data", "port_rcv_data")
            )
            found.append(
                RdmaPort(
                    device=device,
                    port=number,
                    netdev=netdev,
                    link_layer=reader.text(folder, "link_layer") or "",
                    sent_bytes=None if sent is None else sent * _IB_DATA_BYTES,
                    received_bytes=None if received is None else received * _IB_DATA_BYTES,
                )
            )
    return tuple(found)


def _shown(path: Path, root: Path) -> str:
    """Return a path as it is under the root."""
    return f"/{path.relative_to(root)}" if path.is_relative_to(root) else str(path)


def _number(text: str | None, base: int = 10) -> int | None:
    try:
        return int(text, base) if text else None
    except ValueError:
        return None


def _whole_text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None


def _python_path() -> list[str]:
    """Return where a process of ours started with -P looks for packages."""
    here = os.getcwd()
    asked = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [entry for entry in sys.path if entry and (entry != here or entry in asked)]


def _euid(status: str) -> int:
    found = re.search(r"^Uid:\s+\d+\s+(\d+)", status, re.MULTILINE)
    return int(found[1]) if found else 0


def _in_user_namespace(uid_map: str | None) -> bool:
    return bool(uid_map) and (uid_map or "").split() != ["0", "0", "4294967295"]


def _bpffs(mountinfo: str) -> str:
    """Return "rw", "ro" or "" for a bpf file system on /sys/fs/bpf; the last mount shows."""
    found = ""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        words = before.split()
        if len(words) > 5 and words[4] == "/sys/fs/bpf":
            options = f"{words[5]},{after.split()[-1] if after else ''}".split(",")
            is_bpf = after.split()[:1] == ["bpf"]
            found = ("ro" if "ro" in options else "rw") if is_bpf else ""
    return found


def _lockdown(text: str | None) -> str | None:
    found = re.search(r"\[(\w+)\]", text or "")
    return found[1] if found else None


def _memlock(limits: str) -> int | None:
    found = re.search(r"^Max locked memory\s+(\d+)", limits, re.MULTILINE)
    return int(found[1]) if found else None


def _memory_limit(reader: _Reader) -> int | None:
    """Return the least memory.max on the way up from this process's cgroup."""
    line = next(
        (
            line[3:]
            for line in (reader.text("proc/self/cgroup") or "").splitlines()
            if line.startswith("0::")
        ),
        None,
    )
    if line is None:
        return None
    folder = Path("sys/fs/cgroup") / line.strip("/")
    limits = []
    while folder.parts[:3] == ("sys", "fs", "cgroup"):
        limit = reader.number(str(folder / "memory.max"))
        limits += [limit] if limit is not None else []
        folder = folder.parent
    least = min(limits, default=_NO_LIMIT_BYTES)
    return least if least < _NO_LIMIT_BYTES else None


def _loads_modules(reader: _Reader) -> bool:
    has_modules = (reader.root / "proc/modules").exists()
    return has_modules and reader.number("proc/sys/kernel/modules_disabled") != 1


def _blocked_modules(reader: _Reader) -> set[str]:
    """Return the modules that modprobe.d keeps from being loaded."""
    found = set()
    for folder in ("etc/modprobe.d", "run/modprobe.d", "lib/modprobe.d"):
        for _, text in reader.files(folder, ".conf"):
            for line in text.splitlines():
                words = line.split()
                if words[:1] == ["blacklist"] and len(words) > 1:
                    found.add(words[1].replace("-", "_"))
                command = words[2] if words[:1] == ["install"] and len(words) > 2 else ""
                if command.rpartition("/")[2] in ("false", "true"):
                    found.add(words[1].replace("-", "_"))
    return found


def _kernel_config(root: Path, release: str) -> str:
    """Return the kernel's configuration, "" where it is nowhere."""
    text = _whole_text(root / f"boot/config-{release}")
    if text is not None:
        return "\n" + text
    try:
        import gzip

        return "\n" + gzip.decompress((root / "proc/config.gz").read_bytes()).decode()
    except (OSError, EOFError, ValueError):
        return ""


def _libraries(root: Path) -> Iterator[Path]:
    for folder in ("usr/lib", "usr/local/lib", "lib"):
        for pattern in ("*/libbcc.so.0", "libbcc.so.0"):
            yield from sorted((root / folder).glob(pattern))
    yield from sorted((root / "usr/lib64").glob("libbcc.so.0"))


def _managers(reader: _Reader) -> Managers:
    profile = None
    tuned_files: list[str] = []
    if reader.text("run/tuned/tuned.pid"):
        profile = (reader.text("etc/tuned/active_profile") or "unknown").split("\n")[0]
        tuned_files = list(_tuned_files(reader, profile.split(), set()))
    return Managers(
        networkd=_indexes(reader, "run/systemd/netif/links", r"^ADMIN_STATE=(?!unmanaged)\w"),
        networkd_files=tuple(
            path
            for folder in ("etc", "run", "usr/lib", "usr/local/lib")
            for path, text in reader.files(f"{folder}/systemd/network", ".network", ".link")
            if _NETWORKD.search(text)
        ),
        network_manager=_indexes(reader, "run/NetworkManager/devices", r"^managed=(?:true|full)"),
        network_manager_files=tuple(
            path
            for folder in ("etc", "run", "usr/lib")
            for path, text in reader.files(
                f"{folder}/NetworkManager/system-connections", ".nmconnection"
            )
            if _NETWORK_MANAGER.search(text)
        ),
        tuned_profile=profile,
        tuned_files=tuple(tuned_files),
    )


def _indexes(reader: _Reader, folder: str, pattern: str) -> frozenset[int]:
    """Return the indexes of the devices whose state file has a line like this."""
    found = set()
    for name in reader.names(folder):
        if name.isdigit() and re.search(pattern, reader.text(folder, name) or "", re.MULTILINE):
            found.add(int(name))
    return frozenset(found)


def _tuned_files(reader: _Reader, profiles: list[str], seen: set[str]) -> Iterator[str]:
    """Yield the files of a profile, and of those it includes, that set devices or the network."""
    for profile in profiles:
        if profile in seen or "/" in profile:
            continue
        seen.add(profile)
        for folder in (
            "etc/tuned",
            "etc/tuned/profiles",
            "usr/lib/tuned",
            "usr/lib/tuned/profiles",
        ):
            text = reader.text(folder, profile, "tuned.conf")
            if text is None:
                continue
            if _TUNED.search(text):
                yield f"/{folder}/{profile}/tuned.conf"
            included = re.search(r"^\s*include\s*=\s*(\S+)", text, re.MULTILINE)
            if included:
                yield from _tuned_files(reader, included[1].split(","), seen)
            break


def _proxies(reader: _Reader) -> ProxyFacts:
    """Return where nginx passes on with its buffers, which it has unless told otherwise."""
    texts = [*reader.files("etc/nginx", "nginx.conf"), *reader.files("etc/nginx/conf.d", ".conf")]
    texts += reader.files("etc/nginx/sites-enabled", "")
    plain = [(path, _COMMENT.sub("", text)) for path, text in texts]
    main = "".join(text for path, text in plain if path == "/etc/nginx/nginx.conf")
    all_off = bool(_BUFFERING_OFF.search(main))
    buffering = (
        _place(path, text, _PROXY_PASS)
        for path, text in plain
        if not all_off and not _BUFFERING_OFF.search(text)
    )
    nagle = (_place(path, text, _NODELAY_OFF) for path, text in plain)
    return ProxyFacts(
        seen=bool(texts),
        buffering=tuple(place for place in buffering if place),
        nagle=tuple(place for place in nagle if place),
    )


def _place(path: str, text: str, pattern: re.Pattern[str]) -> str:
    found = pattern.search(text)
    return f"{path}:{text.count(chr(10), 0, found.start()) + 1}" if found else ""


def _read_interface(reader: _Reader, name: str) -> InterfaceFacts | None:
    index = reader.number(name, "ifindex")
    if index is None:
        return None  # no device, as bonding_masters
    names = reader.names(name)
    queues = reader.names(name, "queues")
    speed_mbits = reader.number(name, "speed")
    carrier = reader.number(name, "carrier")
    hardware = "device" in names
    tx_bytes = reader.number(name, "statistics/tx_bytes") or 0
    tx_queues = [one for one in queues if one.startswith("tx-")]
    return InterfaceFacts(
        name=name,
        index=index,
        kind=_kind(reader, name, names),
        hardware=hardware,
        driver=_link_name(reader.root / name / "device/driver"),
        up=bool((_number(reader.text(name, "flags"), 16) or 0) & _IFF_UP),
        carrier=None if carrier is None else carrier == 1,
        speed_bits_per_s=speed_mbits * 1_000_000 if speed_mbits and speed_mbits > 0 else None,
        mtu=reader.number(name, "mtu") or 0,
        tx_queues=len(tx_queues),
        rx_queues=sum(one.startswith("rx-") for one in queues),
        hardware_classes=_hardware_classes(reader, name, tx_queues),
        byte_limits=_byte_limits(reader, name, tx_queues) if hardware and tx_bytes else None,
        tx_bytes=tx_bytes,
        rx_missed=reader.number(name, "statistics/rx_missed_errors") or 0,
        master=_link_name(reader.root / name / "master"),
        lowers=tuple(one.removeprefix("lower_") for one in names if one.startswith("lower_")),
        uppers=tuple(one.removeprefix("upper_") for one in names if one.startswith("upper_")),
    )


def _kind(reader: _Reader, name: str, names: Collection[str]) -> str:
    for folder, kind in (("bonding", "bond"), ("bridge", "bridge"), ("tun_flags", "tun")):
        if folder in names:
            return kind
    found = re.search(r"^DEVTYPE=(\w+)$", reader.text(name, "uevent") or "", re.MULTILINE)
    return found[1] if found else ""


def _link_name(path: Path) -> str:
    try:
        return os.path.basename(os.readlink(path))
    except OSError:
        return ""


def _hardware_classes(reader: _Reader, name: str, queues: Sequence[str]) -> int:
    texts = [reader.text(name, "queues", queue, "traffic_class") for queue in queues]
    numbers = [_number((text or "").split("-")[0]) for text in texts]
    highest = max((number for number in numbers if number is not None), default=0)
    return highest + 1 if highest > 0 else 0


def _byte_limits(reader: _Reader, name: str, queues: Sequence[str]) -> bool | None:
    """Return whether the driver uses byte queue limits: a limit grows from 0 with traffic."""
    limits = [reader.number(name, "queues", queue, "byte_queue_limits/limit") for queue in queues]
    known = [limit for limit in limits if limit is not None]
    return any(known) if known else False
