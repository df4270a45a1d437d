# SPDX-License-Identifier: Apache-2.0
"""Compile the kernel program with a plain clang and all its warnings, without root or headers.

BCC hides most warnings. Here the flattened text is checked against
`bcc_shim.h`, with the uapi headers of linux-libc-dev in place of a kernel's.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from shapeagent.kernel.source import MAIN_FILE, flatten, source_dir

SHIM = Path(__file__).with_name("bcc_shim.h")

FLAGS = (
    "-target", "bpf", "-fsyntax-only", "-O2", "-std=gnu11",
    "-Wall", "-Wextra", "-Werror", "-Wshadow", "-Wundef", "-Wimplicit-fallthrough",
    # Keys are int in BCC's array macros and __u32 in our code; the kernel takes both.
    "-Wno-pointer-sign",
)  # fmt: skip

# BCC's own: the program text sees the kernel's `uapi/` folder.
_UAPI = re.compile(r"(#\s*include\s*<)uapi/")


def clang() -> str:
    """Return the clang to check with: Debian 12's clang-14, else the default one."""
    found = shutil.which("clang-14") or shutil.which("clang")
    if found is None:
        sys.exit("clang is missing. Run: sudo make setup")
    return found


def compile_text(text: str, defines: dict[str, str | int]) -> subprocess.CompletedProcess[str]:
    """Return clang's answer to `text`, the flattened program; nothing is written."""
    multiarch = f"{platform.machine()}-linux-gnu"
    with tempfile.TemporaryDirectory(prefix="shapectl-check-") as folder:
        path = Path(folder) / "flat.c"
        path.write_text(_UAPI.sub(r"\1", text), encoding="utf-8")
        command = [
            clang(), *FLAGS,
            "-isystem", "/usr/include", "-isystem", f"/usr/include/{multiarch}",
            "-include", str(SHIM),
            *(f"-D{name}={value}" for name, value in defines.items()),
            str(path),
        ]  # fmt: skip
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def main() -> int:
    """Check the program in every variant it is compiled in; return the exit status."""
    text = flatten(source_dir() / MAIN_FILE)
    done = compile_text(text, {})
    sys.stderr.write(done.stderr)
    return 1 if done.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
