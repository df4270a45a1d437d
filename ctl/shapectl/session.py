# SPDX-License-Identifier: Apache-2.0
"""What one run of shapectl knows: its global options, and how to reach the engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from shapeagent.model.errors import ConflictError, InputError, UnsupportedError
from shapectl.output import Progress, stderr_is_terminal, warn

if TYPE_CHECKING:
    from shapeagent.client.address import AgentAddress
    from shapeagent.client.remote import RemoteEngine
    from shapeagent.service.engine import Engine

    AnyEngine = Engine | RemoteEngine  # in this process, or an agent's

Function = TypeVar("Function", bound=Callable[..., Any])

#: Where `ip netns add` keeps its names; only read to complete `--netns`.
_NETNS_DIR = "/run/netns"


@dataclass
class Session:
    """The global options, wherever on the command line they stood."""

    netns: str | None = None
    json: bool = False
    verbose: bool = False
    agent: str | None = None
    agent_cert: str | None = None

    @contextmanager
    def engine(self) -> Iterator[AnyEngine]:
        """Give the engine: an agent's, where one is named or holds this host's lock, else ours.

        Raises:
            ConflictError: agent-hung, of this host's, with its pid.
            FailedError: agent-unreachable.
            UnsupportedError: package-missing, where a Python package is absent.
        """
        with self.remote_engine() as remote:
            if remote is not None:
                yield remote
                return
        with self.local_engine() as engine:
            yield engine

    @contextmanager
    def remote_engine(self) -> Iterator[RemoteEngine | None]:
        """Give the engine of the agent that `engine` would ask, None where there is none.

        Raises: as `engine`.
        """
        address = self._agent_address()
        if address is None:
            yield None
            return
        try:
            from shapeagent.client.address import TlsFiles
            from shapeagent.client.remote import RemoteEngine
        except ModuleNotFoundError as error:
            raise missing_package(error) from error
        tls = None if self.agent_cert is None else TlsFiles.beside(Path(self.agent_cert))
        remote = RemoteEngine(address, tls=tls, netns=self.netns)
        try:
            with self.progress() as progress:
                progress.step(f"asking the agent at {address}")
                remote.hello()
                yield remote
        finally:
            remote.close()

    def _agent_address(self) -> AgentAddress | None:
        """Return where to ask: `--agent`, else this host's agent where one serves our namespace."""
        from shapeagent.client import local

        if self.agent is not None:
            from shapeagent.client.address import parse_address

            return parse_address(self.agent)
        if os.geteuid() != 0:
            return local.usable_socket()
        found = local.agent_of(local.RUN_DIR)
        return found if found is not None and found.netns == self.netns else None

    @contextmanager
    def local_engine(self) -> Iterator[Engine]:
        """Give the engine that acts in this process; progress goes to stderr.

        Raises:
            UnsupportedError: package-missing, where a Python package is absent.
        """
        try:
            from shapeagent.service.engine import Engine
        except ModuleNotFoundError as error:
            raise missing_package(error) from error
        with self.progress() as progress:
            yield Engine(netns=self.netns, progress=progress.step, warn=warn)

    def progress(self) -> Progress:
        """Return a progress line: every step with -v, none for a program without a terminal."""
        return Progress(every_step=self.verbose, silent=self.json and not stderr_is_terminal())


def missing_package(error: ModuleNotFoundError) -> Exception:
    """Return the error to show where a Python package is absent; our own: the fault itself."""
    if error.name is None or error.name.split(".")[0] in {"shapeagent", "shapectl"}:
        return error
    return UnsupportedError(
        "package-missing",
        f"The Python package {error.name!r} is not installed.",
        hint="sudo make setup installs everything that shapectl needs.",
    )


def session_of(context: click.Context) -> Session:
    """Return the session of this run; the outermost command made it."""
    return context.ensure_object(Session)


