# SPDX-License-Identifier: Apache-2.0
"""Network namespaces, links and child processes of the lab, which always go away again.

Every namespace is called `shp-<8 hex>` and has an owner file
`/run/shapectl-lab/<name>` with the pid and start time of the process that made
it. A process that ends in an orderly way, also by SIGINT, SIGTERM or SIGHUP,
removes what it made; what a SIGKILL left behind is removed by the next run,
which sees that the owner is gone. Nothing else on the host is touched.

`ip` and `tc` do the work, so that the traffic generators enter a namespace
through `ip netns exec` and this room needs no netlink code of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from shapeagent.kernel.processes import process_start_ticks
from shapeagent.model.errors import FailedError, PrivilegeError, UnsupportedError

OWNER_DIR = Path("/run/shapectl-lab")
NETNS_DIR = Path("/run/netns")
BPFFS_DIR = Path("/sys/fs/bpf")
NAME_PREFIX = "shp-"
COMMAND_TIMEOUT_S = 20.0
CHILD_GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class PrivateDirs:
    """Where an engine that runs for one lab namespace keeps its state; removed with it."""

    run_dir: Path
    bpffs_dir: Path


@dataclass(frozen=True, slots=True)
class Port:
    """One end of a link: a device in a namespace, with its addresses."""

    namespace: str
    device: str
    ipv4: str
    ipv6: str


@dataclass(frozen=True, slots=True)
class RoutedPath:
    """sender -> router -> receiver. The wire is `router_egress`, the last hop's queue.

            sender             router              receiver
        [ sender_port ]--[ router_in | router_egress ]--[ receiver_port ]

    What the receiver sends back takes the same devices the other way, where
    nothing is queued.
    """

    sender: str
    router: str
    receiver: str
    sender_port: Port
    router_egress: Port
    receiver_port: Port


def run_command(argv: Sequence[str], *, stdin: str | None = None) -> str:
    """Return what `argv` printed.

    The child gets a session of its own: a Ctrl-C on the terminal must reach us,
    not an `ip netns delete` in the middle of the clean-up.

    Raises:
        UnsupportedError: the program is not installed (tool-missing).
        FailedError: it failed or took too long (lab-command-failed).
    """
    try:
        done = subprocess.run(
            list(argv),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            start_new_session=True,
            check=False,
        )
    except FileNotFoundError as error:
        raise UnsupportedError(
            "tool-missing",
            f"{argv[0]} is not installed.",
            hint="apt-get install iproute2",
        ) from error
    except subprocess.TimeoutExpired as error:
        raise FailedError(
            "lab-command-failed", f"{' '.join(argv)} took over {COMMAND_TIMEOUT_S:.0f} s."
        ) from error
    if done.returncode != 0:
        raise FailedError(
            "lab-command-failed",
            f"{' '.join(argv)}: {(done.stderr or done.stdout).strip()}",
        )
    return done.stdout


def run_in(namespace: str, *argv: str) -> str:
    """Return what `argv` printed inside `namespace`. Raises as `run_command`."""
    return run_command(["ip", "netns", "exec", namespace, *argv])


def ip_batch(namespace: str | None, lines: Sequence[str]) -> None:
    """Run `ip` once for all `lines`, inside `namespace` or on the host. Raises as above."""
    where = [] if namespace is None else ["-n", namespace]
    run_command(["ip", *where, "-batch", "-"], stdin="\n".join(lines) + "\n")


def require_root() -> None:
    """Raise PrivilegeError (need-root) unless we may make namespaces."""
    if os.geteuid() != 0:
        raise PrivilegeError(
            "need-root", "Making network namespaces needs root.", hint="sudo shapectl demo"
        )


def private_dirs(namespace: str) -> PrivateDirs:
    """Return the folders that go away together with `namespace`; neither is made here."""
    return PrivateDirs(run_dir=OWNER_DIR / f"{namespace}.run", bpffs_dir=BPFFS_DIR / namespace)


class Lab:
    """A set of namespaces and child processes with one owner: this process.

    Effects: makes namespaces under /run/netns and owner files under
        /run/shapectl-lab.
    Undo: leaving the context; after a SIGKILL, `sweep_leftovers()`.
    """

    def __init__(self) -> None:
        self._namespaces: list[str] = []
        self._children: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        require_root()
        sweep_leftovers()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Twice on purpose: a signal that arrives during the first round raises
        # once (InterruptGuard) and the second round then runs to its end.
        try:
            self.close()
        finally:
            self.close()

    def add_namespace(self) -> str:
        """Return the name of a new namespace with its loopback up."""
        name = NAME_PREFIX + secrets.token_hex(4)
        self._namespaces.append(name)
        _write_owner(name)
        run_command(["ip", "netns", "add", name])
        ip_batch(name, ["link set lo up"])
        return name

    def spawn(
        self, namespace: str, argv: Sequence[str], environment: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Return a child with piped stdin and stdout that runs `argv` inside `namespace`.

        `ip netns exec` replaces itself by the program, so the pid is the program's.
        """
        child = subprocess.Popen(
            ["ip", "netns", "exec", namespace, *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        self._children.append(child)
        return child

    def end_children(self) -> None:
        """End the children of this lab, by pid, and reap them."""
        for child in self._children:
            if child.poll() is None:
                child.terminate()
        for child in self._children:
            try:
                child.wait(CHILD_GRACE_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            for stream in (child.stdin, child.stdout, child.stderr):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
        self._children.clear()

    def close(self) -> None:
        """Remove everything this lab made. May be called again."""
        self.end_children()
        errors = []
        for name in list(self._namespaces):
            try:
                _remove_namespace(name)
                self._namespaces.remove(name)
            except (OSError, FailedError) as error:
                errors.append(f"{name}: {error}")
        if errors:
            raise FailedError(
                "lab-not-clean",
                "Some lab namespaces could not be removed.",
                hint="ip netns delete NAME; the next run tries again.",
                details=errors,
            )


def sweep_leftovers() -> tuple[str, ...]:
    """Return the namespaces of owners that died, after removing them and their folders.

    Effects: removes only what has an owner file of ours whose process is gone.
    """
    removed = []
    try:
        entries = sorted(OWNER_DIR.iterdir())
    except FileNotFoundError:
        return ()
    for entry in entries:
        if not _is_lab_name(entry.name) or _owner_lives(entry):
            continue
        with contextlib.suppress(FailedError, OSError):
            _remove_namespace(entry.name)
            removed.append(entry.name)
    return tuple(removed)


def veth_pair(left: Port, right: Port, *, queues: int = 1) -> None:
    """Make a veth link between two ports, up, with IPv4 /24 and IPv6 /64 addresses.

    Args:
        queues: transmit and receive queues of either end.

    Effects: two devices; they go away with either namespace.
    """
    shape = f"numtxqueues {queues} numrxqueues {queues}"
    first = f"{left.device} netns {left.namespace} {shape}"
    second = f"{right.device} netns {right.namespace} {shape}"
    ip_batch(None, [f"link add {first} type veth peer name {second}"])
    for port in (left, right):
        ip_batch(
            port.namespace,
            [
                f"address add {port.ipv4}/24 dev {port.device}",
                # Without nodad the address is tentative, and unusable, for over a second.
                f"address add {port.ipv6}/64 dev {port.device} nodad",
                f"link set {port.device} up",
            ],
        )


def set_sysctls(namespace: str, values: dict[str, str]) -> None:
    """Write sysctls below /proc/sys/net inside `namespace`, which are its own."""
    script = "\n".join(
        f"echo '{value}' > /proc/sys/{key.replace('.', '/')}" for key, value in values.items()
    )
    run_in(namespace, "sh", "-ec", script)


@contextlib.contextmanager
def routed_path(*, queues: int = 1) -> Iterator[tuple[Lab, RoutedPath]]:
    """Give a lab with a sender, a router and a receiver, both address families routed.

    TCP forgets what it learned about the path at the end of a connection, so
    that a second run does not profit from the first.
    """
    with Lab() as lab:
        sender, router, receiver = (lab.add_namespace() for _ in range(3))
        sender_port = Port(sender, "a0", "198.18.1.1", "2001:db8:1::1")
        router_in = Port(router, "ra0", "198.18.1.254", "2001:db8:1::fe")
        router_egress = Port(router, "rb0", "198.18.2.254", "2001:db8:2::fe")
        receiver_port = Port(receiver, "b0", "198.18.2.1", "2001:db8:2::1")
        veth_pair(sender_port, router_in, queues=queues)
        veth_pair(router_egress, receiver_port, queues=queues)
        set_sysctls(router, {"net.ipv4.ip_forward": "1", "net.ipv6.conf.all.forwarding": "1"})
        for port, gateway in ((sender_port, router_in), (receiver_port, router_egress)):
            ip_batch(
                port.namespace,
                [f"route add default via {gateway.ipv4}", f"route add default via {gateway.ipv6}"],
            )
            set_sysctls(port.namespace, {"net.ipv4.tcp_no_metrics_save": "1"})
        yield lab, RoutedPath(sender, router, receiver, sender_port, router_egress, receiver_port)


def _is_lab_name(name: str) -> bool:
    digits = name.removeprefix(NAME_PREFIX)
    return (
        name.startswith(NAME_PREFIX)
        and len(digits) == 8
        and all(digit in "0123456789abcdef" for digit in digits)
    )


def _write_owner(name: str) -> None:
    OWNER_DIR.mkdir(mode=0o700, parents=True, exist_ok=True)
    owner = {"pid": os.getpid(), "start_ticks": process_start_ticks(os.getpid())}
    # Under a name that no sweep looks at until it is whole.
    partial = OWNER_DIR / f".{name}"
    partial.write_text(json.dumps(owner), encoding="utf-8")
    partial.rename(OWNER_DIR / name)


def _owner_lives(owner_file: Path) -> bool:
    try:
        owner = json.loads(owner_file.read_text(encoding="utf-8"))
        start_ticks = process_start_ticks(int(owner["pid"]))
        return start_ticks is not None and start_ticks == owner["start_ticks"]
    except FileNotFoundError:
        return True  # its owner is just removing it
    except (ValueError, KeyError, TypeError):
        return False


def _remove_namespace(name: str) -> None:
    """Remove a namespace of ours, its private folders and, last, its owner file."""
    if not _is_lab_name(name):
        raise FailedError("lab-not-clean", f"{name} is not a lab namespace.")
    if (NETNS_DIR / name).exists():
        run_command(["ip", "netns", "delete", name])
    dirs = private_dirs(name)
    for folder in (dirs.run_dir, dirs.bpffs_dir):
        if folder.exists():
            shutil.rmtree(folder)
    (OWNER_DIR / f".{name}").unlink(missing_ok=True)
    (OWNER_DIR / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        OWNER_DIR.rmdir()  # only when empty; somebody else's lab may be up
