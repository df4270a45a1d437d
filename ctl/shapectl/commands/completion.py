# SPDX-License-Identifier: Apache-2.0
"""`shapectl completion`: the script that completes shapectl's words in a shell."""

from __future__ import annotations

import click

from shapectl.output import print_json, print_text
from shapectl.session import ShapeCommand, session_of

_COMPLETE_VARIABLE = "_SHAPECTL_COMPLETE"


@click.command("completion", cls=ShapeCommand)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the completion script for SHELL.

    \b
    bash:  shapectl completion bash > /etc/bash_completion.d/shapectl
    zsh:   shapectl completion zsh > "${fpath[1]}/_shapectl"
    fish:  shapectl completion fish > ~/.config/fish/completions/shapectl.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None, f"click knows no shell {shell}"
    completer = kind(ctx.find_root().command, {}, "shapectl", _COMPLETE_VARIABLE)
    # source() would ask the shell for its version; the script alone needs no shell.
    script = completer.source_template % completer.source_vars()
    if session_of(ctx).json:
        print_json({"shell": shell, "script": script})
    else:
        print_text(script)
