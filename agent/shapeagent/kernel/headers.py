# SPDX-License-Identifier: Apache-2.0
"""Kernel headers for BCC: the running kernel's, else the nearest installed ones.

Only uapi headers reach our program, so the headers of another version do; BCC
needs one tree, and Debian splits it in an arch and a common part. The merged
tree is made of links in a cache of ours: nothing is written to `/lib/modules`.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from shapeagent.model.errors import FailedError, PrivilegeError, UnsupportedError

CACHE_DIR = Path("/var/cache/shapectl/headers")

# The first is written by hand and the second generated: a tree with both is whole.
_WHOLE = ("include/linux/kconfig.h", "include/generated/autoconf.h")
_PREFIX = "linux-headers-"


def find_kernel_headers(
    *,
    release: str | None = None,
    modules_dir: Path = Path("/lib/modules"),
    src_dir: Path = Path("/usr/src"),
    cache_dir: Path = CACHE_DIR,
) -> Path:
    """Return one whole kernel header tree, for `BCC_KERNEL_SOURCE`.

    `$BCC_KERNEL_SOURCE` is taken where it is set; else the running kernel's
    build tree; else the headers in `/usr/src` nearest to it in version.

    Args:
        release: kernel release to look for; None is the running one.
        modules_dir: where kernels keep their `build` and `source` links.
        src_dir: where the distribution puts headers.
        cache_dir: where merged trees are kept.

    Raises:
        UnsupportedError: `no-kernel-headers`, with the package to install.
        PrivilegeError: `header-cache-denied`, a tree must be merged first, by root.
        FailedError: `header-cache-failed`, the cache cannot be written.

    Effects: may make `<cache_dir>/<version>`, a tree of links.
    Undo: `rm -r /var/cache/shapectl/headers`.
    """
    release = release if release is not None else os.uname().release
    asked = os.environ.get("BCC_KERNEL_SOURCE")
    if asked:
        if not _is_whole(Path(asked)):
            raise UnsupportedError(
                "no-kernel-headers",
                f"BCC_KERNEL_SOURCE={asked} is not a whole header tree: "
                f"it lacks {' or '.join(_WHOLE)}",
                hint="unset BCC_KERNEL_SOURCE, or point it at a kernel build tree",
            )
        return Path(asked)
    for parts in _candidates(release, modules_dir, src_dir):
        if _is_whole(parts[0]):
            return parts[0]
        merged = _merged(parts, cache_dir)
        if merged is not None:
            return merged
    package = header_package(release)
    raise UnsupportedError(
        "no-kernel-headers",
        f"No kernel headers for {release} or another version in {src_dir}.",
        hint=f"apt-get install {package}",
    )


def locate_kernel_headers(
    release: str,
    *,
    modules_dir: Path = Path("/lib/modules"),
    src_dir: Path = Path("/usr/src"),
) -> tuple[Path, ...]:
    """Return the folders that `find_kernel_headers` would use or merge; none where there are none.

    Writes nothing.
    """
    asked = os.environ.get("BCC_KERNEL_SOURCE")
    if asked:
        return (Path(asked),) if _is_whole(Path(asked)) else ()
    for parts in _candidates(release, modules_dir, src_dir):
        if _are_whole(parts):
            return parts[:1] if _is_whole(parts[0]) else parts
    return ()


def header_package(release: str) -> str:
    """Return the Debian package that gives headers for `release`, or near enough to it.

    Debian's and Ubuntu's own kernels have a package of their own; any other
    kernel gets the distribution's newest.
    """
    if re.search(r"\d-(?:amd64|arm64|cloud-amd64|cloud-arm64|generic)$", release):
        return _PREFIX + release
    machine = platform.machine()
    return _PREFIX + {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)


def _candidates(release: str, modules_dir: Path, src_dir: Path) -> list[tuple[Path, ...]]:
    """Return (build, source) or (build,) trees, the running kernel's first."""
    found: list[tuple[Path, ...]] = []
    own = modules_dir / release
    if (own / "build").is_dir():
        found.append(_with_source(own / "build", own / "source"))
    wanted = _version(release)
    others = [
        path
        for path in src_dir.glob(f"{_PREFIX}*")
        if path.is_dir() and not path.name.endswith("-common") and (path / "include").is_dir()
    ]

    def distance(path: Path) -> tuple[bool, list[int], str]:
        version = _version(path.name.removeprefix(_PREFIX))
        newer = version > wanted
        order = version if newer else [-part for part in version]
        return (newer, order, path.name)

    for path in sorted(others, key=distance):
        abi = re.sub(r"-(?:cloud-|rt-)?[a-z0-9]+$", "", path.name)
        found.append(_with_source(path, src_dir / f"{abi}-common"))
    return found


