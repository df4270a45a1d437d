# SPDX-License-Identifier: Apache-2.0
"""A real etcd inside a lab namespace, for the scenario lease-storm.

A keeper process stands between us and etcd: it lives in the namespace, so it
can ask etcd how it is, and it kills etcd when its standard input closes, so that
etcd cannot outlive the process that wanted it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from shapeagent.lab.topology import private_dirs
from shapeagent.model.errors import FailedError, UnsupportedError

CLIENT_PORT = 2379
PEER_PORT = 2380  # on the namespace's loopback; one member has no peers
READY_DEADLINE_S = 60.0  # an election takes one to two seconds, a busy machine its time
POLL_S = 0.05
ASK_TIMEOUT_S = 1.0
LOG_LINES = 15


@contextlib.contextmanager
def running_etcd(namespace: str, address: str) -> Iterator[int]:
    """Give the pid of a healthy etcd that serves http://ADDRESS:2379 in `namespace`.

    Args:
        namespace: of a lab; its private folder, on tmpfs, holds etcd's data.

    Raises:
        UnsupportedError: etcd is not installed (etcd-missing).
        FailedError: it did not become healthy (etcd-not-ready).

    Effects: two processes and a folder; gone on return, whatever happens.
    """
    if shutil.which("etcd") is None:
        raise UnsupportedError(
            "etcd-missing",
            "The scenario lease-storm runs a real etcd, which is not installed.",
            hint="make bench-full unpacks one; or put Debian's etcd-server on the PATH",
        )
    run_dir = private_dirs(namespace).run_dir
    folder = run_dir / "etcd"
    folder.mkdir(mode=0o700, parents=True)
    environment = {
        # settings of the caller's own etcd are not for this one
        **{name: value for name, value in os.environ.items() if not name.startswith("ETCD_")},
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
    }
    keeper = subprocess.Popen(
        [
            *("ip", "netns", "exec", namespace),
            *(sys.executable, "-m", "shapeagent.lab.bench.etcd", address, str(folder)),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    try:
        answer = _first_answer(keeper)
        if "pid" not in answer:
            raise FailedError(
                "etcd-not-ready",
                f"etcd did not become healthy: {answer['error']}.",
                details=answer["log"],
            )
        yield int(answer["pid"])
    finally:
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        keeper.stdin.close()
        keeper.wait()
        keeper.stdout.close()
        shutil.rmtree(folder)
        with contextlib.suppress(OSError):
            run_dir.rmdir()  # only when empty: an attached engine keeps its state here


def _first_answer(keeper: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert keeper.stdout is not None
    if not select.select([keeper.stdout], [], [], 2 * READY_DEADLINE_S)[0]:
        return {"error": "its keeper does not answer", "log": []}
    line = keeper.stdout.readline()
    if not line:
        return {"error": f"its keeper ended with status {keeper.wait()}", "log": []}
    answer: dict[str, Any] = json.loads(line)
    return answer


def keep(address: str, folder: Path) -> NoReturn:
    """Run etcd until standard input closes; print one JSON line, with its pid once it is healthy.

    Effects: etcd listens on ADDRESS:2379; killed before the end.
    """
    host = f"[{address}]" if ":" in address else address
    client_url, peer_url = f"http://{host}:{CLIENT_PORT}", f"http://127.0.0.1:{PEER_PORT}"
    log_path = folder / "log"
    with log_path.open("wb") as log:
        etcd = subprocess.Popen(
            [
                *("etcd", "--name", "bench", "--data-dir", str(folder / "data")),
                *("--listen-client-urls", client_url, "--advertise-client-urls", client_url),
                *("--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url),
                *("--initial-cluster", f"bench={peer_url}"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        problem = _wait_until_healthy(address, etcd)
        if problem is None:
            _say({"pid": etcd.pid})
        else:
            lines = log_path.read_text(errors="replace").splitlines()
            _say({"error": problem, "log": lines[-LOG_LINES:]})
        sys.stdin.buffer.read()
    finally:
        etcd.kill()
        etcd.wait()
    sys.exit(0)


def _say(answer: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _wait_until_healthy(address: str, etcd: subprocess.Popen[bytes]) -> str | None:
    """Return what is wrong at the deadline, None once etcd says that it is healthy."""
    deadline_s = time.monotonic() + READY_DEADLINE_S
    problem = "no answer"
    while time.monotonic() < deadline_s:
        if etcd.poll() is not None:
            return f"it ended with status {etcd.returncode}"
        connection = http.client.HTTPConnection(address, CLIENT_PORT, timeout=ASK_TIMEOUT_S)
        try:
            connection.request("GET", "/health")
            text = connection.getresponse().read()
            if json.loads(text).get("health") == "true":
                return None
            problem = text.decode(errors="replace").strip()
        except (OSError, ValueError, http.client.HTTPException) as error:
            problem = str(error)
        finally:
            connection.close()
        if select.select([sys.stdin], [], [], POLL_S)[0]:
            return "nobody wants it any more"
    return f"{problem} after {READY_DEADLINE_S:.0f} s"


if __name__ == "__main__":
    keep(sys.argv[1], Path(sys.argv[2]))
