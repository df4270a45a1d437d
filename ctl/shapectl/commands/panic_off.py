# SPDX-License-Identifier: Apache-2.0
"""`shapectl panic-off`: hand over to the shell script that undoes everything without Python."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import click

from shapeagent.model.errors import FailedError, UnsupportedError
from shapectl.session import ShapeCommand, complete_device, session_of

SCRIPT = "shapectl-panic-off"


@click.command("panic-off", cls=ShapeCommand)
@click.argument("devices", nargs=-1, metavar="[DEVICE]...", shell_complete=complete_device)
@click.option("--dry-run", is_flag=True, help="Print the commands and run none.")
@click.pass_context
def command(ctx: click.Context, devices: tuple[str, ...], dry_run: bool) -> None:
    """Undo attach by a shell script, with tc, ip and rm alone.

    Of each DEVICE, or of all. The script, shapectl-panic-off, needs no Python:
    keep it at hand for the day on which shapectl itself does not work. It runs
    the lines that attach left under /run/shapectl. Prefer `shapectl detach`,
    which looks first.
    """
    netns = session_of(ctx).netns
    words = ["--dry-run"] if dry_run else []
    words += ["--netns", netns] if netns else []
    script = find_script()
    sys.stdout.flush()
    try:
        os.execv(script, [str(script), *words, "--", *devices])  # noqa: S606 - no shell is meant
    except OSError as error:
        raise FailedError(
            "panic-off-failed",
            f"Cannot run {script}: {error.strerror}.",
            hint=f"sudo sh {script}",
        ) from error


def find_script() -> Path:
    """Return where the script is: beside this Python, in PATH, or in this checkout.

    Raises:
        UnsupportedError: panic-off-missing.
    """
    beside = Path(sys.executable).parent / SCRIPT
    found = shutil.which(SCRIPT)
    checkout = Path(__file__).resolve().parents[3] / "packaging" / SCRIPT
    for path in (beside, Path(found) if found else None, checkout):
        if path is not None and os.access(path, os.X_OK):
            return path
    raise UnsupportedError(
        "panic-off-missing",
        f"{SCRIPT} is not installed beside {sys.executable}, nor in PATH.",
        hint="sudo make setup installs it.",
    )
