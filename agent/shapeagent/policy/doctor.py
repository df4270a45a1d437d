# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a host for shapectl, from what was seen of it.

An error keeps attach from working; a warning is harm that it cannot prevent or
may do; info is good to know. The ids are stable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from shapeagent.model.hostfacts import BpfProbe, HostFacts, KernelAnswers, ModuleState
from shapeagent.model.reports import Finding, Severity

HOST: Final = "host"

_OLDEST = (5, 15)
_TRIE_FIX = (6, 13)  # 532d6b36b2bf; stable kernels have it earlier, so the probe decides
_MEMLOCK_FREE = (5, 11)  # since then maps count for the memory cgroup, not RLIMIT_MEMLOCK
_COMPILE_BYTES = 160 << 20  # 149 MB measured (design §9), and the maps
_UPGRADE = "apt-get install --only-upgrade linux-image-amd64"
_LOOK_AT_NGINX = "nginx -T | grep -n proxy_buffering"

#: Kind of qdisc → (severity where it is missing, what then happens).
_MISSING_QDISC = {
    "htb": (Severity.WARNING, "attach takes another profile: without HTB no class has a guarantee"),
    "fq_codel": (Severity.INFO, "each class gets a FIFO of limited size instead"),
    "fq": (Severity.INFO, "there is no profile edt, which fast links with many queues want"),
    "prio": (Severity.INFO, "there is no profile prio"),
    "tbf": (Severity.INFO, "profile prio cannot hold a --link-rate"),
}
_QDISC_MODULE = {"clsact": "sch_ingress", "cls_bpf": "cls_bpf", "ifb": "ifb"}


def ok(identity: str, what: str, subject: str = HOST) -> Finding:
    """Return a finding that says that all is well."""
    return Finding(identity, Severity.OK, subject, what, "", "")


def kernel_version(release: str) -> tuple[int, int]:
    """Return the first two numbers of a kernel release, (0, 0) where it has none."""
    found = re.match(r"(\d+)\.(\d+)", release)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def examine_host(host: HostFacts, answers: KernelAnswers) -> tuple[Finding, ...]:
    """Return the findings about a host, in the order in which a person would look."""
    return (
        *_examine_kernel(host),
        *_examine_privileges(host),
        *_examine_bpf(host, answers.bpf),
        *_examine_qdiscs(host, answers),
        *_examine_compiler(host, answers),
        *_examine_limits(host),
        *_examine_managers(host),
        *_examine_stutter(host),
    )


def _examine_kernel(host: HostFacts) -> Iterator[Finding]:
    if kernel_version(host.release) >= _OLDEST:
        yield ok("kernel", f"{host.release}, and 5.15 is needed")
        return
    yield Finding(
        "kernel-too-old",
        Severity.ERROR,
        HOST,
        f"The kernel is {host.release}; shapectl needs 5.15 or later.",
        "Older kernels lack map and program features that the classifier is built on.",
        "apt-get install linux-image-amd64, then reboot",
    )


def _examine_privileges(host: HostFacts) -> Iterator[Finding]:
    if host.user_namespace:
        yield Finding(
            "user-namespace",
            Severity.ERROR,
            HOST,
            "This process is in a user namespace: it is root only there.",
            "The kernel loads classifiers only for root of the host.",
            "run shapectl on the host, for a container too: shapectl --netns NAME attach DEVICE",
        )
    if not host.missing_capabilities:
        yield ok("capabilities", "this process has the capabilities that attach needs")
        return
    # A person who forgot sudo has done no harm; root without them sits in a container.
    is_root = host.euid == 0
    yield Finding(
        "capabilities-missing",
        Severity.ERROR if is_root else Severity.WARNING,
        HOST,
        f"This process lacks {', '.join(host.missing_capabilities)}.",
        "attach needs them, and without them not everything here could be looked at.",
        "give the container these capabilities, or run shapectl on the host"
        if is_root
        else "sudo shapectl doctor",
    )


def _examine_bpf(host: HostFacts, probe: BpfProbe | None) -> Iterator[Finding]:
    if probe is not None and probe.refusal and not host.missing_capabilities:
        yield Finding(
            "bpf-refused",
            Severity.ERROR,
            HOST,
            f"The kernel does not load a program: {probe.refusal}",
            "Without BPF nothing classifies packets.",
            "dmesg | tail; look for lockdown, a seccomp profile or CONFIG_BPF_SYSCALL=n",
        )
    works = probe is not None and not probe.refusal
    if probe is not None and works:
        yield ok("bpf", "the kernel loads classifier programs")
        if probe.missing_maps:
            yield Finding(
                "bpf-maps-missing",
                Severity.ERROR,
                HOST,
                f"The kernel makes no map of type {', '.join(probe.missing_maps)}.",
                "Whitelists, counters and ceilings live in them.",
                "apt-get install linux-image-amd64, then reboot",
            )
    yield _examine_jit(host, probe if works else None)
    yield _examine_trie(host, probe if works else None)


