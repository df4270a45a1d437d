# SPDX-License-Identifier: Apache-2.0
"""Virtual machines with Debian's kernels, by virtme-ng and QEMU's software emulation.

A guest boots the host's root file system copy-on-write under another kernel,
runs one command and powers off. What it writes goes away with it, except in
the folder that both sides share. In virtual time the guest's clock counts
instructions and jumps over idle time, so that a noisy host changes no figure.
It would also jump while the guest waits for a file of the host, by up to 0.1 s
an open: so the tree, Python and the programs that tests start are copied into
the guest's memory before the command begins.

The console is what the kernel says; the output is what the command says.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from shapeagent.model.errors import FailedError, InputError, PrivilegeError, UnsupportedError

# Roots of kernels: the host's own, and those that setup-vm.sh unpacked beside it, since an
# installed kernel would become the one that the host boots next.
KERNEL_ROOTS = (Path("/"), *sorted(Path("/var/lib/shapectl/kernels").glob("*/")))
SERIES = ("6.1", "6.12")
SETUP_HINT = "sudo make setup-vm"
TAIL_LINES = 25
MIN_FREE_DISK_MB = 600  # the packed tree, reports, consoles
QEMU_MEMORY_MB = 300  # of QEMU itself, beside the guest's

MODULES = (
    *("sch_htb", "sch_tbf", "sch_prio", "sch_fq", "sch_fq_codel", "sch_netem", "sch_cake"),
    *("sch_ingress", "cls_bpf", "cls_u32", "cls_flower", "act_mirred", "ifb", "veth", "tun"),
)
PROGRAMS = (
    *("sh", "bash", "cat", "env", "mkdir", "mount", "rm", "sleep", "timeout", "true", "kill"),
    *("umount", "unshare"),
    *("ip", "tc", "ss", "bpftool", "nft", "ethtool", "ping", "modprobe", "sysctl", "setpriv"),
)

_ETC_FILES = tuple(
    Path("/etc", name)
    for name in (
        *("ld.so.cache", "passwd", "group", "nsswitch.conf", "localtime", "hosts", "protocols"),
        *("services", "iproute2", "modprobe.d", "host.conf", "resolv.conf"),
    )
)
_TAR_FILE = "root.tar"
_TAR_BLOCKS = "1000"  # of 512 bytes: one read is one 9p message
_MEMORY_DIR = "/mnt"  # of the guest; must be there on the host
# What nothing in a guest needs, anywhere in the tree and in Python's library.
_NOT_PACKED = (
    *("build", "dist", ".git", ".mypy_cache", ".ruff_cache", ".hypothesis", ".pytest_cache"),
    *("mypy", "mypyc", "*__mypyc.*.so", "pip", "ruff", "grimp", "setuptools"),
    *("numpy", "numpy.libs", "matplotlib", "mpl_toolkits", "PIL", "pillow.libs", "fontTools"),
    *("kiwisolver", "contourpy", "virtme", "virtme_ng", "pkg_resources", "contrib"),
    *("test", "config-3.*", "idlelib", "lib2to3", "ensurepip", "pydoc_data", "tkinter"),
)
_GUEST_TMP = "/run/tmp"
_SECURITY_DIR = "/sys/kernel/security"
_GUEST_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PORT = "shapectl.output"
_UP_WORD = "shapectl-vm: up"
_RC_FILE = "guest.rc"
_COMMAND_FILE = "command.sh"
_SCRIPT_FILE = "guest.sh"
# Debian's flavours -cloud and -rt lack modules or have another scheduler.
_IMAGE_NAME = re.compile(r"vmlinuz-(?P<release>(?P<series>\d+\.\d+)\.\d+\S*-amd64)$")
_FLAVOURS = ("-cloud-", "-rt-")

# What a kernel prints when it caught itself in the wrong: lib/dump_stack.c, kernel/panic.c,
# kernel/locking/lockdep.c, kernel/hung_task.c, kernel/rcu/tree_stall.h, lib/refcount.c.
SPLAT = re.compile(
    r"\bWARNING: |\bBUG: |kernel BUG at|\bOops\b|general protection fault|Kernel panic"
    r"|possible (?:circular|recursive) locking|suspicious RCU usage"
    r"|INFO: task \S+ blocked for more than|rcu: INFO: .*\bdetected\b.*\bstall"
    r"|soft lockup|hard LOCKUP|refcount_t: |UBSAN: |KASAN: "
    r"|unregister_netdevice: waiting for"
)


class VmLostError(FailedError):
    """The guest went away, or hung, before its command had an exit status."""


@dataclass(frozen=True, slots=True)
class KernelImage:
    """A kernel that can be booted."""

    series: str
    release: str
    path: Path
    modules: Path


@dataclass(frozen=True, slots=True)
class VmSpec:
    """What is booted.

    `tree` is where the command starts; the guest has a copy of it, without what was built.
    `programs` are copied into the guest's memory too, beside PROGRAMS.
    `kernel_words` go to the kernel's command line.
    `deadline_s` is on the host's clock and covers boot and command.
    With `virtual_time` the host's speed does not show, and one host CPU does all the work.
    """

    kernel: KernelImage
    tree: Path
    programs: tuple[str, ...] = ()
    cpus: int = 1
    memory_mb: int = 2048
    virtual_time: bool = True
    deadline_s: float = 1800.0
    kernel_words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class VmResult:
    """What came back. `rc` is the command's exit status; times are the host's."""

    rc: int
    output: Path
    console: Path
    splats: tuple[str, ...]
    boot_s: float
    wall_s: float


def find_kernel(series: str, roots: Sequence[Path] | None = None) -> KernelImage:
    """Return the newest kernel of a series such as `6.12`.

    Args:
        roots: folders with `boot` and `lib/modules`; None is the host and what was unpacked.

    Raises:
        InputError: not a series (unknown-kernel).
        UnsupportedError: no image, or one without modules (kernel-image-missing).
    """
    if not re.fullmatch(r"\d+\.\d+", series):
        raise InputError(
            "unknown-kernel",
            f'"{series}" is no kernel series.',
            hint=f"one of {', '.join(SERIES)}",
        )
    found = []
    for root in KERNEL_ROOTS if roots is None else roots:
        for path in root.glob(f"boot/vmlinuz-{series}.*"):
            match = _IMAGE_NAME.match(path.name)
            if match and not any(word in path.name for word in _FLAVOURS):
                modules = root / "lib/modules" / match["release"]
                found.append(KernelImage(series, match["release"], path, modules))
    usable = [image for image in found if (image.modules / "modules.dep").exists()]
    if not usable:
        what = "an image without modules" if found else "no image"
        raise UnsupportedError(
            "kernel-image-missing",
            f"There is {what} of kernel {series}.",
            hint=f"{SETUP_HINT} (it unpacks Debian's linux-image-{series}.*-amd64)",
        )
    return max(usable, key=lambda image: _version_key(image.release))


def find_kernels(series: Iterable[str] = SERIES) -> tuple[KernelImage, ...]:
    """Return the newest installed kernel of each series. Raises as `find_kernel`."""
    return tuple(find_kernel(one) for one in series)


def _version_key(release: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", release))


def find_splats(console: str) -> tuple[str, ...]:
    """Return the lines in which the kernel complains about itself."""
    return tuple(line.strip() for line in console.splitlines() if SPLAT.search(line))


def tail_of(path: Path, lines: int = TAIL_LINES) -> tuple[str, ...]:
    """Return the last lines of a text file; none where there is no file."""
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return ()
    return tuple(line for line in text.splitlines() if line.strip())[-lines:]


def require_host(spec: VmSpec, share: Path) -> None:
    """Return nothing if this host can start the machine.

    Raises:
        PrivilegeError: not root (need-root).
        UnsupportedError: a program is missing (qemu-missing, vng-missing, busybox-missing,
            tool-missing).
        FailedError: too little room (no-disk-space, no-memory).
    """
    if os.geteuid() != 0:
        raise PrivilegeError(
            "need-root", "The guest sees the host's files as root.", hint="use sudo"
        )
    for program, reference in (
        ("qemu-system-x86_64", "qemu-missing"),
        ("busybox", "busybox-missing"),
        ("kmod", "tool-missing"),
        ("zstd", "tool-missing"),
        ("setpriv", "tool-missing"),
        ("unshare", "tool-missing"),
    ):
        if shutil.which(program) is None:
            raise UnsupportedError(reference, f"{program} is not installed.", hint=SETUP_HINT)
    if importlib.util.find_spec("virtme") is None:
        raise UnsupportedError(
            "vng-missing", f"{sys.executable} does not have virtme-ng.", hint=SETUP_HINT
        )
    free_mb = shutil.disk_usage(share).free // 2**20
    if free_mb < MIN_FREE_DISK_MB:
        raise FailedError(
            "no-disk-space",
            f"{share} has {free_mb} MB free; a machine needs {MIN_FREE_DISK_MB} MB.",
            hint="make clean",
        )
    available_mb = _available_memory_mb()
    wanted_mb = spec.memory_mb + QEMU_MEMORY_MB
    if available_mb < wanted_mb:
        raise FailedError(
            "no-memory",
            f"{available_mb} MB of memory are available; the machine needs {wanted_mb} MB.",
            hint="run one machine at a time, or with less memory",
        )


def _available_memory_mb() -> int:
    match = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    return int(match[1]) // 1024 if match else 0


class Vm:
    """A running machine; leaving the context ends it, and so does the end of this process.

    The machine lives in a PID namespace whose first process dies with us, also by SIGKILL:
    no part of it can stay behind.

    Effects: writes scripts, `guest.rc`, `output.log` and `console.log` into `share`, which the
        guest has at the same path and may write; 150 MB more while the machine runs.
    """

    def __init__(
        self,
        spec: VmSpec,
        argv: Sequence[str],
        share: Path,
        *,
        on_output: Callable[[str], None] | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        """Prepare the machine; `argv` runs as root in `spec.tree`.

        Args:
            on_output: called with each line that the command prints, from another thread.
            environment: variables for the command.
        """
        self.spec = spec
        self.share = share.resolve()
        self.output = self.share / "output.log"
        self.console = self.share / "console.log"
        self._argv = list(argv)
        self._environment = environment or {}
        self._on_output = on_output
        self._process: subprocess.Popen[bytes] | None = None
        self._pumps: list[threading.Thread] = []
        self._started_s = 0.0
        self._boot_s: float | None = None
        self._ended_s: float | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def start(self) -> None:
        """Boot. Raises as `require_host`."""
        self.share.mkdir(parents=True, exist_ok=True)
        require_host(self.spec, self.share)
        for name in (_RC_FILE, _SCRIPT_FILE, _COMMAND_FILE, self.output.name, self.console.name):
            (self.share / name).unlink(missing_ok=True)
        self._pack()
        script = self.share / _SCRIPT_FILE
        script.write_text(_guest_script(self.spec, self.share))
        command = _command_script(self.spec, self._argv, self.share, self._environment)
        (self.share / _COMMAND_FILE).write_text(command)
        path = f"{os.environ.get('PATH', '/usr/bin:/bin')}:/usr/sbin:/sbin"
        self._started_s = time.monotonic()
        self._process = subprocess.Popen(
            _host_argv(self.spec, self.share, script),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self.spec.tree,
            env={**os.environ, "PATH": path, "TMPDIR": str(self.share)},
            start_new_session=True,
        )
        out, err = self._process.stdout, self._process.stderr
        assert out is not None
        assert err is not None
        self._pumps = [
            threading.Thread(target=self._pump, args=(out, self.output, True), daemon=True),
            threading.Thread(target=self._pump, args=(err, self.console, False), daemon=True),
        ]
        for pump in self._pumps:
            pump.start()

    def wait(self) -> VmResult:
        """Return what the command left behind, once the machine has powered off.

        Raises:
            VmLostError: no exit status came back (vm-lost), or not in time (vm-deadline).
        """
        process = self._process
        assert process is not None, "the machine was not started"
        try:
            process.wait(max(self.spec.deadline_s - self.age_s(), 0.0))
        except subprocess.TimeoutExpired:
            self.kill()
            raise self._lost(
                "vm-deadline",
                f"The machine with kernel {self.spec.kernel.release} was ended after "
                f"{self.spec.deadline_s:.0f} s.",
            ) from None
        self._join()
        wall_s = self.age_s()
        rc = _read_rc(self.share / _RC_FILE)
        if rc is None or self._boot_s is None:
            raise self._lost(
                "vm-lost",
                f"The machine with kernel {self.spec.kernel.release} went away "
                f"after {wall_s:.0f} s without an exit status.",
            )
        return VmResult(rc, self.output, self.console, self.splats(), self._boot_s, wall_s)

    def splats(self) -> tuple[str, ...]:
        """Return the lines so far in which the kernel complains about itself."""
        return find_splats("\n".join(tail_of(self.console, sys.maxsize)))

    def age_s(self) -> float:
        """Return how long ago the machine was started; what it ran for, once it has ended."""
        return (self._ended_s or time.monotonic()) - self._started_s

    def kill(self) -> None:
        """End the machine at once, if it runs. May be called again."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            # its child, the first process of the PID namespace, gets SIGKILL and takes all along
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            process.wait()
        self._join()
        for path in (self.share / _TAR_FILE, *self.share.glob("virtme_ret*")):
            path.unlink(missing_ok=True)

    def _pack(self) -> None:
        """Write what the guest keeps in memory into one file: reading it is one wait."""
        tree = self.spec.tree.resolve()
        paths = [tree, *_python_dirs(), *_program_files(self.spec.programs), *_root_links()]
        excludes = [f"--exclude={name}" for name in _NOT_PACKED]
        names = [str(path).lstrip("/") for path in dict.fromkeys(paths)]
        _run(
            [
                "tar",
                "-C",
                "/",
                "-b",
                _TAR_BLOCKS,
                *excludes,
                "-cf",
                str(self.share / _TAR_FILE),
                *names,
            ]
        )

    def _join(self) -> None:
        if self._ended_s is None:
            self._ended_s = time.monotonic()
        for pump in self._pumps:
            pump.join(10.0)

    def _pump(self, stream: IO[bytes], target: Path, is_output: bool) -> None:
        with stream, target.open("wb") as file:
            for raw in stream:
                line = raw.replace(b"\r", b"").decode(errors="replace")
                if is_output and self._boot_s is None and line.strip() == _UP_WORD:
                    self._boot_s = time.monotonic() - self._started_s
                    continue
                file.write(line.encode())
                file.flush()
                if is_output and self._on_output is not None:
                    self._on_output(line.rstrip("\n"))

    def _lost(self, reference: str, message: str) -> VmLostError:
        details = [f"kernel: {line}" for line in self.splats()]
        details += [f"console: {line}" for line in tail_of(self.console)]
        details += [f"output: {line}" for line in tail_of(self.output)]
        return VmLostError(
            reference, message, hint=f"all of it: {self.console}, {self.output}", details=details
        )


