# SPDX-License-Identifier: Apache-2.0
"""`shapectl`: the outermost command, and what becomes of every failure.

Subcommands are imported when they are named (or listed); none of them imports
the engine, pyroute2, bcc or rich before it runs.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import click

from shapeagent.model.errors import FailedError, InputError, ShapeError
from shapectl import __version__
from shapectl.output import print_error
from shapectl.session import Session, ShapeGroup


class InterruptError(ShapeError):
    """Ctrl-C; 128 + SIGINT, as shells give it."""

    exit_code = 130


#: In the order of `shapectl --help`.
_COMMANDS = {
    "attach": "attach",
    "confirm": "confirm",
    "detach": "detach",
    "status": "status",
    "top": "top",
    "events": "events",
    "residue": "residue",
    "panic-off": "panic_off",
    "doctor": "doctor",
    "explain": "explain",
    "whitelist": "whitelist",
    "class": "class_",
    "policy": "policy",
    "demo": "demo",
    "bench": "bench",
    "agent": "agent",
    "completion": "completion",
}


class LazyGroup(ShapeGroup):
    """A group whose commands are imported when they are asked for."""

    outermost = True

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"shapectl.commands.{_COMMANDS[cmd_name]}")
        command = module.command
        assert isinstance(command, click.Command)
        return command


@click.group(
    name="shapectl",
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Global options may stand before or after the command. "
    "Exit codes: 0 done, 1 failed, 2 usage or invalid input, 3 missing privilege, "
    "4 something needed is missing, 5 conflict with existing state, 6 partly done.",
)
@click.version_option(__version__, prog_name="shapectl", message="%(prog)s %(version)s")
def cli() -> None:
    """Keep urgent traffic fast beside bulk traffic on one network interface."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code (style.md: 0..6, 130 after Ctrl-C)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    session = Session()
    try:
        result: Any = cli.main(args=words, prog_name="shapectl", standalone_mode=False, obj=session)
    except ShapeError as error:
        return _fail(error, session, words)
    except click.ClickException as error:
        return _fail(_usage_error(error), session, words)
    except click.Abort as error:
        if isinstance(error.__cause__, EOFError):
            return _fail(_internal_error(error.__cause__), session, words)
        return _fail(InterruptError("interrupted", "Stopped by Ctrl-C."), session, words)
    except Exception as error:
        if session.verbose:
            traceback.print_exc(file=sys.stderr)
        return _fail(_internal_error(error), session, words)
    return result if isinstance(result, int) else 0


def _fail(error: ShapeError, session: Session, words: Sequence[str]) -> int:
    # Where the command line itself is wrong, --json may not have been reached.
    options = words[: words.index("--")] if "--" in words else words
    print_error(error, as_json=session.json or "--json" in options)
    return error.exit_code


def _internal_error(error: BaseException) -> ShapeError:
    return FailedError(
        "internal",
        f"{type(error).__name__}: {error}",
        hint="this is a fault in shapectl; the same command with -v shows where.",
    )


def _usage_error(error: click.ClickException) -> ShapeError:
    """Return click's complaint in our form: reference `usage`, the command's --help as hint."""
    hint = "shapectl --help"
    if isinstance(error, click.UsageError) and error.ctx is not None:
        hint = f"{error.ctx.command_path} --help"
    return InputError("usage", error.format_message(), hint=hint)
