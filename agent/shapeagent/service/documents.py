# SPDX-License-Identifier: Apache-2.0
"""The files that people write. Reads and writes them; decides nothing.

What a policy means is decided in `model/schema.py`; whitelists are read by `listfiles.py`.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shapeagent.model.errors import FailedError, InputError, PrivilegeError, ShapeError
from shapeagent.model.texts import decode_text
from shapeagent.model.types import Policy
from shapeagent.policy.builtin import BUILTIN_SOURCE, default_policy_text

if TYPE_CHECKING:
    from shapeagent.model.schema import PolicySummary

#: Read where no policy is named.
DEFAULT_POLICY_PATH = Path("/etc/shapectl/policy.toml")

#: A list of a million entries is about 40 MB; beyond this it is no list.
MAX_DOCUMENT_BYTES = 256 << 20

__all__ = [
    "DEFAULT_POLICY_PATH",
    "check_policy_text",
    "example_policy_text",
    "load_policy_text",
    "read_document",
    "read_document_bytes",
    "read_policy",
    "write_document",
]


def read_document(path: str) -> str:
    """Return the UTF-8 text of the file at `path`, or of stdin where it is `-`.

    Raises: as `read_document_bytes`; InputError not-utf8.
    """
    return decode_text(read_document_bytes(path), path)


def read_document_bytes(path: str) -> bytes:
    """Return what the file at `path` holds, or stdin where it is `-`.

    Raises:
        InputError: file-missing, file-unreadable, file-too-large.
        PrivilegeError: file-forbidden.
    """
    try:
        if path == "-":
            data = sys.stdin.buffer.read(MAX_DOCUMENT_BYTES + 1)
        else:
            with open(path, "rb") as file:
                data = file.read(MAX_DOCUMENT_BYTES + 1)
    except OSError as error:
        raise _file_error(path, error) from error
    except ValueError as error:  # a NUL in the name
        raise InputError(
            "file-missing", f"{path!r} is not the name of a file: {error}.", hint="check the name"
        ) from error
    if len(data) > MAX_DOCUMENT_BYTES:
        raise InputError(
            "file-too-large",
            f"{path} is larger than {MAX_DOCUMENT_BYTES >> 20} MiB.",
            hint="split it, or check that it is the file you meant",
        )
    return data


def write_document(path: str | Path, text: str) -> None:
    """Put `text` into the file at `path`, whole or not at all.

    Raises:
        FailedError: file-unwritable.
        PrivilegeError: file-forbidden.
    Effects: makes the folder; replaces a regular file, writes through to a pipe or device.
    """
    import tempfile

    target = Path(path)
    data = text.encode("utf-8")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() and not target.is_file():
            target.write_bytes(data)
            return
        # Beside the file that a link leads to, so that the rename keeps the link.
        target = target.resolve()
        mode = target.stat().st_mode & 0o777 if target.exists() else 0o644
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                os.fchmod(file.fileno(), mode)
            os.replace(temporary, target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise _file_error(str(path), error, writing=True) from error


def _file_error(path: str, error: OSError, *, writing: bool = False) -> ShapeError:
    why = error.strerror or str(error)
    if isinstance(error, PermissionError):
        return PrivilegeError(
            "file-forbidden", f"{path}: {why}.", hint="the same command with sudo"
        )
    if writing:
        return FailedError("file-unwritable", f"{path}: {why}.", hint=f"ls -ld {path}")
    if isinstance(error, FileNotFoundError):
        return InputError("file-missing", f"{path}: {why}.", hint="check the name")
    return InputError("file-unreadable", f"{path}: {why}.", hint=f"ls -ld {path}")


def read_policy(path: str | None) -> tuple[str, str]:
    """Return the text of a policy and its source: a path, or `built-in`.

    Args:
        path: None reads /etc/shapectl/policy.toml, else the built-in policy.
    Raises: as `read_document`.
    """
    if path is not None:
        return read_document(path), "stdin" if path == "-" else path
    try:
        return read_document(str(DEFAULT_POLICY_PATH)), str(DEFAULT_POLICY_PATH)
    except InputError as error:
        if error.reference != "file-missing":
            raise
    return example_policy_text(), BUILTIN_SOURCE


def example_policy_text() -> str:
    """Return the built-in policy as TOML."""
    return default_policy_text()


@functools.lru_cache(maxsize=8)  # parsing takes 2 ms, `class set` otherwise 1
def load_policy_text(text: str, source: str, link_rate_bits_per_s: int | None) -> Policy:
    """Return the policy with every rate resolved. Raises: as `schema.load_policy`."""
    from shapeagent.model.schema import load_policy

    return load_policy(text, source, link_rate_bits_per_s=link_rate_bits_per_s)


def check_policy_text(
    text: str, source: str, link_rate_bits_per_s: int | None = None
) -> PolicySummary:
    """Return what a valid policy holds. Raises: InputError policy-invalid, with every error."""
    from shapeagent.model.schema import check_policy

    return check_policy(text, source, link_rate_bits_per_s=link_rate_bits_per_s)
