# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus in a namespace of ours, and questions to it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from enginekit import open_socket, pause

PROGRAMS = Path("/var/lib/shapectl/programs/usr/bin")
_ALERTS = Path(__file__).resolve().parents[2] / "packaging" / "prometheus" / "alerts.yaml"
_PORT = 9090  # in a namespace of its own


def require_prometheus() -> None:
    """Skip the test where Debian's prometheus is not unpacked."""
    if not os.access(PROGRAMS / "prometheus", os.X_OK):
        pytest.skip("prometheus is missing: sudo packaging/setup-programs.sh prometheus")


def listen_in(netns: str) -> socket.socket:
    """Return a listening socket on a free port of the namespace's loopback."""
    sock = open_socket(netns, socket.AF_INET, socket.SOCK_STREAM)
    sock.bind(("127.0.0.1", 0))
    sock.listen(16)
    return sock


def http_get(netns: str, port: int, path: str, **headers: str) -> tuple[int, bytes]:
    """Return status and body of a page that is served in the namespace."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    with contextlib.closing(connection):
        connection.sock = open_socket(netns, socket.AF_INET, socket.SOCK_STREAM)
        connection.sock.settimeout(20)
        connection.sock.connect(("127.0.0.1", port))
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()


@dataclass
class Prometheus:
    """One that is running."""

    netns: str
    process: subprocess.Popen[bytes]
    log: Path

    def ask(self, path: str, **parameters: object) -> Any:
        """Return `data` of an answer of the HTTP API."""
        query = f"?{urlencode(parameters)}" if parameters else ""
        status, body = http_get(self.netns, _PORT, f"/api/v1/{path}{query}")
        found = json.loads(body)
        assert status == 200, f"got {status} for {parameters}: {found}"
        assert found["status"] == "success", f"got {found} for {parameters}"
        assert not found.get("warnings"), f"got {found['warnings']} for {parameters}"
        return found["data"]

    def query(self, text: str, at_s: float | None = None) -> dict[str, float]:
        """Return labels (as JSON) → value of an instant query."""
        moment = {} if at_s is None else {"time": f"{at_s:.3f}"}
        data = self.ask("query", query=text, **moment)
        if data["resultType"] == "scalar":
            return {"": float(data["result"][1])}
        return {
            json.dumps(one["metric"], sort_keys=True): float(one["value"][1])
            for one in data["result"]
        }

    def value(self, text: str, at_s: float | None = None) -> float:
        """Return the one value of an instant query."""
        found = self.query(text, at_s)
        assert len(found) == 1, f"got {found} for {text}, want one value"
        return next(iter(found.values()))


@contextlib.contextmanager
def running_prometheus(netns: str, folder: Path, target_port: int) -> Iterator[Prometheus]:
    """Run Prometheus in the namespace; it scrapes the port there each second and has our alerts."""
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(_ALERTS)],
        "scrape_configs": [
            {
                "job_name": "shapectl",
                "static_configs": [{"targets": [f"127.0.0.1:{target_port}"]}],
            }
        ],
    }
    path, log = folder / "prometheus.json", folder / "prometheus.log"
    path.write_text(json.dumps(config))  # YAML is a superset
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [
                *("ip", "netns", "exec", netns, str(PROGRAMS / "prometheus")),
                f"--config.file={path}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{_PORT}",
            ],
            stdout=stream,
            stderr=stream,
        )
    one = Prometheus(netns, process, log)
    try:
        _wait_ready(one)
        yield one
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def _wait_ready(one: Prometheus, timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while True:
        assert one.process.poll() is None, f"got an end: {one.log.read_text()[-2000:]}"
        with contextlib.suppress(OSError, http.client.HTTPException):
            if http_get(one.netns, _PORT, "/-/ready")[0] == 200:
                return
        assert time.monotonic() < deadline_s, f"got no answer: {one.log.read_text()[-2000:]}"
        pause(0.1)
