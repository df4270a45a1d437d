# SPDX-License-Identifier: Apache-2.0
"""What is remembered about an attachment, with the life of its pins: until reboot.

One folder per interface under /run/shapectl, named like its pin folder. The
state is written before the first change to the kernel, with what was there,
so that a detach can put it back even if the attach did not end.

A file is replaced as a whole: written beside, fsync, rename, fsync of the
folder. Each can tell that it is damaged, and is then read from the copy that
the kernel keeps beside the pins (`recovering` puts the file right).
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from shapeagent.kernel import kept
from shapeagent.kernel.snapshot import DeviceSnapshot
from shapeagent.model.errors import ConflictError, FailedError, PrivilegeError
from shapeagent.model.types import DeviceFacts, GsoLimits, Hook, KernelFacts
from shapeagent.service import listfacts

_T = TypeVar("_T")
Stamp = tuple[int, int, int] | None  # what changes with a file; None where there is none
Files = tuple[Stamp, ...]

SCHEMA = 1
RUN_DIR = Path("/run/shapectl")
KEPT_UNDO_SUFFIX = ".kept-undo"
UNDO_HEADER = "# shapectl-undo 1"
#: Files of which the kernel keeps a copy, the state first: what the others must agree with.
KEPT_FILES = ("state.json", "policy.toml", "snapshot.json", "undo", "confirm.json")
_SEAL = '{"checksum": "'
_SEALED_AT = len(_SEAL) + 8
_LIST_SEAL = "# crc32 "
_CORRUPT = ".corrupt-"
_MOST_CORRUPT = 8  # of one folder
LOCK_WAIT_S = 2.0
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
    whitelist_entries: int = 0  # at the last swap of the lists; `StateDir.whitelist_facts` knows
    whitelist_generation: int = 0
    missing_cgroups: tuple[str, ...] = ()
    device_identity: int = 0  # kernel/identity.py; 0 = not known
    recovered: tuple[str, ...] = ()  # what was damaged and put right, for status

    @property
    def our_ids(self) -> tuple[int, ...]:
        """Every program that may stand in our place, or as our redirect."""
        return (*self.program_ids.values(), *self.spare_ids)

    def to_json(self) -> str:
        """Return the state as JSON text."""
        return json.dumps({"schema": SCHEMA, **_plain(self)}, default=_plain)

    @classmethod
    def from_json(cls, text: str, *, is_whole: bool = False) -> AttachState:
        """Return the state that `to_json` wrote.

        Args:
            is_whole: its checksum agreed: what is not known is news, and no damage.

        Raises:
            ValueError: it is damaged.
            ConflictError: "state-other-version".
        """
        raw = json.loads(text)
        if not isinstance(raw, dict) or "schema" not in raw:
            raise ValueError("it is no state")
        schema = raw.pop("schema")
        if schema != SCHEMA:
            raise _other_version(f"schema {schema}, and this shapectl knows {SCHEMA}")
        unknown = sorted(raw.keys() - {one.name for one in dataclasses.fields(cls)})
        if unknown and is_whole:
            raise _other_version(f"fields that this shapectl does not know: {', '.join(unknown)}")
        try:
            raw["facts"] = DeviceFacts(**raw["facts"])
            kernel = raw["kernel"]
            raw["kernel"] = KernelFacts(**{**kernel, "qdiscs": frozenset(kernel["qdiscs"])})
            for name in ("gso_before", "gso_set"):
                raw[name] = GsoLimits(**raw[name]) if raw[name] else None
            for name in ("ipv6_routes", "missing_cgroups", "bytes_before", "spare_ids"):
                raw[name] = tuple(raw[name])
            raw["recovered"] = tuple(raw.get("recovered", ()))
            raw["ceilings"] = {
                direction: {name: CeilingState(**item) for name, item in classes.items()}
                for direction, classes in raw["ceilings"].items()
            }
            return cls(**raw)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"damaged: {error}") from error


def _other_version(why: str) -> ConflictError:
    return ConflictError(
        "state-other-version",
        f"The attachment was made by another version of shapectl: its state has {why}.",
        hint="use the shapectl that attached it; shapectl-panic-off undoes it without any",
    )


def _plain(value: Any) -> Any:
    """Return what json cannot take as what it can; asdict would copy everything first."""
    if isinstance(value, frozenset):
        return sorted(value)
    return {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}


def seal(text: str) -> str:
    """Return the text of a JSON object with its checksum as the first member."""
    return f'{_SEAL}{zlib.crc32(text.encode()):08x}", {text[1:]}'


def unseal(text: str) -> str:
    """Return the text without its checksum; one without a checksum, of an older version, as it is.

    Raises: ValueError where they disagree.
    """
    if not text.startswith(_SEAL):
        return text
    inner = "{" + text[_SEALED_AT + 3 :]
    if text != seal(inner):
        raise ValueError("its checksum does not agree")
    return inner


class Staged:
    """A file that is written and not yet in its place, where only the kernel can refuse.

    Args:
        lasting: whether it outlasts a crash of the machine whole; else `StateDir.sync` later.
    """

    def __init__(self, store: StateDir, name: str, text: str, *, lasting: bool = True) -> None:
        self._store = store
        self._name = name
        self._data = text.encode()
        self._temporary = store.folder / f".{name}.{os.getpid()}"
        try:
            store.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_down(self._temporary, self._data, lasting=lasting)
        except OSError as error:
            self.drop()
            raise unwritable(store.folder / name, error) from error

    def commit(self) -> None:
        """Put it in its place, and give the kernel its copy."""
        try:
            self._temporary.rename(self._store.folder / self._name)
        except OSError as error:
            self.drop()
            raise unwritable(self._store.folder / self._name, error) from error
        self._store.keep_copy(self._name, self._data)

    def drop(self) -> None:
        """Leave the file as it was."""
        with contextlib.suppress(OSError):
            self._temporary.unlink(missing_ok=True)


def unwritable(path: Path, error: OSError) -> FailedError:
    """Return the error of a state that cannot be written."""
    return FailedError(
        "state-unwritable",
        f"Cannot write {path}: {error.strerror}.",
        hint=f"is its file system full or read-only? df {path.parent}",
    )


def write_down(path: Path, data: bytes, *, lasting: bool) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
        if lasting:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class StateDir:
    """The folder of one interface: `state.json`, `policy.toml`, `whitelist.log`, and the way back.

    That is `snapshot.json`, what stood on the device before, and `undo`, the
    same as lines of `tc` and `ip`. All of them 0600. `keptpolicy` keeps the policy
    resolved there.

    Args:
        pins: the attachment's pin folder, with the kernel's copies; None: without them.
    """

    def __init__(self, run_dir: Path, key: str, pins: Path | None = None) -> None:
        self.folder = run_dir / key
        self.pins = pins

    def stamp(self, name: str = KEPT_FILES[0]) -> Stamp:
        """Return what changes whenever a file is written; None where there is none."""
        try:
            found = os.stat(self.folder / name)
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def stamps(self) -> Files:
        """Return the stamps of the files that `damage` looks into, but for the whitelist's."""
        return tuple(map(self.stamp, KEPT_FILES))

    def read(self) -> AttachState | None:
        """Return the state, None where nothing is attached.

        Raises:
            FailedError: "state-damaged".
            ConflictError: "state-other-version".
        """
        return self._load(
            "state.json", _parse_state, "shapectl detach removes what the kernel still holds"
        )

    def write(self, state: AttachState) -> None:
        """Replace the state as a whole; it and what was written before it last from then on."""
        Staged(self, "state.json", seal(state.to_json())).commit()
        self._sync_folder()

    @contextlib.contextmanager
    def writing(self, state: AttachState, *, lasting: bool = True) -> Iterator[None]:
        """Do a change in the body, with what says so written before and in place after it.

        A full disk is so noticed before the kernel is changed. An error in the
        body leaves the file as it was.

        Args:
            lasting: see `Staged`.
        """
        staged = Staged(self, "state.json", seal(state.to_json()), lasting=lasting)
        try:
            yield
        except BaseException:
            staged.drop()
            raise
        staged.commit()
        if lasting:
            self._sync_folder()

    def sync(self) -> None:
        """Make the state outlast a crash of the machine. Raises: FailedError state-unwritable."""
        try:
            sync_path(self.folder / "state.json")
        except FileNotFoundError:
            return
        except OSError as error:
            raise unwritable(self.folder, error) from error
        self._sync_folder()

    def _sync_folder(self) -> None:
        """Make renames last: without it a crash may leave the old name, or an empty file (C44)."""
        try:
            sync_path(self.folder)
        except OSError as error:
            raise unwritable(self.folder, error) from error

    def read_policy(self, digest: str | None = None) -> str:
        """Return the TOML text of the policy in force.

        Args:
            digest: which one the state names.

        Raises: FileNotFoundError; FailedError state-damaged.
        """
        found = self._load("policy.toml", self._policy_parser(digest), _DETACH)
        if found is None:
            raise FileNotFoundError(self.folder / "policy.toml")
        return found

    def write_policy(self, text: str) -> None:
        """Keep the policy in force."""
        self._write("policy.toml", text)

    @property
    def whitelist_link(self) -> Path:
        """The log of the whitelist, or a link to where an agent keeps it over a reboot."""
        return self.folder / listfacts.FILE_NAME

    @property
    def whitelist_path(self) -> Path:
        """The log of the whitelist itself."""
        return Path(os.path.realpath(self.whitelist_link))

    def forget_whitelist(self) -> None:
        """Remove a log that is kept over a reboot; the other goes with the folder."""
        if self.whitelist_link.is_symlink():
            self.whitelist_path.unlink(missing_ok=True)

    def whitelist_facts(self, state: AttachState) -> tuple[int, int]:
        """Return how many entries the whitelist has, and its generation.

        The log knows; the state is behind it by what changed in place since the last swap.
        """
        try:
            found = listfacts.read_facts(self.whitelist_path)
        except (OSError, ValueError):
            return state.whitelist_entries, state.whitelist_generation
        return found.entries, found.generation

    @property
    def old_whitelist_path(self) -> Path:
        """The text in which earlier versions kept the whitelist; the next change takes it over."""
        return self.folder / "whitelist"

    def read_old_whitelist(self) -> str | None:
        """Return that text, None where there is none. Raises: FailedError state-damaged."""
        hint = "the next change of the whitelist reads it from the kernel"
        return self._load(self.old_whitelist_path.name, unseal_list, hint)

    def read_confirm(self) -> dict[str, Any] | None:
        """Return the note of an attach that waits for its confirmation, None where none does.

        Raises: FailedError state-damaged.
        """
        return self._load("confirm.json", _parse_note, "shapectl confirm, or detach")

    def write_confirm(self, text: str) -> None:
        """Keep that note."""
        self._write("confirm.json", seal(text))

    def remove_confirm(self) -> None:
        """Remove that note; nothing waits from now on."""
        if self.pins is not None:
            kept.forget(self.pins, "confirm.json")
        (self.folder / "confirm.json").unlink(missing_ok=True)

    def read_snapshot(self) -> DeviceSnapshot | None:
        """Return what stood on the device before, None where nobody wrote it down.

        Raises:
            FailedError: "state-damaged".
        """
        return self._load(
            "snapshot.json",
            _parse_snapshot,
            f"{self.undo_path} says in words of tc what stood there",
        )

    def write_snapshot(self, snapshot: DeviceSnapshot) -> None:
        """Keep what stands on the device now."""
        self._write("snapshot.json", seal(snapshot.to_json()))

    @property
    def undo_path(self) -> Path:
        """The lines that `shapectl-panic-off` runs."""
        return self.folder / "undo"

    def write_undo(self, text: str) -> None:
        """Replace the lines that undo the attach with a shell alone."""
        self._write("undo", text)

    def keep_undo(self) -> Path:
        """Keep the lines beside the folder, for when that is removed. Returns their path."""
        kept_at = self.folder.with_name(f"{self.folder.name}{KEPT_UNDO_SUFFIX}")
        try:
            self.undo_path.replace(kept_at)
        except OSError as error:
            raise FailedError(
                "state-unwritable", f"Cannot keep {kept_at}: {error.strerror}."
            ) from error
        return kept_at

    def remove(self) -> None:
        """Remove the folder and all in it. Raises: FailedError state-unwritable."""
        import shutil

        try:
            shutil.rmtree(self.folder)
        except FileNotFoundError:
            return
        except OSError as error:
            raise FailedError(
                "state-unwritable",
                f"Cannot remove {self.folder}: {error.strerror}.",
                hint=f"when it can be written again: rm -r -- {self.folder}",
            ) from error

    # --- damage

    def keep_copy(self, name: str, data: bytes) -> None:
        """Give the kernel its copy of a file, where it keeps one."""
        if self.pins is not None and name in KEPT_FILES:
            kept.keep(self.pins, name, data)

    def keep_copies(self) -> None:
        """Give the kernel its copies of all files, once the pin folder is made."""
        for name in KEPT_FILES:
            with contextlib.suppress(OSError):
                self.keep_copy(name, (self.folder / name).read_bytes())

    def damage(self, state: AttachState | None) -> dict[str, str]:
        """Return file → why it cannot be used; empty where all is whole.

        Args:
            state: as read, from the file or from the kernel's copy.
        """
        parsers: dict[str, Callable[[str], object]] = {
            "state.json": _checked(_parse_state),
            "policy.toml": self._policy_parser(state.policy_digest if state else None),
            "snapshot.json": _checked(_parse_snapshot),
            "undo": self._check_undo,
            "confirm.json": _checked(_parse_note),
        }
        found = {}
        for name, parse in parsers.items():
            try:
                self._parse_file(name, parse)
            except FileNotFoundError:
                if self.pins is not None and kept.is_kept(self.pins, name):
                    found[name] = "is missing"
            except ValueError as error:
                found[name] = str(error)
        if self.lacks_whitelist(state):
            found[listfacts.FILE_NAME] = "it is cut or missing"
        return found

    def lacks_whitelist(self, state: AttachState | None) -> bool:
        """Return whether the whitelist is missing or cut; its sums are compared when it is read."""
        if state is None:
            return False
        try:
            listfacts.read_facts(self.whitelist_path)
        except FileNotFoundError:
            return bool(state.whitelist_generation) and not self._has_old_whitelist()
        except (OSError, ValueError):
            return True
        return False

    def _has_old_whitelist(self) -> bool:
        """Return whether the text of an earlier version is there and not cut."""
        try:
            with self.old_whitelist_path.open("rb") as stream:
                size = stream.seek(0, os.SEEK_END)
                stream.seek(max(0, size - len(_LIST_SEAL) - 9))
                return stream.read().startswith(_LIST_SEAL.encode())
        except OSError:
            return False

    def restore_kept(self, name: str) -> bool:
        """Return whether a damaged file was put aside, with the kernel's copy in its place.

        Raises: FailedError state-unwritable.
        """
        data = self._read_kept(name)
        if data is None:
            return False
        staged = Staged(self, name, data)
        self.quarantine(name)
        staged.commit()
        return True

    def quarantine(self, name: str) -> None:
        """Move a damaged file aside; of such files the newest few stay."""
        put_aside(self.whitelist_path if name == listfacts.FILE_NAME else self.folder / name)

    def quarantined(self) -> tuple[str, ...]:
        """Return the names of the files that were put aside."""
        return tuple(sorted(one.name for one in self.folder.glob(f"*{_CORRUPT}*")))

    def _read_kept(self, name: str) -> str | None:
        if self.pins is None:
            return None
        data = kept.read_kept(self.pins, name)
        return None if data is None else data.decode(errors="replace")

    def _load(self, name: str, parse: Callable[[str], _T], hint: str) -> _T | None:
        """Return what a file says, else what the kernel's copy does, None where there is none.

        Raises: FailedError state-damaged.
        """
        why: ValueError | None = None
        try:
            return self._parse_file(name, parse)
        except FileNotFoundError:
            pass
        except ValueError as error:
            why = error
        copy = self._read_kept(name) if name in KEPT_FILES else None
        if copy is not None:
            with contextlib.suppress(ValueError):
                return parse(copy)
        if why is None:
            return None
        raise FailedError("state-damaged", f"{self.folder / name}: {why}.", hint=hint) from why

    def _parse_file(self, name: str, parse: Callable[[str], _T]) -> _T:
        """Return what a file says. Raises FileNotFoundError; ValueError where it is damaged."""
        try:
            data = (self.folder / name).read_bytes()
        except FileNotFoundError:
            raise
        except OSError as error:
            raise ValueError(f"it cannot be read: {error.strerror}") from error
        return parse(data.decode())

    def _policy_parser(self, digest: str | None) -> Callable[[str], str]:
        def parse(text: str) -> str:
            if digest is None or hashlib.sha256(text.encode()).hexdigest() == digest:
                return text
            # newer than the state, where the change was killed between the two
            if text == self._read_kept("policy.toml"):
                return text
            raise ValueError("it is not the policy that the state names")

        return parse

    def _check_undo(self, text: str) -> str:
        last = text.rstrip("\n").rpartition("\n")[2]
        if not text.startswith(UNDO_HEADER) or last != f"rm -r -f -- {self.folder}":
            raise ValueError("its lines are cut")
        return text

    def _write(self, name: str, text: str) -> None:
        Staged(self, name, text).commit()


