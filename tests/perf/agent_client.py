# SPDX-License-Identifier: Apache-2.0
"""A client of the agent for the perf rows: commands as JSON lines in, what they came to out.

`python agent_client.py DEVICE ADDRESS [CERTIFICATE]`
"""

from __future__ import annotations

import gzip
import json
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import grpc

from shapeagent.client.address import TlsFiles, parse_address
from shapeagent.client.remote import RemoteEngine
from shapeagent.model.errors import ShapeError
from shapeagent.model.types import EntryKind, Match, PackedBatch

_PAGE = "http://127.0.0.1:9911/metrics"
_FRESH_S = 0.3  # longer than a page is kept
#: What Prometheus asks for.
_HEADERS = {"Accept": "application/openmetrics-text;version=1.0.0", "Accept-Encoding": "gzip"}


def _hosts(count: int, first: str, name: str) -> PackedBatch:
    start = int.from_bytes(bytes(int(part) for part in first.split(".")))
    keys = b"".join((start + number).to_bytes(4) for number in range(count))
    return PackedBatch(Match.DESTINATION, EntryKind.HOSTS4, keys, name, "ops", "perf")


class Commands:
    """What a line may ask for."""

    def __init__(self, device: str, address: str, certificate: str | None) -> None:
        self._device = device
        self._address = parse_address(address)
        self._tls = None if certificate is None else TlsFiles.beside(Path(certificate))
        self._remote = self._dial()
        self._stop = threading.Event()
        self._flood: list[threading.Thread] = []
        self._calls = [0, 0]  # answered, refused

    def _dial(self) -> RemoteEngine:
        return RemoteEngine(self._address, tls=self._tls, timeout_s=60.0)

    def hello(self) -> None:
        """Wait until the agent serves."""
        self._remote.hello()

    def stream(
        self, count: int, first: str, name: str, replace: bool, also: str | None = None
    ) -> tuple[float, int]:
        """Make one change of many hosts, and of the host `also`.

        Returns: seconds, and how many are then in force.
        """
        batches = [_hosts(count, first, name)]
        if also is not None:
            batches.append(_hosts(1, also, name))
        started = time.perf_counter()
        done = self._remote.whitelist_apply(self._device, batches, replace=replace)
        return time.perf_counter() - started, done.total

    def singles(self, count: int, first: str) -> list[tuple[float, float]]:
        """Add one host after another, each by a call of its own.

        Returns: for each the seconds to its effect in the kernel, and to its answer. The agent's
        event of a change has the time at which the change was made, on the same clock.
        """
        start = int.from_bytes(bytes(int(part) for part in first.split(".")))
        begun, ended = [], []
        after_unix_s = time.time()
        for number in range(count):
            address = ".".join(str(part) for part in (start + number).to_bytes(4))
            batch = _hosts(1, address, "signal")
            begun.append(time.time())
            self._remote.whitelist_apply(self._device, [batch])
            ended.append(time.time())
        kinds = ("whitelist-changed",)
        events = self._remote.events(self._device, kinds=kinds)
        made = [event.unix_s for event in events if event.unix_s > after_unix_s]
        assert len(made) == count, f"got {len(made)} events, want {count}"
        return [
            (effect_s - begin_s, end_s - begin_s)
            for begin_s, effect_s, end_s in zip(begun, made, ended, strict=True)
        ]

    def scrapes(self, count: int) -> list[tuple[float, int]]:
        """Scrape the page of metrics again and again, never one that was kept.

        Returns: for each the seconds, and how many classes were on the page.
        """
        found = []
        for _ in range(count):
            time.sleep(_FRESH_S)
            started = time.perf_counter()
            request = urllib.request.Request(_PAGE, headers=_HEADERS)
            with urllib.request.urlopen(request, timeout=20) as answer:
                body = answer.read()
            took_s = time.perf_counter() - started
            lines = gzip.decompress(body).splitlines()
            series = b"shapectl_class_packets_total{"
            found.append((took_s, sum(line.startswith(series) for line in lines)))
        return found

    def flood(self, threads: int) -> None:
        """Begin to call as fast as the agent answers: looks, a change of a ceiling in eight."""
        self._stop.clear()
        self._calls = [0, 0]
        self._flood = [
            threading.Thread(target=self._call_on, args=(number,)) for number in range(threads)
        ]
        for thread in self._flood:
            thread.start()

    def _call_on(self, number: int) -> None:
        remote = self._dial()
        answered = refused = 0
        try:
            while not self._stop.is_set():
                try:
                    if (answered + number) % 8:
                        remote.status(self._device)
                    else:
                        remote.class_set(self._device, "bulk", 500_000_000, lease_s=60.0)
                    answered += 1
                except ShapeError as error:
                    if error.reference not in ("agent-busy", "agent-unreachable", "too-many-calls"):
                        raise
                    refused += 1
        finally:
            remote.close()
        self._calls[0] += answered
        self._calls[1] += refused

    def calm(self) -> list[int]:
        """End the flood. Returns: how many calls were answered, and refused."""
        self._stop.set()
        for thread in self._flood:
            thread.join(60)
        return self._calls

    def close(self) -> None:
        """Close the channel."""
        self._remote.close()


def main() -> None:
    """Serve until stdin ends."""
    device, address, *more = sys.argv[1:]
    commands = Commands(device, address, more[0] if more else None)
    try:
        for line in sys.stdin:
            verb, *arguments = json.loads(line)
            run: Callable[..., object] = getattr(commands, verb)
            print(json.dumps(run(*arguments)), flush=True)
    except grpc.RpcError as error:
        sys.exit(f"{error.code()}: {error.details()}")
    finally:
        commands.close()


if __name__ == "__main__":
    main()
