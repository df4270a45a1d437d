# SPDX-License-Identifier: Apache-2.0
"""From C text to an image: instructions that name their maps, kept in a cache.

An image needs no BCC to load, which is the seam for objects that are built
elsewhere. Compiling happens in a fresh process (compile_child), so LLVM's
130 MB never stay with the caller.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shapeagent.kernel import bpf
from shapeagent.kernel.source import MAIN_FILE, flatten, source_digest, source_dir
from shapeagent.model import errors
from shapeagent.model.errors import FailedError, ShapeError, UnsupportedError

CACHE_DIR = Path("/var/cache/shapectl/images")
PROGRAMS = ("shp_egress", "shp_ingress", "shp_explain_out", "shp_explain_in")
_COMPILE_LIMIT_S = 180.0  # 14 s under emulation (bpf-facts row 13)
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class ProgramImage:
    """One program: code whose map references are names, not descriptors."""

    instructions: bytes
    maps: Mapping[int, str]  # instruction index -> map name
    func_info: bytes
    func_record_bytes: int


@dataclass(frozen=True, slots=True)
class Image:
    """The compiled object. `digest` covers text and defines, not the compiler."""

    digest: str
    programs: Mapping[str, ProgramImage]
    btf: bytes
    compiler: str
    headers: str
    compile_s: float


@dataclass(frozen=True, slots=True)
class LoadedProgram:
    """A program in the kernel, open in this process."""

    name: str
    fd: int
    id: int
    verified_instructions: int


def read_source(folder: Path | None = None) -> tuple[str, str]:
    """Return the flattened classifier and its digest."""
    text = flatten((folder or source_dir()) / MAIN_FILE)
    return text, source_digest(text, {})


def image_path(digest: str, cache_dir: Path = CACHE_DIR) -> Path:
    """Return where the image of a source is cached, whether or not it is there."""
    return cache_dir / f"{digest}.json"


def find_image(*, cache_dir: Path = CACHE_DIR, folder: Path | None = None) -> tuple[Image, bool]:
    """Return the image of our source and whether it had to be compiled.

    Effects: writes the cache where it was not there.
    Undo: `rm -r /var/cache/shapectl/images`.

    Raises:
        UnsupportedError: headers, BCC or the compiler are missing, or the
            verifier refuses the result.
    """
    text, digest = read_source(folder)
    path = image_path(digest, cache_dir)
    cached = _read_cache(path, digest)
    if cached is not None:
        return cached, False
    image, raw = compile_image(text, digest)
    _write_cache(path, raw)
    return image, True


def compile_image(text: str, digest: str) -> tuple[Image, dict[str, Any]]:
    """Compile in a fresh process. Returns the image and its JSON form."""
    import subprocess

    from shapeagent.kernel.headers import find_kernel_headers

    request = {
        "text": text,
        "cflags": ["-Wno-unused-value", "-Wno-compare-distinct-pointer-types"],
        "programs": PROGRAMS,
        "headers": str(find_kernel_headers()),
    }
    # -P: the working directory, which may be anybody's, is not searched
    command = [sys.executable, "-P", "-m", "shapeagent.kernel.compile_child"]
    started = time.monotonic()
    try:
        done = subprocess.run(
            command,
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=_COMPILE_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise FailedError(
            "compile-timeout", f"The compiler did not finish within {_COMPILE_LIMIT_S:.0f} s."
        ) from error
    try:
        answer = json.loads(done.stdout)
    except ValueError as error:
        raise FailedError(
            "compile-failed",
            f"The compiler process ended with status {done.returncode} and no answer.",
            details=done.stderr.strip().splitlines()[-8:],
        ) from error
    if "error" in answer:
        raise _rebuild_error(answer, done.stderr)
    raw = {**answer, "digest": digest, "total_s": time.monotonic() - started}
    return _parse(raw), raw


def _rebuild_error(answer: Mapping[str, Any], stderr: str) -> ShapeError:
    kind = getattr(errors, str(answer.get("class")), FailedError)
    details = list(answer["details"])
    if answer["error"] == "compile-failed":
        details = [line for line in stderr.splitlines() if "error" in line][:8]
    rebuilt: ShapeError = kind(
        answer["error"], answer["message"], hint=answer["hint"], details=details
    )
    return rebuilt


def _parse(raw: Mapping[str, Any]) -> Image:
    programs = {
        name: ProgramImage(
            instructions=bytes.fromhex(item["instructions"]),
            maps={int(index): map_name for index, map_name in item["maps"].items()},
            func_info=bytes.fromhex(item["func_info"]),
            func_record_bytes=item["func_record_bytes"],
        )
        for name, item in raw["programs"].items()
    }
    return Image(
        digest=raw["digest"],
        programs=programs,
        btf=bytes.fromhex(raw["btf"]),
        compiler=raw["compiler"],
        headers=raw["headers"],
        compile_s=raw["total_s"],
    )


def _read_cache(path: Path, digest: str) -> Image | None:
    """Return a cached image; one that is damaged or not root's alone is not used."""
    try:
        status = path.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            return None
        head, _, body = path.read_text(encoding="utf-8").partition("\n")
        if head != f"{_FORMAT} {hashlib.sha256(body.encode()).hexdigest()}":
            return None
        raw = json.loads(body)
        return _parse(raw) if raw["digest"] == digest else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_cache(path: Path, raw: Mapping[str, Any]) -> None:
    body = json.dumps(raw)
    head = f"{_FORMAT} {hashlib.sha256(body.encode()).hexdigest()}"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(f"{head}\n{body}")
        temporary.rename(path)
    except OSError:
        return  # a cache that cannot be written costs time, nothing else