def _with_source(build: Path, source: Path) -> tuple[Path, ...]:
    build = build.resolve()
    return (build, source.resolve()) if source.is_dir() else (build,)


def _version(text: str) -> list[int]:
    """Return the leading numbers of a release as a list of four: 6.1.0-57-amd64 is 6,1,0,57."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?(?:-(\d+))?", text)
    return [int(part or 0) for part in match.groups()] if match else [0, 0, 0, 0]


def _is_whole(tree: Path) -> bool:
    return all((tree / name).is_file() for name in _WHOLE)


def _are_whole(parts: tuple[Path, ...]) -> bool:
    return all(any((part / name).is_file() for part in parts) for name in _WHOLE)


def _merged(parts: tuple[Path, ...], cache_dir: Path) -> Path | None:
    """Return the merged tree of `parts`, making it if needed; None if it would not be whole."""
    if not _are_whole(parts):
        return None
    target = cache_dir / parts[0].name.removeprefix(_PREFIX)
    if _is_current(target, parts):
        return target
    try:
        cache_dir.mkdir(mode=0o755, parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".new-", dir=cache_dir))
    except PermissionError as error:
        raise PrivilegeError(
            "header-cache-denied",
            f"Cannot make the kernel header tree in {cache_dir}: {error.strerror}.",
            hint="run once as root: sudo make setup, or sudo shapectl attach",
        ) from error
    except OSError as error:
        raise FailedError("header-cache-failed", f"{cache_dir}: {error.strerror}.") from error
    try:
        tree = work / "tree"
        tree.mkdir(mode=0o755)
        _link_tree(tree, parts)
        _put(tree, target, work / "old", parts)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _is_current(target: Path, parts: tuple[Path, ...]) -> bool:
    """Return whether `target` is whole and was merged from `parts`."""
    sources = [path for path in (target / "sources").glob("*") if path.is_symlink()]
    wanted = {str(part) for part in parts}
    return _is_whole(target) and {os.readlink(path) for path in sources} == wanted


def _link_tree(tree: Path, parts: tuple[Path, ...]) -> None:
    sources = tree / "sources"
    sources.mkdir()
    for number, part in enumerate(parts):
        (sources / str(number)).symlink_to(part)
    _merge(tree / "include", [part / "include" for part in parts])
    names = {path.name for part in parts for path in (part / "arch").glob("*") if path.is_dir()}
    for name in names:
        folders = [part / "arch" / name / "include" for part in parts]
        if any(folder.is_dir() for folder in folders):
            _merge(tree / "arch" / name / "include", folders)


def _merge(target: Path, folders: list[Path]) -> None:
    """Make `target` the union of `folders`; of two files with one name the first folder's wins."""
    folders = [folder for folder in folders if folder.is_dir()]
    target.mkdir(parents=True)
    entries: dict[str, list[Path]] = {}
    for folder in folders:
        for path in folder.iterdir():
            entries.setdefault(path.name, []).append(path)
    for name, paths in entries.items():
        if len(paths) > 1 and all(path.is_dir() for path in paths):
            _merge(target / name, paths)
        else:
            (target / name).symlink_to(paths[0])


def _put(tree: Path, target: Path, old: Path, parts: tuple[Path, ...]) -> None:
    """Rename `tree` to `target`; where another process was faster, its tree is used."""
    for _ in range(3):
        try:
            tree.rename(target)
            return
        except OSError:
            if _is_current(target, parts):
                return
            with suppress(OSError):
                target.rename(old)
            shutil.rmtree(old, ignore_errors=True)
    raise FailedError("header-cache-failed", f"{target} changes while it is being made.")


if __name__ == "__main__":
    import sys

    try:
        sys.stdout.write(f"{find_kernel_headers()}\n")
    except (FailedError, PrivilegeError, UnsupportedError) as error:
        sys.exit(f"error: {error.reference}\n{error.message}\nhint: {error.hint}")
