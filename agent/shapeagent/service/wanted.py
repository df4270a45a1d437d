# SPDX-License-Identifier: Apache-2.0
"""What callers asked the agent for, kept over restarts and reboots beside its configuration.

What was said last about an interface holds: a call overrules the table of the
configuration, until that table is changed. A detach by a call is kept too, or
the next start would undo it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shapeagent.model.errors import FailedError
from shapeagent.model.reports import AttachRequest
from shapeagent.service.state import put_aside, seal, sync_path, unseal, unwritable, write_down

FILE_NAME = "wanted.json"
_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Said:
    """What a call said about an interface. `request` None: leave it detached."""

    request: AttachRequest | None
    config_digest: str  # of the table that it overrules, "" for none


class WantedStore:
    """The calls' wishes, one per interface. For one thread."""

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        """Read them. A damaged file is put aside as `wanted.json.corrupt-TIME`, and said."""
        self._path = folder / FILE_NAME
        self._warn = warn
        self._is_behind = False  # of what was said
        self._said: dict[str, Said] = {}
        try:
            self._said = _parse(self._path.read_bytes())
        except FileNotFoundError:
            pass
        except OSError as error:
            warn(f"{self._path}: {error.strerror}: what callers wanted is not known")
        except (ValueError, KeyError, TypeError) as error:
            aside = put_aside(self._path)
            warn(f"{self._path} is damaged ({error}): put aside as {aside.name}")

    def effective(self, config: Sequence[AttachRequest]) -> list[AttachRequest]:
        """Return what is wanted now: the configuration, where no call said otherwise since."""
        tables = {one.device: one for one in config}
        found = []
        for device in dict.fromkeys((*tables, *self._said)):
            said, table = self._said.get(device), tables.get(device)
            if said is None or said.config_digest != _digest(table):
                found += [table] if table is not None else []
            elif said.request is not None:
                found.append(said.request)
        return found

    @contextlib.contextmanager
    def saying(
        self, device: str, request: AttachRequest | None, config: Sequence[AttachRequest]
    ) -> Iterator[None]:
        """Carry out in the body what a call said; it is kept, and on the disk, where that worked.

        A full disk is so noticed before anything is attached. A detach is carried out all the
        same (F30), and reaches the disk when there is room: see `catch_up`.

        Raises: FailedError state-unwritable.
        """
        table = next((one for one in config if one.device == device), None)
        said = {**self._said, device: Said(request, _digest(table))}
        if request is None and table is None:
            del said[device]  # nobody wants it any more
        if said == self._said:
            yield
            return
        try:
            self._stage(said)
        except FailedError as error:
            if request is not None:
                raise
            self._warn(f"{error.message} Until it can be written, a restart attaches {device}.")
            self._is_behind = True
        try:
            yield
        except BaseException:
            self._staged.unlink(missing_ok=True)
            raise
        self._said = said
        if not self._is_behind:
            self._commit()

    def catch_up(self) -> None:
        """Write what a full disk did not take, if it does now."""
        if self._is_behind:
            with contextlib.suppress(FailedError):
                self._stage(self._said)
                self._commit()

    @property
    def _staged(self) -> Path:
        return self._path.with_suffix(".new")

    def _stage(self, said: dict[str, Said]) -> None:
        body = json.dumps(
            {
                "schema": _SCHEMA,
                "interfaces": {
                    device: {
                        "request": None if one.request is None else dataclasses.asdict(one.request),
                        "config": one.config_digest,
                    }
                    for device, one in said.items()
                },
            },
            sort_keys=True,
        )
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_down(self._staged, seal(body).encode(), lasting=True)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._staged.unlink(missing_ok=True)
            raise unwritable(self._path, error) from error
        self._is_behind = False

    def _commit(self) -> None:
        try:
            os.replace(self._staged, self._path)
            sync_path(self._path.parent)
        except OSError as error:
            self._is_behind = True
            raise unwritable(self._path, error) from error


def _parse(data: bytes) -> dict[str, Said]:
    text = data.decode("utf-8")
    body = unseal(text)
    if body == text:
        raise ValueError("it has no checksum")
    found: dict[str, Any] = json.loads(body)
    if found["schema"] != _SCHEMA:
        raise ValueError(f"schema {found['schema']}, and this shapectl knows {_SCHEMA}")
    return {
        device: Said(
            None if one["request"] is None else AttachRequest(**one["request"]), one["config"]
        )
        for device, one in found["interfaces"].items()
    }


def _digest(table: AttachRequest | None) -> str:
    if table is None:
        return ""
    text = json.dumps(dataclasses.asdict(table), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
