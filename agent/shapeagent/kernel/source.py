# SPDX-License-Identifier: Apache-2.0
"""Where the kernel program's C text is, and the one text that BCC compiles.

BCC rewrites map calls only in the main file, so a plain include of our own
headers would leave them unrewritten: `flatten` puts their text in place and
says with `#line` where each line came from, so that the compiler's messages
still name the right file.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from shapeagent.model.errors import FailedError, UnsupportedError

MAIN_FILE = "classifier.c"

_INCLUDE = re.compile(r'\s*#\s*include\s+"(?P<name>[^"]+)"')
_OPENS = re.compile(r"\s*#\s*(?:if|ifdef|ifndef)\b")
_CLOSES = re.compile(r"\s*#\s*endif\b")
_GUARD = re.compile(r"\s*#\s*ifndef\s+(?P<name>\w+)\s*\n\s*#\s*define\s+(?P=name)\s*\n")
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


def source_dir() -> Path:
    """Return the folder that holds `classifier.c`: package data, else the checkout's `bpf/`.

    Raises:
        UnsupportedError: `no-bpf-source`, neither is there.
    """
    package = Path(__file__).resolve().parents[1]
    checkout = package.parents[1]
    candidates = [package / "bpf"]
    if (checkout / "pyproject.toml").is_file():
        candidates.append(checkout / "bpf")
    for folder in candidates:
        if (folder / MAIN_FILE).is_file():
            return folder
    raise UnsupportedError(
        "no-bpf-source",
        f"{MAIN_FILE} is in none of: {', '.join(str(folder) for folder in candidates)}",
        hint="reinstall the package: pip install --force-reinstall shapectl",
    )


def flatten(path: Path) -> str:
    """Return the text of `path` with each `#include "…"` of ours replaced, once, by its text.

    Names are looked up beside the including file, then beside `path`.
    `<…>` includes stay for the compiler. A header included under a condition
    is put in again where it is included once more: its guard decides there.

    Args:
        path: the main C file.

    Raises:
        FailedError: `bpf-source-include`, a header is missing or includes itself.
    """
    return "".join(_expand(path, path.parent, set(), ()))


def source_digest(text: str, defines: Mapping[str, str | int]) -> str:
    """Return the SHA-256, in hex, of what decides the compiled program.

    Args:
        text: the flattened text.
        defines: the `-D` definitions; their order does not matter.
    """
    digest = hashlib.sha256()
    for name, value in sorted(defines.items()):
        digest.update(f"{name}={value}\0".encode())
    digest.update(b"\0")
    digest.update(text.encode())
    return digest.hexdigest()


def _expand(path: Path, root: Path, seen: set[Path], stack: tuple[Path, ...]) -> list[str]:
    name = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
    text = path.read_text(encoding="utf-8")
    depth = -1 if _has_guard(text) else 0
    stack = (*stack, path)
    out = [f'#line 1 "{name}"\n']
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        if _OPENS.match(line):
            depth += 1
        elif _CLOSES.match(line):
            depth -= 1
        match = _INCLUDE.match(line)
        if match is None:
            out.append(line)
            continue
        header = _find(match["name"], path, root, f"{name}:{number}")
        if header in stack:
            raise FailedError(
                "bpf-source-include", f'{name}:{number}: "{match["name"]}" includes itself'
            )
        if header not in seen:
            if depth <= 0:
                seen.add(header)
            out.extend(_expand(header, root, seen, stack))
            out.append(f'#line {number + 1} "{name}"\n')
        else:
            out.append("\n")
    if out and not out[-1].endswith("\n"):
        out.append("\n")
    return out


def _has_guard(text: str) -> bool:
    return _GUARD.match(_COMMENT.sub("", text).lstrip()) is not None


def _find(name: str, includer: Path, root: Path, place: str) -> Path:
    for folder in (includer.parent, root):
        header = (folder / name).resolve()
        if header.is_file():
            return header
    raise FailedError("bpf-source-include", f'{place}: "{name}" is not in {root}')
