# SPDX-License-Identifier: Apache-2.0
"""Kills an operation before each thing that it does to the kernel or the disk, one after another.

A process imports the engine once and forks a child per kill. The child counts
what changes something (netlink requests that are no dump, bpf objects and pins,
files that are written, renamed or removed) and kills itself before the n-th; so
every n is a gap between two steps, and none is missed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from enginekit import Bench, environment

_CHILD = """
import json, os, signal, sys
from pathlib import Path
from shapeagent.kernel import bpf, rtnl
from shapeagent.model.reports import AttachRequest
from shapeagent.service.engine import Engine
import shapeagent.service.attaching, shapeagent.service.detaching
# what is else imported by each child, once more each time
import shapeagent.kernel.livefacts, shapeagent.kernel.pieces, shapeagent.kernel.tclines
import shapeagent.model.schema, shapeagent.service.placement, shapeagent.service.whitelisting

folders = tuple(sys.argv[1:3])
# BPF_MAP_CREATE, BPF_PROG_LOAD, BPF_OBJ_PIN, BPF_LINK_CREATE, _UPDATE, _DETACH
COMMANDS = {0, 5, 6, 28, 29, 34}
WRITES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir"}
left = -1
done = 0

def step():
    global left, done
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    done += 1

def audit(event, arguments):
    if left >= 0 and event in WRITES:
        step()

def another_version(run_dir):
    # every state says then that the programs are of another version of the source
    for path in run_dir.glob("*/state.json"):
        state = json.loads(path.read_text())
        state.pop("checksum", None)
        path.write_text(json.dumps({**state, "source_digest": "0" * 64}))

real_request, real_call = rtnl.Rtnl.request, bpf.bpf_call

def request(self, *arguments):
    if left >= 0:
        step()
    return real_request(self, *arguments)

def call(command, attr):
    if left >= 0 and command in COMMANDS:
        step()
    return real_call(command, attr)

sys.addaudithook(audit)
rtnl.Rtnl.request, bpf.bpf_call = request, call

for line in sys.stdin:
    order = json.loads(line)
    pid = os.fork()
    if pid == 0:
        engine = Engine(
            netns=order["netns"], run_dir=Path(folders[0]), bpffs_dir=Path(folders[1])
        )
        left = -1 if order["operation"] == "swap" else order["steps"]
        if order["operation"] == "swap":
            another_version(Path(folders[0]))
            left = order["steps"]
            engine.attach(AttachRequest(order["device"], **order["options"]))
        elif order["operation"] == "detach":
            engine.detach(order["device"])
        else:
            engine.attach(AttachRequest(order["device"], **order["options"]))
        left = -1
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    print(json.dumps(status), flush=True)
"""


class ForkingChild:
    """A process that runs a text, which forks for each order that it is given."""

    def __init__(self, one: Bench, text: str) -> None:
        self._one = one
        words = [str(one.engine.run_dir), str(one.engine.bpffs_dir)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", text, *words],
            env=environment(), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def order(self, **order: Any) -> None:
        """Give an order for the device of the bench."""
        assert self._process.stdin is not None
        order |= {"netns": self._one.netns, "device": self._one.device}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def answer(self) -> str:
        """Return the next line that it prints."""
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=10)
        self._process.stdout.close()


def was_killed(status: int) -> bool:
    """Return whether a wait status tells of kill -9; else it must be that of a good end."""
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, f"got status {status}"
        return True
    assert os.WEXITSTATUS(status) == 0, f"got exit {os.WEXITSTATUS(status)}"
    return False


class Killer(ForkingChild):
    """Runs operations of an engine in processes that die at a step."""

    def __init__(self, one: Bench) -> None:
        super().__init__(one, _CHILD)

    def run(self, operation: str, steps: int, **options: Any) -> bool:
        """Return whether the operation was killed before its `steps`-th step; False: it ended."""
        self.order(operation=operation, steps=steps, options=options)
        return was_killed(json.loads(self.answer()))


def each_step(run: Callable[[int], bool], recover: Callable[[int], None], most: int = 500) -> int:
    """Kill before step 0, 1, 2 … and recover each time; returns how many there were."""
    for number in range(most):
        if not run(number):
            return number
        recover(number)
    raise AssertionError(f"got no end after {most} steps")
