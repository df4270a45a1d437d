# SPDX-License-Identifier: Apache-2.0
"""`shapectl agent`: the service that keeps interfaces attached and answers calls."""

from __future__ import annotations

import logging

import click

from shapectl.commands.agent_certs import certs
from shapectl.output import print_json, print_line
from shapectl.session import ShapeGroup, session_of

_CONFIG_PATH = "/etc/shapectl/agent.toml"


@click.group("agent", cls=ShapeGroup)
def command() -> None:
    """The agent: keeps what its configuration wants; answers gRPC."""


@command.command("run")
@click.option(
    "--config", "config_path", default=_CONFIG_PATH, show_default=True, metavar="FILE",
    help="The configuration; SIGHUP reads it again.",
)  # fmt: skip
@click.option(
    "--log-level", type=click.Choice(("debug", "info", "warning")), default="info",
    show_default=True, help="How much is logged to stderr.",
)  # fmt: skip
@click.pass_context
def run(ctx: click.Context, config_path: str, log_level: str) -> None:
    """Run the agent in the foreground, until SIGTERM or Ctrl-C.

    What it attached stays attached when it ends, unless the configuration says
    on_exit = "rollback".
    """
    from shapeagent.service.daemon import Agent, Parts, Server, read_config

    def servers(parts: Parts) -> list[Server]:
        # gRPC and what comes with it takes as long to load as all the rest
        from shapeagent.service.servers import make_servers

        return make_servers(parts)

    logging.basicConfig(level=log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    config = read_config(config_path)
    Agent(config, config_path=config_path, netns=session_of(ctx).netns, servers=servers).run()


@command.command("prepare")
@click.option("--config", "config_path", default=_CONFIG_PATH, metavar="FILE", help="As of `run`.")
@click.pass_context
def prepare(ctx: click.Context, config_path: str) -> None:
    """Find out what the agent may not, being less privileged.

    Its systemd unit runs this with all rights before the agent: it mounts bpffs
    where that is missing, and probes the kernel's qdiscs in a namespace of its own.
    """
    from shapeagent.service.daemon import prepare as prepare_host
    from shapeagent.service.daemon import read_config

    path = prepare_host(read_config(config_path))
    if session_of(ctx).json:
        print_json({"file": str(path)})
        return
    print_line(f"Written: {path}")


@command.command("check")
@click.argument("config_path", metavar="FILE", default=_CONFIG_PATH)
@click.pass_context
def check(ctx: click.Context, config_path: str) -> None:
    """Check a configuration FILE and list every error in it."""
    from shapeagent.service.daemon import read_config

    config = read_config(config_path)
    devices = [one.device for one in config.interface]
    if session_of(ctx).json:
        print_json({"file": config_path, "interfaces": devices})
        return
    print_line(f"{config_path} is right: {len(devices)} interfaces ({', '.join(devices)}).")


command.add_command(certs)
