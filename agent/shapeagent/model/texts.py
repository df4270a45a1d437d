# SPDX-License-Identifier: Apache-2.0
"""What the bytes of a file that a person wrote say."""

from __future__ import annotations

from shapeagent.model.errors import InputError


def decode_text(data: bytes, path: str) -> str:
    """Return UTF-8 as text, without a byte order mark.

    Args: path: where it is from, for messages.
    Raises: InputError not-utf8, with the line.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(
            "not-utf8",
            f"{path} line {line}: byte {data[error.start]:#04x} is not UTF-8 text.",
            hint=f"iconv -f latin1 -t utf-8 {path} converts an older encoding",
        ) from error