def _examine_jit(host: HostFacts, probe: BpfProbe | None) -> Finding:
    turn_on = "sysctl -w net.core.bpf_jit_enable=1"
    if probe is not None and probe.jited:
        return ok("jit", "programs are compiled to machine code (JIT)")
    if probe is not None or host.jit_sysctl == 0:
        return Finding(
            "jit-off",
            Severity.WARNING,
            HOST,
            "Programs are interpreted: the JIT compiler is off or missing.",
            "Each packet then costs several times as much CPU.",
            turn_on,
        )
    if host.jit_sysctl is not None:
        return ok("jit", f"net.core.bpf_jit_enable is {host.jit_sysctl}")
    return Finding(
        "jit-unknown",
        Severity.INFO,
        HOST,
        "Whether the JIT compiler is on could not be seen.",
        "Without it each packet costs several times as much CPU.",
        f"sudo shapectl doctor; {turn_on}",
    )


def _examine_trie(host: HostFacts, probe: BpfProbe | None) -> Finding:
    """Judge the kernel's LPM tries: by what one did, by the version only where none was tried."""
    why = (
        "Such kernels refuse to change an entry of a full trie, and some of them write past a "
        "buffer when a trie is listed (13400ac8fb80). shapectl keeps a spare slot and makes one "
        "change at a time; other programs may not."
    )
    if probe is not None and probe.full_trie_updates:
        return ok("lpm-trie", "prefix maps (LPM tries) take updates when they are full")
    if probe is not None and "LPM trie" not in probe.missing_maps:
        return Finding(
            "lpm-trie-old",
            Severity.WARNING,
            HOST,
            f"Kernel {host.release} has the prefix maps from before 532d6b36b2bf (6.13).",
            why,
            _UPGRADE,
        )
    if kernel_version(host.release) >= _TRIE_FIX:
        return ok("lpm-trie", f"prefix maps of {host.release} are newer than the known faults")
    return Finding(
        "lpm-trie-unproved",
        Severity.WARNING,
        HOST,
        f"Kernel {host.release} may have the prefix maps from before 532d6b36b2bf (6.13); "
        "they could not be tried.",
        why,
        f"sudo shapectl doctor tries them; {_UPGRADE}",
    )


def _examine_qdiscs(host: HostFacts, answers: KernelAnswers) -> Iterator[Finding]:
    there: list[str] = []
    missing: list[str] = []
    unknown: list[str] = []
    for kind in ("clsact", "cls_bpf", *_MISSING_QDISC, "ifb"):
        has = _has(host, answers, kind)
        (unknown if has is None else there if has else missing).append(kind)
    if there:
        yield ok("qdiscs", f"the kernel has {', '.join(there)}")
    if unknown:
        yield Finding(
            "qdiscs-unknown",
            Severity.INFO,
            HOST,
            f"Whether the kernel has {', '.join(unknown)} could not be seen without loading a "
            "module.",
            "attach finds out, and changes nothing where one is missing.",
            "sudo shapectl attach DEVICE --dry-run",
        )
    for kind in missing:
        yield _missing_kind(host, kind, has_tcx=answers.has_tcx)
    if (
        answers.attaches is False
        and not answers.has_tcx
        and not {"clsact", "cls_bpf"} & set(missing)
    ):
        yield Finding(
            "clsact-refused",
            Severity.ERROR,
            HOST,
            "The kernel took no program at clsact of a scratch namespace.",
            "This is where the classifier runs.",
            "dmesg | tail",
        )


def _has(host: HostFacts, answers: KernelAnswers, kind: str) -> bool | None:
    """Return whether the kernel has a kind: by what it did, else by what its files say."""
    if kind == "cls_bpf" and answers.attaches:
        return True
    if answers.qdiscs is not None and kind in answers.qdiscs_asked:
        return kind in answers.qdiscs
    state = host.modules.get(_module_of(kind), ModuleState.UNKNOWN)
    if state is ModuleState.UNKNOWN:
        return None
    return state not in (ModuleState.ABSENT, ModuleState.BLOCKED)


def _module_of(kind: str) -> str:
    return _QDISC_MODULE.get(kind, f"sch_{kind}")