def boot(
    spec: VmSpec,
    argv: Sequence[str],
    share: Path,
    *,
    on_output: Callable[[str], None] | None = None,
    environment: dict[str, str] | None = None,
) -> VmResult:
    """Return what `argv` left behind after it ran in a machine of its own.

    Args and Effects as `Vm`; Raises as `require_host` and `Vm.wait`.
    """
    with Vm(spec, argv, share, on_output=on_output, environment=environment) as machine:
        return machine.wait()


def _host_argv(spec: VmSpec, share: Path, script: Path) -> list[str]:
    """Return the command that runs the machine and cannot outlive us."""
    argv = ["setpriv", "--pdeathsig", "KILL"]
    argv += ["unshare", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]
    argv += [sys.executable, "-B", "-m", "shapeagent.lab.vm_launch"]
    argv += ["--kimg", str(spec.kernel.path), "--mods", "auto", "--user", "root"]
    argv += ["--verbose", "--show-boot-console"]
    argv += ["--disable-kvm", "--disable-monitor", "--disable-microvm", "--force-9p"]
    argv += ["--cpus", str(spec.cpus), "--memory", f"{spec.memory_mb}M"]
    argv += ["--cwd", str(spec.tree), "--rwdir", str(share)]
    # Warnings and worse on the console, each character of which costs time. The stall and lock-up
    # detectors count in real time, of which a busy host may take a lot away.
    words = ["loglevel=5", "watchdog_thresh=60", "rcupdate.rcu_cpu_stall_timeout=120"]
    # Emulated, a mitigation or a wide vector instruction is only slow.
    words += ["mitigations=off", "random.trust_cpu=on"]
    for word in (*words, *spec.kernel_words):
        argv += ["--kopt", word]
    argv += ["--script-sh", f"/bin/sh {shlex.quote(str(script))}"]
    # virtme's own port waits for udev, whose time-out passes in virtual time: a port of ours.
    argv += ["--qemu-opts", "-cpu", "qemu64,+rdrand", "-device", "virtio-serial-pci"]
    argv += ["-chardev", "file,id=shapectl,path=/proc/self/fd/1"]
    argv += ["-device", f"virtserialport,name={_PORT},chardev=shapectl"]
    if spec.virtual_time:
        argv += ["-icount", "shift=0,sleep=off", "-rtc", "clock=vm"]
    return argv


