# SPDX-License-Identifier: Apache-2.0
"""What is remembered about an attachment, with the life of its pins: until reboot.

One folder per interface under /run/shapectl, named like its pin folder. The
state is written before the first change to the kernel, with what was there,
so that a detach can put it back even if the attach did not end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from shapeagent.kernel.snapshot import DeviceSnapshot
from shapeagent.model.errors import ConflictError, FailedError, PrivilegeError
from shapeagent.model.types import DeviceFacts, GsoLimits, Hook, KernelFacts

_T = TypeVar("_T")

SCHEMA = 1
RUN_DIR = Path("/run/shapectl")
KEPT_UNDO_SUFFIX = ".kept-undo"
_LOCK_WAIT_S = 2.0
_LOCK_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class CeilingState:
    """The ceilings of one class in one direction, as last set."""

    live_bits_per_s: int
    safe_bits_per_s: int
    deadline_jiffies: int = 0


@dataclass(frozen=True, slots=True)
class AttachState:
    """Everything that a later process needs to change, explain or undo an attachment."""

    device: str
    index: int
    netns: str | None
    complete: bool
    profile: str
    profile_reason: str
    ingress: str
    shadow: bool
    link_rate_bits_per_s: int
    link_rate_source: str
    segment_limit_bytes: int
    policy_source: str
    policy_digest: str
    source_digest: str
    abi_version: int
    request: dict[str, Any]
    facts: DeviceFacts
    kernel: KernelFacts
    attached_unix_s: float
    hook: str = Hook.CLSACT.value
    clsact_created: bool = False
    bytes_before: tuple[int, int] = (0, 0)  # sent and received by the device at the attach
    gso_before: GsoLimits | None = None
    gso_set: GsoLimits | None = None
    ifb: str | None = None
    ifb_index: int = 0
    ipv6_routes: tuple[str, ...] = ()
    program_ids: dict[str, int] = field(default_factory=dict)
    spare_ids: tuple[int, ...] = ()  # programs that a swap which did not end may have put there
    verified: dict[str, int] = field(default_factory=dict)
    ceilings: dict[str, dict[str, CeilingState]] = field(default_factory=dict)
    whitelist_entries: int = 0
    whitelist_generation: int = 0
    missing_cgroups: tuple[str, ...] = ()
    device_identity: int = 0  # kernel/identity.py; 0 = not known

    @property
    def our_ids(self) -> tuple[int, ...]:
        """Every program that may stand in our place, or as our redirect."""
        return (*self.program_ids.values(), *self.spare_ids)

    def to_json(self) -> str:
        """Return the state as JSON text."""
        return json.dumps({"schema": SCHEMA, **_plain(self)}, default=_plain)

    @classmethod
    def from_json(cls, text: str) -> AttachState:
        """Return the state that `to_json` wrote.

        Raises:
            ValueError: it is damaged or of another schema.
        """
        raw = json.loads(text)
        if not isinstance(raw, dict) or raw.pop("schema", None) != SCHEMA:
            raise ValueError("unknown schema")
        try:
            raw["facts"] = DeviceFacts(**raw["facts"])
            kernel = raw["kernel"]
            raw["kernel"] = KernelFacts(**{**kernel, "qdiscs": frozenset(kernel["qdiscs"])})
            for name in ("gso_before", "gso_set"):
                raw[name] = GsoLimits(**raw[name]) if raw[name] else None
            for name in ("ipv6_routes", "missing_cgroups", "bytes_before", "spare_ids"):
                raw[name] = tuple(raw[name])
            raw["ceilings"] = {
                direction: {name: CeilingState(**item) for name, item in classes.items()}
                for direction, classes in raw["ceilings"].items()
            }
            return cls(**raw)
        except (KeyError, TypeError) as error:
            raise ValueError(f"damaged: {error}") from error


def _plain(value: Any) -> Any:
    """Return what json cannot take as what it can; asdict would copy everything first."""
    if isinstance(value, frozenset):
        return sorted(value)
    return {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}


class StateDir:
    """The folder of one interface: `state.json`, `policy.toml`, `whitelist`, and the way back.

    That is `snapshot.json`, what stood on the device before, and `undo`, the
    same as lines of `tc` and `ip`. All of them 0600.
    """

    def __init__(self, run_dir: Path, key: str) -> None:
        self.folder = run_dir / key

    def read(self) -> AttachState | None:
        """Return the state, None where nothing is attached.

        Raises:
            FailedError: "state-damaged".
        """
        return self._parsed(
            "state.json",
            AttachState.from_json,
            "shapectl detach removes what the kernel still holds",
        )

    def write(self, state: AttachState) -> None:
        """Replace the state as a whole."""
        self._write("state.json", state.to_json())

    def read_policy(self) -> str:
        """Return the TOML text of the policy in force."""
        return (self.folder / "policy.toml").read_text(encoding="utf-8")

    def write_policy(self, text: str) -> None:
        """Keep the policy in force."""
        self._write("policy.toml", text)

    def read_whitelist(self) -> str:
        """Return the whitelist as text, empty where there is none."""
        try:
            return (self.folder / "whitelist").read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    def write_whitelist(self, text: str) -> None:
        """Replace the whitelist's text as a whole."""
        self._write("whitelist", text)

    def read_confirm(self) -> str:
        """Return the note of an attach that waits for its confirmation."""
        return (self.folder / "confirm.json").read_text(encoding="utf-8")

    def write_confirm(self, text: str) -> None:
        """Keep that note."""
        self._write("confirm.json", text)

    def remove_confirm(self) -> None:
        """Remove that note; nothing waits from now on."""
        (self.folder / "confirm.json").unlink(missing_ok=True)

    def read_snapshot(self) -> DeviceSnapshot | None:
        """Return what stood on the device before, None where nobody wrote it down.

        Raises:
            FailedError: "state-damaged".
        """
        return self._parsed(
            "snapshot.json",
            DeviceSnapshot.from_json,
            f"{self.undo_path} says in words of tc what stood there",
        )

    def write_snapshot(self, snapshot: DeviceSnapshot) -> None:
        """Keep what stands on the device now."""
        self._write("snapshot.json", snapshot.to_json())

    @property
    def undo_path(self) -> Path:
        """The lines that `shapectl-panic-off` runs."""
        return self.folder / "undo"

    def write_undo(self, text: str) -> None:
        """Replace the lines that undo the attach with a shell alone."""
        self._write("undo", text)

    def keep_undo(self) -> Path:
        """Keep the lines beside the folder, for when that is removed. Returns their path."""
        kept = self.folder.with_name(f"{self.folder.name}{KEPT_UNDO_SUFFIX}")
        try:
            self.undo_path.replace(kept)
        except OSError as error:
            raise FailedError(
                "state-unwritable", f"Cannot keep {kept}: {error.strerror}."
            ) from error
        return kept

    def remove(self) -> None:
        """Remove the folder and all in it."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _parsed(self, name: str, parse: Callable[[str], _T], hint: str) -> _T | None:
        """Return what a file says, None where there is none. Raises FailedError state-damaged."""
        path = self.folder / name
        try:
            return parse(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise FailedError("state-damaged", f"{path}: {error}.", hint=hint) from error

    def _write(self, name: str, text: str) -> None:
        temporary = self.folder / f".{name}.{os.getpid()}"
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "w", encoding="utf-8") as stream:
                stream.write(text)
            # no fsync: pins and state go together at a crash of the machine
            temporary.rename(self.folder / name)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise FailedError(
                "state-unwritable", f"Cannot write {self.folder / name}: {error.strerror}."
            ) from error


def list_states(run_dir: Path) -> list[str]:
    """Return the keys of all folders that hold a state."""
    try:
        return sorted(path.parent.name for path in run_dir.glob("*/state.json"))
    except OSError:
        return []


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold the one writer's lock.

    Raises:
        ConflictError: "locked" after 2 s, with the holder's pid.
        PrivilegeError: "missing-privilege", the folder is root's.
    """
    path = run_dir / "lock"
    try:
        run_dir.mkdir(mode=0o711, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except PermissionError as error:
        raise PrivilegeError(
            "missing-privilege", f"Cannot open {path}: {error.strerror}.", hint="run it with sudo"
        ) from error
    try:
        _take(descriptor, path)
        os.pwrite(descriptor, f"{os.getpid():<20}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int, path: Path) -> None:
    deadline = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
        if time.monotonic() >= deadline:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            raise ConflictError(
                "locked",
                f"Another shapectl process is changing things (pid {holder} holds {path}).",
                hint=f"wait for it, or look at it: ps -fp {holder}",
            )
        time.sleep(_LOCK_POLL_S)
