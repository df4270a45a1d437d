# SPDX-License-Identifier: Apache-2.0
"""A small machine in virtual time: one kernel, and a root file system that is all in memory.

The guest's clock counts instructions and jumps over idle time. A guest that
waits for a disk is idle, so a machine whose programs lie on a disk, or on the
host (`lab/vm.py`), lives through seconds in the middle of a measurement. This
one has no disk: Python, our sources, `ip`, `tc` and the kernel's modules travel
in its initrd. Only the rows leave it, through a folder of the host, between cells.
"""

from __future__ import annotations

import contextlib
import io
import lzma
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from shapeagent.lab.vm import KernelImage, VmLostError, find_splats, tail_of
from shapeagent.model.errors import UnsupportedError

MODULES = (
    *("sch_htb", "sch_tbf", "sch_prio", "sch_fq", "sch_netem", "sch_cake", "sch_fq_codel"),
    *("sch_ingress", "cls_bpf", "cls_u32", "cls_flower", "cls_matchall", "act_mirred"),
    *("act_police", "ifb", "veth", "dummy", "9pnet_virtio", "9p"),
)
PROGRAMS = ("ip", "tc")
# What shapectl imports outside the standard library, to attach without compiling.
PACKAGES = (
    *("pydantic", "pydantic_core", "annotated_types", "typing_extensions.py"),
    *("typing_inspection", "click", "rich", "markdown_it", "mdurl", "pygments"),
)
_LIBRARY_LEFT_OUT = {
    *("test", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip", "pydoc_data"),
    *("distutils", "unittest", "config-3.11-x86_64-linux-gnu"),
}
_SHARE_TAG, _SHARE_DIR = "share", "/share"
_SITE_DIR = "/opt/site"
_TREE_DIR = "/opt/shapectl"
_CONSOLE_FILE, _OUTPUT_FILE, _RC_FILE = "console.log", "output.log", "guest.rc"
_INITRD_FILE = "initrd.cpio"
_POLL_S = 0.2
_MITIGATIONS = "mitigations=off"  # an instruction costs 1 ns whatever it is; see docs


@dataclass(slots=True)
class _Archive:
    """A cpio archive as the kernel's initramfs takes it (newc). Source: cpio(5)."""

    _file: io.BufferedWriter
    _known: set[str] = field(default_factory=set)
    _number: int = 0

    def directory(self, name: str) -> None:
        """Add a folder and the folders above it."""
        parts = name.strip("/").split("/")
        for end in range(1, len(parts) + 1):
            path = "/".join(parts[:end])
            if path and path not in self._known:
                self._entry(path, stat.S_IFDIR | 0o755, b"")

    def file(self, name: str, data: bytes, mode: int = 0o644, mtime_s: int = 0) -> None:
        """Add a regular file."""
        if name.strip("/") in self._known:
            return
        self.directory(os.path.dirname(name))
        self._entry(name.strip("/"), stat.S_IFREG | mode, data, mtime_s)

    def link(self, name: str, target: str) -> None:
        """Add a symbolic link."""
        if name.strip("/") in self._known:
            return
        self.directory(os.path.dirname(name))
        self._entry(name.strip("/"), stat.S_IFLNK | 0o777, target.encode())

    def host_file(self, path: Path, name: str | None = None) -> None:
        """Add a file of the host under its own name, or another; links are followed."""
        mode = 0o755 if os.access(path, os.X_OK) else 0o644
        # Python's compiled files name the time of their source.
        self.file(name or str(path), path.read_bytes(), mode, int(path.stat().st_mtime))

    def tree(self, source: Path, name: str, left_out: Iterable[str] = ()) -> None:
        """Add all files below a folder of the host."""
        banned = set(left_out)
        for folder, folders, files in os.walk(source):
            folders[:] = sorted(one for one in folders if one not in banned)
            inside = os.path.relpath(folder, source)
            for one in sorted(files):
                self.host_file(Path(folder, one), os.path.normpath(f"{name}/{inside}/{one}"))

    def close(self) -> None:
        """Write the end mark."""
        self._entry("TRAILER!!!", 0, b"")

    def _entry(self, name: str, mode: int, data: bytes, mtime_s: int = 0) -> None:
        self._known.add(name)
        self._number += 1
        raw = name.encode() + b"\0"
        links = 2 if stat.S_ISDIR(mode) else 1
        fields = (self._number, mode, 0, 0, links, mtime_s, len(data), 0, 0, 0, 0, len(raw), 0)
        head = b"070701" + b"".join(b"%08x" % one for one in fields) + raw
        self._file.write(head + bytes(-len(head) % 4) + data + bytes(-len(data) % 4))


def build_initrd(
    target: Path, kernel: KernelImage, tree: Path, *, images: Path, programs: Sequence[str] = ()
) -> None:
    """Write the guest's whole root file system to `target`.

    Args:
        tree: a checkout; its `agent`, `ctl` and `bpf` are taken.
        images: the folder of compiled classifiers, so that the guest needs no compiler.
        programs: more programs of the host, with the libraries they load.

    Raises:
        UnsupportedError: a program is not installed (tool-missing, busybox-missing).
    """
    with target.open("wb") as file:
        archive = _Archive(file)
        for name in ("dev", "proc", "sys", "tmp", "run", "root", "etc", _SHARE_DIR):
            archive.directory(name)
        busybox = shutil.which("busybox")
        if busybox is None:
            raise UnsupportedError(
                "busybox-missing", "busybox is not installed.", hint="sudo make setup-vm"
            )
        archive.host_file(Path(busybox), "/bin/busybox")
        archive.link("/bin/sh", "busybox")
        archive.file("/init", _INIT.encode(), 0o755)
        archive.file("/etc/passwd", b"root:x:0:0:root:/root:/bin/sh\n")
        archive.file("/etc/group", b"root:x:0:\n")
        for name in ("bin", "sbin"):
            archive.directory(f"/usr/{name}")
        python = Path(os.path.realpath("/usr/bin/python3"))
        library = Path(f"/usr/lib/python3.{sys.version_info.minor}")
        archive.tree(library, str(library), _LIBRARY_LEFT_OUT)
        site = Path(sys.prefix) / "lib" / library.name / "site-packages"
        for name in PACKAGES:
            source = site / name
            if source.is_dir():
                archive.tree(source, f"{_SITE_DIR}/{name}")
            elif source.exists():
                archive.host_file(source, f"{_SITE_DIR}/{name}")
        for name in ("agent", "ctl"):
            archive.tree(tree / name, f"{_TREE_DIR}/{name}")
        archive.tree(tree / "bpf", f"{_TREE_DIR}/agent/shapeagent/bpf")  # as in a wheel
        archive.tree(images, "/var/cache/shapectl/images")
        binaries = [python, *(_program(name) for name in (*PROGRAMS, *programs))]
        for path in binaries:
            archive.host_file(path, f"/usr/bin/{path.name}")
        archive.link("/usr/bin/python3", python.name)
        extensions = [
            *library.rglob("*.so"),
            *(one for p in PACKAGES for one in (site / p).rglob("*.so")),
        ]
        for path in _libraries([*binaries, *extensions]):
            archive.host_file(path)
        modules = _modules(kernel)
        for number, module in enumerate(modules):
            data = module.read_bytes()
            if module.suffix == ".xz":
                data = lzma.decompress(data)
            archive.file(f"/modules/{number:03}-{module.name.split('.')[0]}.ko", data)
        archive.close()


_INIT = f"""#!/bin/busybox sh
b=/bin/busybox
$b mount -t devtmpfs dev /dev
$b mount -t proc proc /proc
$b mount -t sysfs sys /sys
$b mount -t tmpfs tmpfs /tmp
$b mount -t tmpfs tmpfs /run
$b mkdir -p /run/netns /dev/pts /dev/shm
$b mount -t bpf -o mode=0700 bpf /sys/fs/bpf
$b chmod 700 /var/cache/shapectl /var/cache/shapectl/images
for module in /modules/*.ko; do $b insmod $module; done
$b rm -r /modules
$b mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144 {_SHARE_TAG} {_SHARE_DIR}
$b --install -s /bin
export PATH=/usr/bin:/usr/sbin:/bin:/sbin HOME=/root
export PYTHONPATH={_TREE_DIR}/agent:{_TREE_DIR}/ctl:{_SITE_DIR}
ip link set lo up
echo 4 > /proc/sys/kernel/printk
cd {_TREE_DIR}
sh {_SHARE_DIR}/command.sh > {_SHARE_DIR}/{_OUTPUT_FILE} 2>&1
echo $? > {_SHARE_DIR}/{_RC_FILE}
$b sync
$b poweroff -f
"""


def _program(name: str) -> Path:
    path = f"/usr/bin:/usr/sbin:/bin:/sbin:{os.environ.get('PATH', '')}"
    found = shutil.which(name, path=path)
    if found is None:
        raise UnsupportedError(
            "tool-missing", f"{name} is not installed.", hint="sudo make setup-vm"
        )
    return Path(found)


def _libraries(files: Sequence[Path]) -> list[Path]:
    """Return the shared libraries that `files` load, the loader included."""
    done = subprocess.run(
        ["ldd", *map(str, files)], capture_output=True, text=True, check=False, timeout=120
    )
    return sorted(
        {Path(name) for name in re.findall(r"(?:=> |^\s+)(/\S+) \(0x", done.stdout, re.M)}
    )


def _modules(kernel: KernelImage) -> list[Path]:
    """Return the files of MODULES and of what they need, in order of loading."""
    found: dict[Path, None] = {}
    for name in MODULES:
        done = subprocess.run(
            [
                *("/sbin/modprobe", "-d", str(kernel.modules.parents[2])),
                *("-S", kernel.release, "--show-depends", name),
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        for line in done.stdout.splitlines():
            words = line.split()
            if words and words[0] == "insmod":
                found[Path(words[1])] = None
    return list(found)


@dataclass(frozen=True, slots=True)
class GuestResult:
    """What came back. `rc` is the command's exit status; `wall_s` is the host's time."""

    rc: int
    output: Path
    console: Path
    splats: tuple[str, ...]
    wall_s: float


class Guest:
    """A running machine; leaving the context ends it, and so does the end of this process.

    Effects: writes into `share`, which the guest sees as /share.
    """

    def __init__(
        self, kernel: KernelImage, initrd: Path, share: Path, command: str, *, memory_mb: int = 1536
    ) -> None:
        self.share = share.resolve()
        self._kernel = kernel
        self._initrd = initrd
        self._command = command
        self._memory_mb = memory_mb
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0

    @property
    def console(self) -> Path:
        """What the kernel said."""
        return self.share / _CONSOLE_FILE

    @property
    def output(self) -> Path:
        """What the command printed."""
        return self.share / _OUTPUT_FILE

    def __enter__(self) -> Self:
        qemu = shutil.which("qemu-system-x86_64")
        if qemu is None:
            raise UnsupportedError(
                "qemu-missing", "qemu-system-x86_64 is not installed.", hint="sudo make setup-vm"
            )
        self.share.mkdir(parents=True, exist_ok=True)
        for name in (_CONSOLE_FILE, _OUTPUT_FILE, _RC_FILE):
            (self.share / name).unlink(missing_ok=True)
        (self.share / "command.sh").write_text(self._command)
        argv = ["setpriv", "--pdeathsig", "KILL", qemu, "-nodefaults", "-no-user-config"]
        argv += ["-machine", "pc,accel=tcg", "-cpu", "qemu64,+rdrand", "-smp", "1"]
        argv += ["-m", f"{self._memory_mb}M", "-display", "none", "-no-reboot"]
        argv += ["-icount", "shift=0,sleep=off", "-rtc", "clock=vm,base=2026-01-01"]
        argv += ["-kernel", str(self._kernel.path), "-initrd", str(self._initrd)]
        argv += ["-append", f"console=ttyS0 quiet panic=-1 {_MITIGATIONS} random.trust_cpu=on"]
        argv += ["-serial", f"file:{self.console}"]
        argv += ["-virtfs", f"local,path={self.share},mount_tag={_SHARE_TAG},security_model=none"]
        self._started_s = time.monotonic()
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            process.wait()
        if process is not None and process.stderr is not None:
            process.stderr.close()

    def is_running(self) -> bool:
        """Return True until the machine has powered off."""
        assert self._process is not None, "the machine was not started"
        return self._process.poll() is None

    def result(self) -> GuestResult:
        """Return what a machine that has powered off left behind. Raises VmLostError (vm-lost)."""
        wall_s = time.monotonic() - self._started_s
        try:
            rc = int((self.share / _RC_FILE).read_text())
        except (FileNotFoundError, ValueError):
            raise self.lost("vm-lost", f"went away after {wall_s:.0f} s without a status") from None
        splats = find_splats(self.console.read_text(errors="replace"))
        return GuestResult(rc, self.output, self.console, splats, wall_s)

    def lost(self, reference: str, what: str) -> VmLostError:
        """Return the error of a machine that gave no answer."""
        details = [f"console: {line}" for line in tail_of(self.console)]
        details += [f"output: {line}" for line in tail_of(self.output)]
        process = self._process
        if process is not None and process.poll() not in (None, 0) and process.stderr is not None:
            words = process.stderr.read().decode(errors="replace").splitlines()
            details += [f"qemu: {line}" for line in words[-10:]]
        return VmLostError(
            reference,
            f"The machine with kernel {self._kernel.release} {what}.",
            hint=f"all of it: {self.console}, {self.output}",
            details=details,
        )