def _python_dirs() -> tuple[Path, ...]:
    """Return the library of the Python that runs us, and Debian's packages with BCC."""
    found = [Path(sysconfig.get_path("stdlib")), Path("/usr/lib/python3/dist-packages/bcc")]
    return tuple(path for path in found if path.is_dir())


def _root_links() -> tuple[Path, ...]:
    """Return `/bin`, `/lib` and their like where they are links, which 9p never caches."""
    return tuple(path for path in Path("/").iterdir() if path.is_symlink())


def _program_files(more: Sequence[str]) -> tuple[Path, ...]:
    """Return the files of the programs that are here, and of the libraries they load."""
    found: dict[Path, None] = {}
    programs = [shutil.which(name, path=_GUEST_PATH) for name in (*PROGRAMS, *more)]
    here = [name for name in programs if name is not None]
    python = os.path.realpath(sys.executable)
    done = subprocess.run(
        ["ldd", *here, python], capture_output=True, text=True, check=False, timeout=60
    )
    libraries = re.findall(r"(?:=> |^\s+)(/\S+) \(0x", done.stdout, re.M)
    for name in (*here, python, *libraries):
        # Debian's /bin, /sbin and /lib are links into /usr; a link there is kept as one.
        path = Path(os.path.realpath(os.path.dirname(name)), os.path.basename(name))
        while path.is_symlink():
            found[path] = None
            target = path.parent / path.readlink()
            path = Path(os.path.realpath(target.parent), target.name)
        found[path] = None
    found.update(dict.fromkeys(path for path in _ETC_FILES if path.exists()))
    return tuple(path for path in found if path.is_relative_to("/usr") or path in _ETC_FILES)