def pick_device(engine: AnyEngine, wanted: str | None) -> str:
    """Return `wanted`, else the only interface that is attached in the namespace.

    Raises:
        ConflictError: not-attached, where no interface is.
        InputError: which-device, where several are.
    """
    if wanted is not None:
        return wanted
    devices = [status.device for status in engine.status()]
    if not devices:
        raise ConflictError(
            "not-attached",
            "shapectl is attached to no interface here.",
            hint="sudo shapectl attach DEVICE, or --netns NAME for another network namespace.",
        )
    if len(devices) > 1:
        raise InputError(
            "which-device",
            f"shapectl is attached to {len(devices)} interfaces: {', '.join(devices)}.",
            hint=f"say which one: --device {devices[0]}",
        )
    return devices[0]


def complete_device(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[str]:
    """Return the names of this namespace's interfaces, for the shell."""
    import socket

    return [name for _, name in socket.if_nameindex() if name.startswith(incomplete)]


def complete_netns(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[str]:
    """Return the names of the network namespaces, for the shell."""
    try:
        names = sorted(os.listdir(_NETNS_DIR))
    except OSError:
        return []
    return [name for name in names if name.startswith(incomplete)]


def _set_netns(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value is None:
        return
    if not value or value in {".", ".."} or "/" in value:
        raise InputError(
            "netns-name",
            f"{value!r} is not the name of a network namespace.",
            hint="ip netns list shows the names.",
        )
    session_of(context).netns = value


def _set_agent(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        session_of(context).agent = value


def _set_agent_cert(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        session_of(context).agent_cert = value


def _set_json(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        session_of(context).json = True


def _set_verbose(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        session_of(context).verbose = True


def global_parameters(*, outermost: bool) -> list[click.Option]:
    """Return the options that every command takes, before and after its name.

    The environment is asked once, by the outermost command, so that it cannot
    overrule an option that stands earlier on the line.
    """
    return [
        click.Option(
            ["--netns"],
            metavar="NAME",
            envvar="SHAPECTL_NETNS" if outermost else None,
            callback=_set_netns,
            expose_value=False,
            shell_complete=complete_netns,
            help="Work in this network namespace (also: SHAPECTL_NETNS).",
        ),
        click.Option(
            ["--agent"],
            metavar="ADDRESS",
            envvar="SHAPECTL_AGENT" if outermost else None,
            callback=_set_agent,
            expose_value=False,
            help="Ask this agent: HOST:PORT or a socket's path (also: SHAPECTL_AGENT). Without it: "
            "the one that holds this host's lock, else work in this process.",
        ),
        click.Option(
            ["--agent-cert"],
            metavar="FILE",
            envvar="SHAPECTL_AGENT_CERT" if outermost else None,
            callback=_set_agent_cert,
            expose_value=False,
            help="Your certificate for an agent at HOST:PORT, with NAME-key.pem and ca.pem beside "
            "it (also: SHAPECTL_AGENT_CERT).",
        ),
        click.Option(
            ["--json"],
            is_flag=True,
            callback=_set_json,
            expose_value=False,
            help="Print JSON for programs, errors too, to stdout.",
        ),
        click.Option(
            ["-v", "--verbose"],
            is_flag=True,
            callback=_set_verbose,
            expose_value=False,
            help="Show each step, and the traceback of an internal error.",
        ),
    ]


GLOBAL_OPTION_NAMES = frozenset({"netns", "agent", "agent_cert", "json", "verbose"})


class ShapeCommand(click.Command):
    """A command that also takes the global options."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.extend(global_parameters(outermost=False))


class ShapeGroup(click.Group):
    """A group whose commands are ShapeCommands and that names them where none is given."""

    command_class = ShapeCommand
    outermost = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["no_args_is_help"] = False
        super().__init__(*args, **kwargs)
        self.params.extend(global_parameters(outermost=self.outermost))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, after refusing an empty line with the words that could follow."""
        if not args and not ctx.resilient_parsing:
            names = ", ".join(self.list_commands(ctx))
            raise click.UsageError(f"A command is missing: {names}.", ctx)
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the file."""
        return list(self.commands)


def device_option(function: Function) -> Function:
    """Add `--device`, which may be left out where one interface is attached."""
    return click.option(
        "--device",
        metavar="DEVICE",
        shell_complete=complete_device,
        help="The interface; may be left out where exactly one is attached.",
    )(function)