def load_image(
    image: Image,
    maps: Mapping[str, int],
    programs: tuple[str, ...] = PROGRAMS,
    *,
    begin_anew: bool = True,
) -> dict[str, LoadedProgram]:
    """Load programs of an image with the given maps (name → descriptor).

    Args:
        begin_anew: `set_again` too; not while other programs run with these maps.

    Raises:
        UnsupportedError: "verifier-refused" with the end of the verifier's log.
        FailedError: "image-map-missing", the image names a map that is not given.
    """
    btf_fd = bpf.load_btf(image.btf) if image.btf else -1
    loaded: dict[str, LoadedProgram] = {}
    try:
        for name in programs:
            loaded[name] = _load_one(name, image.programs[name], maps, btf_fd)
        if begin_anew:
            ours = {name: one.fd for name, one in loaded.items() if name in PROGRAMS}
            set_again(maps, ours)
    except BaseException:
        bpf.close_all([program.fd for program in loaded.values()])
        raise
    finally:
        if btf_fd >= 0:
            os.close(btf_fd)
    return loaded


def set_again(maps: Mapping[str, int], programs: Mapping[str, int]) -> None:
    """Say where each program (name → descriptor) begins anew after a pull."""
    for name, fd in programs.items():
        slot = PROGRAMS.index(name).to_bytes(4, "little")
        bpf.update(maps["again"], slot, fd.to_bytes(4, "little"))


def _load_one(
    name: str, program: ProgramImage, maps: Mapping[str, int], btf_fd: int
) -> LoadedProgram:
    missing = set(program.maps.values()) - set(maps)
    if missing:
        raise FailedError(
            "image-map-missing", f"Program {name} needs maps {', '.join(sorted(missing))}."
        )
    code = bpf.bind_maps(
        program.instructions, {index: maps[wanted] for index, wanted in program.maps.items()}
    )
    debug = (
        bpf.DebugInfo(
            btf_fd,
            program.func_info,
            program.func_record_bytes,
        )
        if btf_fd >= 0
        else None
    )
    fd, _log = bpf.load_program(name, code, debug=debug)
    facts = bpf.program_facts(fd)
    if not facts.id:
        os.close(fd)
        raise UnsupportedError("verifier-refused", f"Program {name} has no id after loading.")
    return LoadedProgram(name, fd, facts.id, facts.verified_instructions)