def put_aside(path: Path) -> Path:
    """Move a damaged file to NAME.corrupt-TIME and return that; of such files the newest stay."""
    unix_s = int(time.time())
    while (aside := path.with_name(f"{path.name}{_CORRUPT}{unix_s}")).exists():
        unix_s += 1
    with contextlib.suppress(FileNotFoundError):
        path.rename(aside)
    old = sorted(path.parent.glob(f"*{_CORRUPT}*"), key=lambda one: one.lstat().st_ctime_ns)
    for one in old[:-_MOST_CORRUPT]:
        with contextlib.suppress(OSError):
            one.unlink()
    return aside


_DETACH = "shapectl detach removes what the kernel still holds"


def _parse_state(text: str) -> AttachState:
    return AttachState.from_json(unseal(text), is_whole=text.startswith(_SEAL))


def _parse_snapshot(text: str) -> DeviceSnapshot:
    return DeviceSnapshot.from_json(unseal(text))


def _parse_note(text: str) -> dict[str, Any]:
    found = json.loads(unseal(text))
    if not isinstance(found, dict) or not found.keys() >= {"token", "deadline_s", "guardian"}:
        raise ValueError("it is no note of --confirm")
    return found


def _checked(parse: Callable[[str], object]) -> Callable[[str], object]:
    """Return what finds damage: by the checksum, where there is one; that costs the least."""
    return lambda text: unseal(text) if text.startswith(_SEAL) else parse(text)