def _run(argv: Sequence[str]) -> None:
    """Run a program to its end. Raises FailedError (vm-pack-failed)."""
    done = subprocess.run(list(argv), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise FailedError("vm-pack-failed", f"{argv[0]}: {done.stderr.strip()[-400:]}")


def _guest_script(spec: VmSpec, share: Path) -> str:
    """Return the script that makes the guest's root and hands over to the command's."""
    memory, here = _MEMORY_DIR, shlex.quote(str(share))
    modules = shlex.quote(str(spec.kernel.modules))
    whole = [shlex.quote(str(path)) for path in (spec.tree.resolve(), *_python_dirs())]
    layers = f"lowerdir={memory}/packed:/,upperdir={memory}/own,workdir={memory}/work"
    return "\n".join(
        [
            "# Written by shapeagent.lab.vm; runs as root in the guest.",
            f"export PATH={_GUEST_PATH}",
            "modprobe -q virtio_console",
            f"port=$(grep -lx {_PORT} /sys/class/virtio-ports/*/name) || exit 125",
            'port=${port%/name}; exec >"/dev/${port##*/}" 2>&1 </dev/null',
            "mountpoint -q /run || mount -t tmpfs tmpfs /run",
            "mountpoint -q /sys/fs/bpf || mount -t bpf -o mode=0700 bpf /sys/fs/bpf",
            f"mountpoint -q {_SECURITY_DIR} || mount -t securityfs securityfs {_SECURITY_DIR}",
            "mountpoint -q /dev/shm || { mkdir -p /dev/shm; mount -t tmpfs tmpfs /dev/shm; }",
            f"mount -t tmpfs -o size=75% tmpfs {memory} || exit 125",
            f"mkdir {memory}/packed {memory}/own {memory}/work {memory}/root",
            f"tar -C {memory}/packed -b {_TAR_BLOCKS} -xf {here}/{_TAR_FILE} || exit 125",
            # A file is looked up in the first layer that has it: packed ones never ask the host.
            f"mount -t overlay -o {layers} overlay {memory}/root || exit 125",
            # Folders bound over the overlay, whose own folders are always asked in each layer.
            *(f"mount --bind {memory}/packed{one} {memory}/root{one} || exit 125" for one in whole),
            f"own={memory}/root/usr/lib/modules/{spec.kernel.release}",
            # The package of its headers leaves a folder there too, without modules.
            '[ -e "$own/modules.dep" ] || { rm -rf "$own"; mkdir -p "${own%/*}";',
            f'  ln -s {modules} "$own"; }} || exit 125',
            f"for place in proc sys dev {here.lstrip('/')}; do mkdir -p {memory}/root/$place;",
            f"  mount --rbind /$place {memory}/root/$place || exit 125; done",
            f"mount -t tmpfs tmpfs {memory}/root/run",
            f"mkdir -p {memory}/root/run/netns {memory}/root/run/lock {memory}/root{_GUEST_TMP}",
            f"exec chroot {memory}/root /bin/sh {here}/{_COMMAND_FILE}",
            "",
        ]
    )


def _command_script(
    spec: VmSpec, argv: Sequence[str], share: Path, environment: dict[str, str]
) -> str:
    """Return the script that runs `argv` in the guest's root and keeps its exit status."""
    words = {
        "HOME": _GUEST_TMP,
        "TMPDIR": _GUEST_TMP,
        "PYTHONUNBUFFERED": "1",
        **environment,
    }
    exports = [f"export {name}={shlex.quote(value)}" for name, value in words.items()]
    tree, rc_file = shlex.quote(str(spec.tree.resolve())), shlex.quote(str(share / _RC_FILE))
    return "\n".join(
        [
            "# Written by shapeagent.lab.vm; runs as root in the guest.",
            *exports,
            "unset PYTHONDONTWRITEBYTECODE",
            "ip link set lo up",
            "sysctl -q -w kernel.hung_task_timeout_secs=240",
            f"modprobe -q -a {' '.join(MODULES)}",
            f"cd {tree} || exit 125",
            f"echo {shlex.quote(_UP_WORD)}",
            f"{shlex.join(argv)}",
            "rc=$?",
            f"echo $rc >{rc_file}.new && mv {rc_file}.new {rc_file}",
            "exit $rc",
            "",
        ]
    )


def _read_rc(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
