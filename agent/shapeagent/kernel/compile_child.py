# SPDX-License-Identifier: Apache-2.0
"""The process that compiles: the only one that loads BCC and LLVM.

Started fresh by `compile.compile_image` (never forked). Reads a request as
JSON on standard input, writes the image as JSON on standard output. Loads
each program once, so that the kernel's verifier has accepted it and BTF and
line records can be read back, then exits and takes LLVM with it.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from shapeagent.kernel import bpf
from shapeagent.kernel.hostfacts import read_bcc
from shapeagent.model.errors import ShapeError, UnsupportedError


def import_bcc() -> Any:
    """Return Debian's `bcc` module.

    Raises:
        UnsupportedError: "no-bcc", "wrong-bcc" (PyPI's package of that name is
            another program) or "broken-bcc" (bindings and library disagree).
    """
    try:
        import bcc
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            "no-bcc",
            f"The Python module bcc cannot be imported: {error}.",
            hint="apt-get install python3-bpfcc",
        ) from error
    except (ImportError, OSError, AttributeError) as error:
        raise UnsupportedError(
            "broken-bcc",
            f"The Python module bcc does not fit its library: {error}.",
            hint="apt-get install --reinstall python3-bpfcc libbpfcc",
            details=_bcc_parts(),
        ) from error
    place = getattr(bcc, "__file__", None)
    if not hasattr(bcc, "BPF"):
        raise UnsupportedError(
            "wrong-bcc",
            f"The module bcc at {place} is not the BPF Compiler Collection.",
            hint="pip uninstall bcc; apt-get install python3-bpfcc",
        )
    return bcc


def _bcc_parts() -> list[str]:
    """Return the package and the library, each with its path and version."""
    found = read_bcc(sys.path)
    parts = {
        "package": (found.path, found.version),
        "library": (found.library, found.library_version),
    }
    return [
        f"{part}: {path or 'none'}, version {version or 'unknown'}"
        for part, (path, version) in parts.items()
    ]


def _map_names(bcc: Any, module: Any) -> dict[int, str]:
    lib = bcc.libbcc.lib
    lib.bpf_table_name.restype = ctypes.c_char_p
    return {
        lib.bpf_table_fd_id(module, number): lib.bpf_table_name(module, number).decode()
        for number in range(lib.bpf_num_tables(module))
    }


def compile_text(request: dict[str, Any]) -> dict[str, Any]:
    """Return the image of a flattened source as JSON types (see compile.Image)."""
    os.environ["BCC_KERNEL_SOURCE"] = request["headers"]
    bcc = import_bcc()
    started = time.monotonic()
    try:
        module = bcc.BPF(text=request["text"], cflags=request["cflags"])
    except Exception as error:  # bcc raises bare Exception
        raise UnsupportedError(
            "compile-failed",
            f"BCC {bcc.__version__} could not compile the classifier with the headers in "
            f"{request['headers']}: {error}.",
            hint="the compiler's own messages stand above. BCC too old for these headers? Name "
            "older ones: BCC_KERNEL_SOURCE=/usr/src/linux-headers-6.1…",
        ) from error
    compiled = time.monotonic() - started
    names = _map_names(bcc, module.module)
    programs, btf = {}, b""
    for program in request["programs"]:
        raw = module.dump_func(program)
        fd, _log = bpf.load_program(program, raw)
        function = module.load_func(program, bcc.BPF.SCHED_CLS)
        facts = bpf.program_facts(function.fd)
        funcs, func_bytes = bpf.program_func_info(function.fd)
        if facts.btf_id and not btf:
            btf = bpf.btf_of(facts.btf_id)
        os.close(fd)
        programs[program] = {
            "instructions": raw.hex(),
            "maps": {str(index): names[map_fd] for index, map_fd in bpf.map_references(raw)},
            "func_info": funcs.hex(),
            "func_record_bytes": func_bytes,
        }
    return {
        "programs": programs,
        "btf": btf.hex(),
        "compiler": f"bcc {bcc.__version__}",
        "headers": request["headers"],
        "compile_s": compiled,
    }


def main() -> int:
    """Answer one request. Exit 0 with an image, 1 with an error as JSON."""
    request = json.load(sys.stdin)
    out = os.dup(1)
    os.dup2(2, 1)  # what bcc prints is a message, not our answer
    try:
        answer: dict[str, Any] = compile_text(request)
        code = 0
    except ShapeError as error:
        answer = {**error.as_dict(), "class": type(error).__name__}
        code = 1
    with Path(f"/proc/self/fd/{out}").open("w", encoding="utf-8") as stream:
        json.dump(answer, stream)
    sys.stderr.flush()
    os._exit(code)  # skip LLVM's tear-down


if __name__ == "__main__":
    main()
