# SPDX-License-Identifier: Apache-2.0
"""A veth pair in two namespaces of its own, and an engine for one end of it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from perflib import ROOT

from shapeagent.kernel.netns import run_in_netns
from shapeagent.lab.topology import Lab, Port, private_dirs, set_sysctls, veth_pair
from shapeagent.model.reports import AttachRequest
from shapeagent.service.engine import Engine

SHAPECTL = ROOT / ".venv" / "bin" / "shapectl"
NO_IPV6_NOISE = {"net.ipv6.conf.all.disable_ipv6": "1"}

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Pair:
    """`near` is what is attached; `far` answers."""

    lab: Lab
    near: Port
    far: Port
    engine: Engine

    def attach(self, **options: object) -> AttachRequest:
        """Return a request for the near end."""
        return AttachRequest(device=self.near.device, **options)  # type: ignore[arg-type]

    def socket_at(self, port: Port, kind: int) -> socket.socket:
        """Return a socket that belongs to one end's namespace."""
        return run_in_netns(port.namespace, lambda: socket.socket(socket.AF_INET, kind))


@contextlib.contextmanager
def pair() -> Iterator[Pair]:
    """Give a fresh pair; namespaces, pins and state go away with it."""
    with Lab() as lab:
        near = Port(lab.add_namespace(), "d0", "198.18.7.1", "2001:db8:7::1")
        far = Port(lab.add_namespace(), "p0", "198.18.7.2", "2001:db8:7::2")
        veth_pair(near, far)
        for port in (near, far):
            set_sysctls(port.namespace, NO_IPV6_NOISE)
        dirs = private_dirs(near.namespace)
        engine = Engine(netns=near.namespace, run_dir=dirs.run_dir, bpffs_dir=dirs.bpffs_dir)
        yield Pair(lab, near, far, engine)


@contextlib.contextmanager
def attached(ends: Pair, **options: object) -> Iterator[None]:
    """Attach the near end by the engine while the context lasts."""
    ends.engine.attach(ends.attach(**options))
    try:
        yield
    finally:
        ends.engine.detach(ends.near.device)


def shapectl(
    ends: Pair, *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command line for the near end's namespace. Raises RuntimeError."""
    done = subprocess.run(
        [str(SHAPECTL), "--netns", ends.near.namespace, "--json", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        start_new_session=True,
        env={**os.environ, **(environment or {})},
    )
    if done.returncode:
        raise RuntimeError(f"shapectl {' '.join(arguments)}: {done.returncode}: {done.stderr}")
    return done


def pin_folder(ends: Pair, bpffs_dir: Path) -> Path:
    """Return the folder that holds the near end's pins."""
    found = [path for path in bpffs_dir.iterdir() if (path / "ctl").exists()]
    assert len(found) == 1, f"got {found}, want one pin folder for {ends.near.namespace}"
    return found[0]