def unseal_list(text: str) -> str:
    """Return a list's text above its last line, the checksum. Raises: ValueError."""
    above, mark, checksum = text.rpartition(_LIST_SEAL)
    if not mark or checksum != f"{zlib.crc32(above.encode()):08x}\n":
        raise ValueError("it is cut or changed")
    return above


def list_states(run_dir: Path, bpffs_dir: Path | None = None) -> list[str]:
    """Return the keys of all folders that hold a state, or pins that hold a copy of one."""
    found: set[str] = set()
    with contextlib.suppress(OSError):
        found |= {path.parent.name for path in run_dir.glob("*/state.json")}
    if bpffs_dir is not None:
        with contextlib.suppress(OSError):
            pin = kept.pin_of(Path("*"), "state.json")
            found |= {path.parent.name for path in bpffs_dir.glob(str(pin))}
    return sorted(found)


@contextlib.contextmanager
def locked(
    run_dir: Path,
    wait_s: float = LOCK_WAIT_S,
    *,
    sockets: Path | None = None,
    netns: str | None = None,
) -> Iterator[None]:
    """Hold the one writer's lock.

    Args:
        sockets: the agent's folder of sockets, noted in the file: who finds the lock
            held asks there. netns: what it serves, where that is not its own.

    Raises:
        ConflictError: "locked" after `wait_s`, with the holder's pid.
        PrivilegeError: "missing-privilege", the folder is root's.
        FailedError: "state-unwritable".
    """
    path = run_dir / "lock"
    try:
        run_dir.mkdir(mode=0o711, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except PermissionError as error:
        raise PrivilegeError(
            "missing-privilege", f"Cannot open {path}: {error.strerror}.", hint="run it with sudo"
        ) from error
    except OSError as error:
        raise FailedError(
            "state-unwritable",
            f"Cannot open {path}: {error.strerror}.",
            hint=f"look at the file system: df {run_dir.parent}",
        ) from error
    try:
        _take(descriptor, path, wait_s)
        holder: dict[str, object] = {"pid": os.getpid()}
        if sockets is not None:
            holder |= {"sockets": str(sockets), "netns": netns}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode() + b"\n", 0)
        yield
    finally:
        os.close(descriptor)


def _holder(data: bytes) -> dict[str, Any]:
    """Return what the holder of the lock wrote about itself; nothing while it is writing."""
    with contextlib.suppress(ValueError):
        found = json.loads(data)
        if isinstance(found, dict):
            return found
    return {}


def _take(descriptor: int, path: Path, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
        if time.monotonic() >= deadline:
            holder = _holder(os.pread(descriptor, 4096, 0)).get("pid", "unknown")
            raise ConflictError(
                "locked",
                f"Another shapectl process is changing things (pid {holder} holds {path}).",
                hint=f"wait for it, or look at it: ps -fp {holder}",
            )
        time.sleep(_LOCK_POLL_S)