def _missing_kind(host: HostFacts, kind: str, *, has_tcx: bool) -> Finding:
    module = _module_of(kind)
    blocked = host.modules.get(module) is ModuleState.BLOCKED
    if kind in ("clsact", "cls_bpf") and has_tcx:
        severity, then = Severity.INFO, "attach uses tcx; --hook clsact and --ingress ifb need it"
    elif kind in ("clsact", "cls_bpf"):
        severity, then = Severity.ERROR, "attach cannot work: the classifier runs there"
    elif kind == "ifb":
        severity, then = Severity.INFO, "--ingress ifb is refused; --ingress police works"
    else:
        severity, then = _MISSING_QDISC[kind]
    name = kind.replace("_", "-")
    if not blocked:
        return Finding(
            f"{name}-missing",
            severity,
            HOST,
            f"The kernel has no {kind}.",
            f"{then[0].upper()}{then[1:]}.",
            f"a kernel with {module}, as every distribution's: apt-get install linux-image-amd64",
        )
    if host.loads_modules:
        how = "modprobe.d forbids to load it"
        fix = f"grep -rn {module} /etc/modprobe.d; delete that line, then: modprobe {module}"
    else:
        how = "kernel.modules_disabled is 1"
        fix = f"echo {module} > /etc/modules-load.d/shapectl.conf, then reboot"
    return Finding(
        f"{name}-blocked",
        severity,
        HOST,
        f"{kind} is a module ({module}) that is not loaded, and {how}.",
        f"{then[0].upper()}{then[1:]}.",
        fix,
    )


def _examine_compiler(host: HostFacts, answers: KernelAnswers) -> Iterator[Finding]:
    # A compiled classifier in the cache needs neither headers nor BCC until its source changes.
    missing = Severity.WARNING if answers.image_cached else Severity.ERROR
    cached = " The one in the cache works until shapectl is upgraded." * answers.image_cached
    if answers.image_cached:
        yield ok("classifier", "the classifier is compiled already (in /var/cache/shapectl)")
    if host.header_trees:
        yield ok("headers", " + ".join(host.header_trees))
    else:
        yield Finding(
            "headers-missing",
            missing,
            HOST,
            f"There are no kernel headers for {host.release}, nor for another version.",
            f"The classifier is compiled on this host, with any version's headers.{cached}",
            f"apt-get install {host.header_package}",
        )
    bcc = host.bcc
    install = "apt-get install python3-bpfcc"
    if bcc.path is None:
        yield Finding(
            "bcc-missing",
            missing,
            HOST,
            "The Python package bcc (BPF Compiler Collection) is not there.",
            f"It compiles the classifier. PyPI's bcc is another program.{cached}",
            install,
        )
    elif not bcc.is_compiler:
        yield Finding(
            "bcc-wrong",
            missing,
            HOST,
            f"The package bcc at {bcc.path} is not the BPF Compiler Collection.",
            f"PyPI's package of that name is another program, and hides Debian's.{cached}",
            f"pip uninstall bcc; {install}",
        )
    else:
        yield ok("bcc", f"bcc {bcc.version or 'of unknown version'} at {bcc.path}")
    yield from _examine_library(host, missing, cached)


def _examine_library(host: HostFacts, missing: Severity, cached: str) -> Iterator[Finding]:
    bcc = host.bcc
    if bcc.library is None:
        yield Finding(
            "compiler-missing",
            missing,
            HOST,
            "There is no libbcc.so.0, the library with clang in it.",
            f"The Python package bcc only calls it.{cached}",
            "apt-get install libbpfcc",
        )
        return
    differs = bcc.is_compiler and bcc.version and bcc.library_version
    if differs and bcc.version != bcc.library_version:
        yield Finding(
            "bcc-broken",
            missing,
            HOST,
            f"The Python package bcc is {bcc.version}, its library {bcc.library_version}.",
            f"They call each other by version; the compiler then fails to load.{cached}",
            "apt-get install --reinstall python3-bpfcc libbpfcc",
        )
        return
    yield ok("compiler", f"clang inside {bcc.library}")


def _examine_limits(host: HostFacts) -> Iterator[Finding]:
    if host.bpffs == "rw":
        yield ok("bpffs", "bpffs is mounted on /sys/fs/bpf")
    elif host.bpffs == "ro":
        yield Finding(
            "bpffs-read-only",
            Severity.ERROR,
            HOST,
            "bpffs on /sys/fs/bpf is read-only.",
            "Programs and maps are pinned there, so that they outlive the command.",
            "mount -o remount,rw /sys/fs/bpf",
        )
    else:
        yield Finding(
            "bpffs-missing",
            Severity.INFO,
            HOST,
            "bpffs is not mounted on /sys/fs/bpf.",
            "Programs and maps are pinned there; attach mounts it.",
            "mount -t bpf bpf /sys/fs/bpf",
        )
    yield _examine_lockdown(host.lockdown)
    yield from _examine_memory(host)


