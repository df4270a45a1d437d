# SPDX-License-Identifier: Apache-2.0
"""A running agent for tests: a process of its own, in the namespace of a `Bench`."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from enginekit import Bench, environment, wait_until

MOST_START_S = 120.0  # an emulated CPU compiles for half a minute


@dataclass
class AgentProcess:
    """`shapectl agent run`, and what it logs."""

    child: subprocess.Popen[bytes]
    log: Path
    config: Path

    @property
    def pid(self) -> int:
        return self.child.pid

    def text(self) -> str:
        return self.log.read_text()

    def wait_for(self, pattern: str, *, count: int = 1, timeout_s: float = 60.0) -> None:
        """Return once as many lines of the log match."""

        def seen() -> bool:
            assert self.child.poll() is None, f"the agent ended: {self.text()}"
            return len(re.findall(pattern, self.text(), re.MULTILINE)) >= count

        wait_until(seen, f"{count} × {pattern!r} in {self.text()!r}", timeout_s=timeout_s)

    def end(self, number: int = signal.SIGTERM, timeout_s: float = 30.0) -> int:
        """Send a signal and return the exit status."""
        if self.child.poll() is None:
            self.child.send_signal(number)
        return self.child.wait(timeout_s)


def config_text(one: Bench, *interfaces: str, agent: str = "", more: str = "") -> str:
    """Return a configuration with the folders of a bench."""
    tables = "\n".join(f"[[interface]]\n{text}" for text in interfaces)
    return (
        f'[agent]\nrun_dir = "{one.engine.run_dir}"\nbpffs_dir = "{one.engine.bpffs_dir}"\n'
        f'state_dir = "{one.engine.run_dir}-lib"\nreconcile = "500ms"\n{agent}\n'
        f'[sockets]\nfolder = "{one.engine.run_dir}"\noperator_group = "root"\n'
        f'observer_group = "root"\n[audit]\npath = "{one.engine.run_dir}-log/audit.jsonl"\n'
        f"{more}\n{tables}\n"
    )


@contextlib.contextmanager
def running_agent(
    one: Bench,
    folder: Path,
    text: str,
    *,
    env: dict[str, str] | None = None,
    prefix: tuple[str, ...] = (),
) -> Iterator[AgentProcess]:
    """Give an agent with this configuration; it has ended afterwards, by force if need be.

    It lives in the namespace, as one in a host's own does.
    """
    config, log = folder / "agent.toml", folder / "agent.log"
    config.write_text(text)
    inside = ("nsenter", f"--net=/run/netns/{one.netns}", *prefix)
    command = [*inside, sys.executable, "-m", "shapectl", "agent", "run"]
    with log.open("ab") as out:
        child = subprocess.Popen(
            [*command, "--config", str(config), "--log-level", "debug"],
            stdout=out, stderr=out, env=environment(**(env or {})),
        )  # fmt: skip
    agent = AgentProcess(child, log, config)
    try:
        yield agent
    finally:
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
                raise
