# SPDX-License-Identifier: Apache-2.0
"""What a scrape of the agent's metrics costs, over HTTP, with a page as large as it may get."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from netlab_perf import Pair, pair
from perflib import Options, Result, median, row

from shapeagent.kernel.abi import SHP_MAX_CLASSES
from shapeagent.lab.topology import ip_batch
from shapeagent.model.reports import AttachRequest
from shapeagent.policy.builtin import default_policy_text
from shapeagent.telemetry.http import HttpOptions, MetricsServer
from shapeagent.telemetry.metrics import AgentFacts, AgentMetrics, MetricsPage

INTERFACES = 8
TARGET_MS = 20.0
_FRESH_S = 0.3  # longer than a page is kept: each scrape reads the kernel
_BUILTIN_CLASSES = 4
#: What Prometheus asks for.
_HEADERS = {"Accept": "application/openmetrics-text;version=1.0.0", "Accept-Encoding": "gzip"}


def most_classes(folder: Path) -> Path:
    """Return the path of the built-in policy, written with as many classes as there may be."""
    more = "".join(
        f'[classes.more{n}]\npriority = {4 + n % 4}\nguarantee = "1%"\nceiling = "50%"\n\n'
        for n in range(SHP_MAX_CLASSES - _BUILTIN_CLASSES)
    )
    path = folder / "policy.toml"
    path.write_text(f"{default_policy_text()}\n{more}")
    return path


@contextlib.contextmanager
def _attached_to_all(ends: Pair, policy: Path) -> Iterator[None]:
    more = [f"d{number}" for number in range(1, INTERFACES)]
    lines = [f"link add {name} type veth peer name peer-{name}" for name in more]
    ip_batch(ends.near.namespace, [*lines, *(f"link set {name} up" for name in more)])
    devices = [ends.near.device, *more]
    with contextlib.ExitStack() as stack:
        for device in devices:
            ends.engine.attach(
                AttachRequest(
                    device=device,
                    link_rate_bits_per_s=1_000_000_000,
                    policy_path=str(policy),
                    profile="htb",
                )
            )
            stack.callback(ends.engine.detach, device)
        yield


def _facts() -> AgentFacts:
    return AgentFacts("0", "0" * 64, os.uname().release, 1_000_000, {"server": 2e9})


def _scrape(port: int) -> tuple[float, bytes]:
    """Return the milliseconds of one scrape, connection included, and the page."""
    begin_s = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics", headers=_HEADERS)
        answer = connection.getresponse()
        body = answer.read()
        took_ms = 1e3 * (time.perf_counter() - begin_s)
        assert answer.status == 200, f"got {answer.status}"
    return took_ms, gzip.decompress(body)


@row("scrape")
def scrape(options: Options) -> Sequence[Result]:
    """8 interfaces with 16 classes, both directions, as Prometheus asks."""
    times_ms: list[float] = []
    cpu_ms: list[float] = []
    with (
        tempfile.TemporaryDirectory(prefix="shp-perf-") as folder,
        pair() as ends,
        _attached_to_all(ends, most_classes(Path(folder))),
    ):
        page = MetricsPage(ends.engine, _facts, AgentMetrics())
        server = MetricsServer(page, HttpOptions(address="127.0.0.1:0"))
        server.start()
        try:
            port = urlsplit(server.url).port
            assert port is not None
            body = b""
            for _ in range(options.pick(30, 8)):
                time.sleep(_FRESH_S)
                begin_s = time.process_time()
                took_ms, body = _scrape(port)
                cpu_ms.append(1e3 * (time.process_time() - begin_s))
                times_ms.append(took_ms)
            lines = [line for line in body.splitlines() if not line.startswith(b"#")]
            up = b"shapectl_status_up 1.0" in lines
            of_classes = sum(line.startswith(b"shapectl_class_packets_total") for line in lines)
        finally:
            server.close()
    want = INTERFACES * SHP_MAX_CLASSES * 2
    return [
        Result(
            f"scrape of {INTERFACES} interfaces with {SHP_MAX_CLASSES} classes",
            min(times_ms),
            "ms",
            target=TARGET_MS,
            note=f"median {median(times_ms):.1f} ms; CPU {min(cpu_ms):.1f} ms with the client; "
            f"{len(lines)} samples",
            failure="" if up and of_classes == want else f"{of_classes} classes, want {want}",
        )
    ]
