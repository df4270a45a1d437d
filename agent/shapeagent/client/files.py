# SPDX-License-Identifier: Apache-2.0
"""Files of this host that an agent elsewhere is sent."""

from __future__ import annotations

import sys
from pathlib import Path

from shapeagent.model.errors import InputError, PrivilegeError
from shapeagent.model.texts import decode_text

_MOST_TEXT_BYTES = 4_000_000


def read_bytes(path: Path, most_bytes: int) -> bytes:
    """Return what a file holds.

    Raises: InputError file-missing, file-unreadable, file-too-large; PrivilegeError file-forbidden.
    """
    try:
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
    except FileNotFoundError as error:
        raise InputError(
            "file-missing", f"{path}: {error.strerror}.", hint="check the name"
        ) from error
    except PermissionError as error:
        raise PrivilegeError(
            "file-forbidden", f"{path}: {error.strerror}.", hint="the same command with sudo"
        ) from error
    except (OSError, ValueError) as error:
        raise InputError("file-unreadable", f"{path}: {error}.", hint=f"ls -ld {path}") from error
    return _limited(data, str(path), most_bytes)


def read_text(path: str) -> str:
    """Return the UTF-8 text of a file, or of stdin where it is `-`.

    Raises: as `read_bytes`; InputError not-utf8.
    """
    if path == "-":
        data = _limited(sys.stdin.buffer.read(_MOST_TEXT_BYTES + 1), path, _MOST_TEXT_BYTES)
    else:
        data = read_bytes(Path(path), _MOST_TEXT_BYTES)
    return decode_text(data, path)


def _limited(data: bytes, path: str, most_bytes: int) -> bytes:
    if len(data) > most_bytes:
        raise InputError(
            "file-too-large",
            f"{path} is larger than {most_bytes:,} bytes, which is what an agent takes.",
            hint="split it, or run the command on the agent's host",
        )
    return data
