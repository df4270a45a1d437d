# SPDX-License-Identifier: Apache-2.0
"""Kills whitelist changes before each thing that they do to the disk or the kernel's maps.

As killkit does it with attach: a process imports the engine once and forks a
child per kill. A write to a file has two gaps, before it and in its middle.
"""

from __future__ import annotations

from enginekit import Bench
from killkit import ForkingChild, was_killed

_CHILD = """
import json, os, signal, sys
from pathlib import Path
from shapeagent.kernel import bpf
from shapeagent.policy.whitelist import LineDefaults, parse_entry
from shapeagent.service.engine import Engine
import shapeagent.service.whitelisting

folders = tuple(sys.argv[1:3])
# BPF_MAP_CREATE, _UPDATE_ELEM, _DELETE_ELEM, BPF_OBJ_PIN, BPF_MAP_UPDATE_BATCH
COMMANDS = {0, 2, 3, 6, 26}
left = -1

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def is_due():
    global left
    left -= 1
    return left == -1

def audit(event, arguments):
    if left >= 0 and event in {"os.rename", "os.remove", "os.truncate"} and is_due():
        die()

def writing(real):
    def write(descriptor, data, *place):
        if left >= 0 and descriptor > 2:
            if is_due():
                die()
            if is_due():
                real(descriptor, bytes(data)[: len(data) // 2], *place)
                die()
        return real(descriptor, data, *place)
    return write

def syncing(real):
    def sync(descriptor):
        if left >= 0 and is_due():
            die()
        return real(descriptor)
    return sync

real_call = bpf.bpf_call

def call(command, attr):
    if left >= 0 and command in COMMANDS and is_due():
        die()
    return real_call(command, attr)

sys.addaudithook(audit)
os.write, os.pwrite = writing(os.write), writing(os.pwrite)
os.fsync, os.fdatasync = syncing(os.fsync), syncing(os.fdatasync)
bpf.bpf_call = call

def entries(texts):
    return [parse_entry(text, LineDefaults("bulk"))[0] for text in texts]

def work(order):
    global left
    engine = Engine(netns=order["netns"], run_dir=Path(folders[0]), bpffs_dir=Path(folders[1]))
    with engine.session(order["device"]) as session:
        left = order["steps"]
        for number, (verb, texts) in enumerate(order["changes"], 1):
            if verb == "expire":
                session.whitelist_expire(float(texts[0]))
            else:
                getattr(session, f"whitelist_{verb}")(entries(texts))
            print(number, flush=True)
        left = -1

for line in sys.stdin:
    order = json.loads(line)
    pid = os.fork()
    if pid == 0:
        work(order)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    print(f"ended {status}", flush=True)
"""

Change = tuple[str, list[str]]


class ListKiller(ForkingChild):
    """Runs changes of a whitelist in one session of a process that dies at a step."""

    def __init__(self, one: Bench) -> None:
        super().__init__(one, _CHILD)

    def run(self, changes: list[Change], steps: int) -> tuple[int, bool]:
        """Return how many changes were acknowledged, and whether a kill ended it."""
        self.order(changes=changes, steps=steps)
        acknowledged = 0
        while not (line := self.answer()).startswith("ended "):
            assert line, "got no answer, want the child to end"
            acknowledged = int(line)
        return acknowledged, was_killed(int(line.split()[1]))