def _examine_lockdown(lockdown: str | None) -> Finding:
    if lockdown == "confidentiality":
        return Finding(
            "lockdown",
            Severity.WARNING,
            HOST,
            "The kernel is locked down (confidentiality).",
            "Classifiers load, but programs that read kernel memory do not: nothing can measure "
            "the time that packets wait in queues.",
            "cat /sys/kernel/security/lockdown; boot with lockdown=integrity",
        )
    return ok("lockdown", f"lockdown is {lockdown or 'none'}: classifiers load")


def _examine_memory(host: HostFacts) -> Iterator[Finding]:
    old = kernel_version(host.release) < _MEMLOCK_FREE
    if old and host.memlock_bytes is not None:
        yield Finding(
            "memlock-low",
            Severity.ERROR,
            HOST,
            f"This process may lock {host.memlock_bytes:,} bytes of memory.",
            "Before 5.11 maps count as locked memory, and theirs is several MB.",
            "ulimit -l unlimited",
        )
    elif not old:
        yield ok("memlock", "maps do not count as locked memory (since 5.11)")
    limit = host.memory_limit_bytes
    if limit is not None and limit < _COMPILE_BYTES:
        yield Finding(
            "memory-limit",
            Severity.WARNING,
            HOST,
            f"The cgroup of this process may use {limit / (1 << 20):.0f} MiB of memory.",
            "Compiling takes 150 MB, and maps count for the cgroup that makes them.",
            "systemd-run --scope -p MemoryMax=512M shapectl attach DEVICE",
        )


def _examine_managers(host: HostFacts) -> Iterator[Finding]:
    found = host.managers
    undo = "It may replace what attach sets whenever it sets a device up again."
    if found.networkd_files:
        yield Finding(
            "networkd",
            Severity.WARNING,
            HOST,
            f"systemd-networkd's files set qdiscs or segment limits: "
            f"{', '.join(found.networkd_files)}.",
            undo,
            f"take those sections out of {found.networkd_files[0]}, then: networkctl reload",
        )
    if found.network_manager_files:
        yield Finding(
            "networkmanager",
            Severity.WARNING,
            HOST,
            f"NetworkManager's connections set qdiscs: {', '.join(found.network_manager_files)}.",
            undo,
            "nmcli connection modify NAME tc.qdiscs '' tc.tfilters ''",
        )
    if found.tuned_files:
        yield Finding(
            "tuned",
            Severity.WARNING,
            HOST,
            f"tuned runs with profile {found.tuned_profile}, which sets devices or network "
            f"sysctls: {', '.join(found.tuned_files)}.",
            "It sets them again at each start, and back when it stops.",
            "tuned-adm profile_info; then leave those settings out of the profile",
        )
    elif found.tuned_profile is not None:
        yield ok("tuned", f"tuned runs with profile {found.tuned_profile}, which leaves TC alone")
    if not (found.networkd_files or found.network_manager_files or found.tuned_files):
        yield ok("managers", "no network manager is set up to change qdiscs or segment limits")


def _examine_stutter(host: HostFacts) -> Iterator[Finding]:
    """Name what makes token streams stutter and is no queue: no shaper mends it."""
    if host.proxies.buffering:
        yield Finding(
            "proxy-buffering",
            Severity.WARNING,
            HOST,
            f"nginx passes on with its buffers: {', '.join(host.proxies.buffering)}.",
            "It then holds tokens back and sends them in clumps; no shaper mends that. The sign: "
            "the gaps between tokens get shorter behind the proxy, the first token later.",
            f"set `proxy_buffering off;` where token streams pass; see: {_LOOK_AT_NGINX}",
        )
    elif host.proxies.seen:
        yield ok("proxy-buffering", "no proxy_pass with buffers in nginx's usual files")
    if host.proxies.nagle:
        yield Finding(
            "nagle",
            Severity.WARNING,
            HOST,
            f"nginx lets Nagle's algorithm wait: {', '.join(host.proxies.nagle)}.",
            "A token then waits for the acknowledgement of the one before, up to 40 ms.",
            "delete `tcp_nodelay off;`: on is the default",
        )
    else:
        yield Finding(
            "nagle-unseen",
            Severity.INFO,
            HOST,
            "Whether servers set TCP_NODELAY cannot be seen from outside.",
            "Where tokens come in clusters about 40 ms apart, Nagle's algorithm and delayed "
            "acknowledgements do it, not a queue. vLLM's server sets TCP_NODELAY.",
            "strace -f -e trace=setsockopt -p PID, while a client connects",
        )
