# SPDX-License-Identifier: Apache-2.0
"""Generates the Python code of the API beside its `.proto` files.

`python -m shapeagent.proto.generate` writes it, `--check` only says whether it is fresh. Needs
grpcio-tools (the `dev` extra), pinned by minor version: another one writes other code.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

_ROOT = Path(__file__).parent
#: protoc takes Python packages from proto paths, and a package `shapectl` is there already: the
#: command line.
_IMPORT = re.compile(r"^(from|import) shapectl\.v1", re.MULTILINE)
_HEADER = "# SPDX-License-Identifier: Apache-2.0\n"


def generate(target: Path) -> dict[str, str]:
    """Return path below the proto folder → text of each file that protoc writes.

    Args:
        target: an empty folder to work in.
    Raises: RuntimeError with what protoc said to stderr.
    """
    import grpc_tools
    from grpc_tools import protoc

    sources = sorted(str(path.relative_to(_ROOT)) for path in _ROOT.rglob("*.proto"))
    status = protoc.main(
        [
            "protoc",
            f"--proto_path={_ROOT}",
            f"--proto_path={Path(grpc_tools.__file__).parent / '_proto'}",
            *(f"--{kind}_out={target}" for kind in ("python", "pyi", "grpc_python")),
            *sources,
        ]
    )
    if status:
        raise RuntimeError(f"protoc ended with {status}")
    found = {}
    for path in sorted(target.rglob("*.py*")):
        text = _IMPORT.sub(r"\1 shapeagent.proto.shapectl.v1", path.read_text())
        if path.stem.endswith("_grpc") and "class " not in text:
            continue  # of a file without services
        found[str(path.relative_to(target))] = _HEADER + text
    return found


def main(arguments: list[str]) -> int:
    """Write the files, or with `--check` compare them. Returns 1 where one is stale."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = generate(Path(folder))
    found = {str(path.relative_to(_ROOT)) for path in _ROOT.rglob("*_pb2*.py*")}
    found = {name for name in found if "__pycache__" not in name}
    if "--check" not in arguments:
        for name in found - wanted.keys():
            (_ROOT / name).unlink()
        for name, text in wanted.items():
            (_ROOT / name).write_text(text)
        return 0
    stale = sorted(found - wanted.keys())
    stale += [
        name
        for name, text in wanted.items()
        if name not in found or (_ROOT / name).read_text() != text
    ]
    for name in stale:
        sys.stderr.write(f"{_ROOT / name} is stale: python -m shapeagent.proto.generate\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
