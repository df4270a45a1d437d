# SPDX-License-Identifier: Apache-2.0
"""A real etcd in a lab namespace, its leases kept alive over the modelled path."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from shapeagent.kernel.processes import process_start_ticks
from shapeagent.lab.bench.etcd import running_etcd
from shapeagent.lab.bench.leases import TTL_S
from shapeagent.lab.children import sleep_until, start_workers
from shapeagent.lab.topology import (
    Lab,
    private_dirs,
    routed_path,
    run_in,
)
from shapeagent.model.errors import FailedError, UnsupportedError

pytestmark = [
    pytest.mark.netns,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
]
needs_etcd = pytest.mark.skipif(
    shutil.which("etcd") is None, reason="etcd is not installed (Debian: etcd-server)"
)
S = 1_000_000_000


@needs_etcd
def test_etcd_is_healthy_inside_and_gone_with_its_data_afterwards() -> None:
    with Lab() as lab:
        namespace = lab.add_namespace()
        with running_etcd(namespace, "127.0.0.1") as pid:
            assert Path(f"/proc/{pid}/comm").read_text().strip() == "etcd"
            assert run_in(namespace, "ss", "-Hltn", "sport = :2379").strip()
            assert (private_dirs(namespace).run_dir / "etcd").is_dir()
        assert process_start_ticks(pid) is None, "etcd still runs"
        assert not private_dirs(namespace).run_dir.exists()


@needs_etcd
def test_etcd_that_cannot_listen_is_an_error_with_its_own_words() -> None:
    with Lab() as lab:
        namespace = lab.add_namespace()
        with (
            pytest.raises(FailedError) as caught,
            running_etcd(namespace, "198.18.9.9"),
        ):
            pass
        assert caught.value.reference == "etcd-not-ready"
        assert "cannot assign requested address" in "\n".join(caught.value.details)
        assert not private_dirs(namespace).run_dir.exists()


@needs_etcd
def test_etcd_dies_with_the_keepers_input() -> None:
    """What a kill -9 of the parent does: the pipe closes and nobody cleans up."""
    with Lab() as lab:
        namespace = lab.add_namespace()
        folder = private_dirs(namespace).run_dir
        folder.mkdir()
        keeper = lab.spawn(
            namespace,
            [sys.executable, "-m", "shapeagent.lab.bench.etcd", "127.0.0.1", str(folder)],
            {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
        )
        assert keeper.stdout is not None
        assert keeper.stdin is not None
        assert b'"pid"' in keeper.stdout.readline()
        keeper.stdin.close()
        assert keeper.wait(20) == 0
        assert run_in(namespace, "ss", "-Hltn", "sport = :2379").strip() == ""


def test_missing_etcd_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnsupportedError) as caught, running_etcd("shp-00000000", "127.0.0.1"):
        pass
    assert caught.value.reference == "etcd-missing"
    assert "etcd-server" in (caught.value.hint or "")


@needs_etcd
def test_leases_live_over_an_empty_link_and_are_lost_when_it_is_cut() -> None:
    cases = ((False, 0), (True, 4))
    for cut, lost in cases:
        with (
            routed_path() as (lab, path),
            running_etcd(path.receiver, path.receiver_port.ipv4),
        ):
            config: dict[str, object] = {
                "address": path.receiver_port.ipv4,
                "port": 2379,
                "leases": 4,
                "interval_us": 50_000,
            }
            ((client, _),) = start_workers(
                lab,
                (path.sender, "lease-client", config),
                module="shapeagent.lab.bench.roles",
            )
            start_ns = time.monotonic_ns()
            times = {"start_ns": start_ns, "from_ns": start_ns + S}
            times |= {"to_ns": start_ns + (3 + TTL_S) * S, "stop_ns": start_ns + (4 + TTL_S) * S}
            client.send(dict[str, object](times))
            if cut:
                sleep_until(start_ns + 2 * S)
                run_in(path.router, "ip", "link", "set", path.router_egress.device, "down")
            result = client.read_message(times["stop_ns"] + 30 * S)
        got = (result["leases"], result["leases_lost"])
        assert got == (4, lost), f"got {got}, want (4, {lost}) with the link cut: {cut}"
        answered = [delay for _, delay in result["samples"] if delay is not None]
        assert answered
        assert (len(answered) < len(result["samples"])) is cut
