# SPDX-License-Identifier: Apache-2.0
"""The whole agent by its API: what callers say is done, kept, counted and seen."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from agentkit import MOST_START_S, AgentProcess, config_text, running_agent
from enginekit import MBIT, Bench, Ran, entry, shapectl, wait_until
from netlab import tc

from shapeagent.client.address import parse_address
from shapeagent.client.remote import RemoteEngine
from shapeagent.kernel.netns import run_in_netns
from shapeagent.model.errors import PrivilegeError, ShapeError
from shapeagent.model.reports import AttachRequest

pytestmark = [
    pytest.mark.host,
    pytest.mark.netns,
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
]


def root_of(one: Bench) -> str:
    return tc("qdisc", "show", "dev", one.device, "root", netns=one.netns).split()[1]


@contextlib.contextmanager
def dial(one: Bench, role: str = "admin") -> Iterator[RemoteEngine]:
    remote = RemoteEngine(parse_address(f"unix:{one.engine.run_dir}/{role}.sock"))
    with contextlib.closing(remote):
        yield remote


def request(one: Bench) -> AttachRequest:
    return AttachRequest(device=one.device, link_rate_bits_per_s=100 * MBIT)


@pytest.fixture
def one(bench: Callable[..., Bench]) -> Bench:
    return bench()


@pytest.fixture
def agent(one: Bench, tmp_path: Path) -> Iterator[AgentProcess]:
    with running_agent(one, tmp_path, config_text(one)) as running:
        running.wait_for(r"listening: metrics on", timeout_s=MOST_START_S)
        yield running


def audited(one: Bench) -> list[dict[str, Any]]:
    path = Path(f"{one.engine.run_dir}-log/audit.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_caller_attaches_changes_and_detaches(one: Bench, agent: AgentProcess) -> None:
    before = one.glance()
    with dial(one) as remote:
        report = remote.attach(request(one))
        assert report.changed, f"got {report}"
        assert root_of(one) == "htb", f"got {root_of(one)}"
        row = remote.class_set(one.device, "bulk", 50 * MBIT, lease_s=30.0)
        assert row.ceiling_in_force_bits_per_s == 50 * MBIT, f"got {row}"
        change = remote.whitelist_add(one.device, [entry("203.0.113.9")])
        assert (change.added, change.total) == (1, 1), f"got {change}"
        assert remote.status()[0].whitelist_entries == 1
        assert remote.detach(one.device).changed
    assert one.glance()[:-1] == before[:-1], "got another device, want it as before"
    lines = audited(one)
    methods = [line["method"].rpartition("/")[2] for line in lines]
    assert len(methods) == 4, f"got {lines}, want four changes"
    assert (methods[0], methods[1], methods[3]) == ("Attach", "SetClass", "Detach"), f"got {lines}"
    assert all(line["who"] == "unix:admin" and line["result"] == "ok" for line in lines)


def test_what_a_caller_detached_stays_so_over_a_restart(one: Bench, tmp_path: Path) -> None:
    """What was said last holds: the table, until a call, until the table is changed."""
    table = f'device = "{one.device}"\nlink_rate = "100mbit"\n'
    with running_agent(one, tmp_path, config_text(one, table)) as agent:
        agent.wait_for(r"attached: d0", timeout_s=MOST_START_S)
        agent.wait_for(r"listening: metrics on")
        with dial(one) as remote:
            remote.detach(one.device)
        time.sleep(1.5)  # three looks of the reconciler
        assert root_of(one) != "htb", "got it attached again, want it left alone"
        agent.end(signal.SIGKILL)
    with running_agent(one, tmp_path, config_text(one, table)) as agent:
        agent.wait_for(r"listening: metrics on", count=2, timeout_s=MOST_START_S)
        time.sleep(1.5)
        assert root_of(one) != "htb", "got it attached by a restart, want it left alone"
        agent.config.write_text(config_text(one, table.replace("100mbit", "200mbit")))
        agent.child.send_signal(signal.SIGHUP)
        wait_until(lambda: root_of(one) == "htb", "the changed table to be taken up")


def test_what_a_caller_attached_is_kept_as_wanted(one: Bench, tmp_path: Path) -> None:
    with running_agent(one, tmp_path, config_text(one)) as agent:
        agent.wait_for(r"listening: metrics on", timeout_s=MOST_START_S)
        with dial(one) as remote:
            remote.attach(request(one))
        agent.end(signal.SIGKILL)
    tc("qdisc", "del", "dev", one.device, "root", netns=one.netns)
    with running_agent(one, tmp_path, config_text(one)) as agent:
        wait_until(lambda: root_of(one) == "htb", "ours again", timeout_s=MOST_START_S)
        agent.wait_for(r"listening: metrics on", count=2)
        with dial(one) as remote:
            remote.detach(one.device)


def test_each_socket_has_its_role(one: Bench, agent: AgentProcess) -> None:
    with dial(one, "observer") as remote:
        assert remote.status() == ()
        with pytest.raises(PrivilegeError) as caught:
            remote.attach(request(one))
        assert caught.value.reference == "denied", f"got {caught.value.reference}"
    with dial(one, "operator") as remote, pytest.raises(ShapeError) as refused:
        remote.class_set(one.device, "bulk", 50 * MBIT)
    assert refused.value.reference == "not-attached", f"got {refused.value.reference}"
    wait_until(lambda: any(line["result"] == "denied" for line in audited(one)), "the denial")
    for name, mode in (("admin", 0o600), ("operator", 0o660), ("observer", 0o660)):
        found = (one.engine.run_dir / f"{name}.sock").stat().st_mode & 0o777
        assert found == mode, f"got mode {found:o} of {name}.sock, want {mode:o}"


def test_the_command_line_uses_it(one: Bench, agent: AgentProcess) -> None:
    words = ("--agent", f"unix:{one.engine.run_dir}/admin.sock")
    ran = shapectl(*words, "attach", one.device, "--link-rate", "100mbit")
    assert ran.code == 0, f"got {ran}"
    ran = shapectl(*words, "status", "--json")
    assert json.loads(ran.out)["interfaces"][0]["device"] == one.device, f"got {ran}"
    ran = shapectl(*words, "detach", one.device)
    assert ran.code == 0, f"got {ran}"
    ran = shapectl(*words, "class", "set", "bulk", "--ceiling", "50mbit", "--device", one.device)
    assert (ran.code, "not-attached" in ran.err) == (5, True), f"got {ran}"


def metrics_page(one: Bench) -> str:
    def fetch() -> str:
        with urllib.request.urlopen("http://127.0.0.1:9911/metrics", timeout=10) as answer:
            text: bytes = answer.read()
            return text.decode()

    # a thread that enters the namespace: urllib opens its sockets there
    return run_in_netns(one.netns, fetch)


def test_prometheus_finds_what_happened(one: Bench, agent: AgentProcess) -> None:
    with dial(one) as remote:
        remote.attach(request(one))
        tc("qdisc", "del", "dev", one.device, "root", netns=one.netns)
        agent.wait_for("put-back: d0")
        page = metrics_page(one)
        remote.detach(one.device)
    for line in (
        'shapectl_grpc_calls_total{code="OK",method="/shapectl.v1.ShaperService/Attach"} 1.0',
        'shapectl_reconcile_actions_total{action="put-back"} 1.0',
        'shapectl_class_packets_total{interface="d0",direction="egress",class="bulk"} 0',
        "shapectl_status_up 1.0",
    ):
        assert line in page, f"got no {line!r} in {page[:3000]}"


def test_mtls_gives_roles_by_certificate(one: Bench, tmp_path: Path) -> None:
    certs, base = tmp_path / "certs", "spiffe://fleet.example"
    ran = shapectl(
        "agent", "certs", "--out", str(certs), "--trust-domain", "fleet.example",
        "--server-name", "127.0.0.1", "--client", "operator=/controller",
        "--client", "observer=/viewer",
    )  # fmt: skip
    assert ran.code == 0, f"got {ran}"
    more = (
        f'[tcp]\naddress = "127.0.0.1:9595"\ncertificate = "{certs}/server.pem"\n'
        f'key = "{certs}/server-key.pem"\nclient_ca = "{certs}/ca.pem"\n'
        f'trust_domain = "fleet.example"\n[tcp.roles]\n'
        f'"{base}/controller" = "operator"\n"{base}/viewer" = "observer"\n'
    )
    table = f'device = "{one.device}"\nlink_rate = "100mbit"\n'
    inside = ("nsenter", f"--net=/run/netns/{one.netns}")

    def ask(client: str, *words: str) -> Ran:
        cert = ("--agent", "127.0.0.1:9595", "--agent-cert", str(certs / f"client-{client}.pem"))
        return shapectl(*cert, *words, prefix=inside)

    with running_agent(one, tmp_path, config_text(one, table, more=more)) as agent:
        agent.wait_for(r"listening: gRPC with mTLS on 127.0.0.1 port 9595", timeout_s=MOST_START_S)
        agent.wait_for(r"attached: d0", timeout_s=MOST_START_S)
        words = ("class", "set", "bulk", "--ceiling", "50mbit")
        ran = ask("controller", *words)
        assert ran.code == 0, f"got {ran}"
        assert one.classes()["bulk"].ceiling_in_force_bits_per_s == 50 * MBIT
        ran = ask("viewer", *words)
        assert (ran.code, "denied" in ran.err) == (3, True), f"got {ran}"
        assert ask("viewer", "status").code == 0
        who = {line["who"]: line["result"] for line in audited(one)}
        assert who == {f"{base}/controller": "ok", f"{base}/viewer": "denied"}, f"got {who}"
        again = ("agent", "certs", "--out", str(certs), "--trust-domain", "fleet.example")
        shapectl(*again, "--server-name", "127.0.0.1", "--keep-ca", "--force",
                 "--client", "operator=/controller", "--client", "observer=/viewer")  # fmt: skip
        agent.wait_for(r"certificates-reloaded")
        assert ask("viewer", "status").code == 0


def test_who_watches_does_not_hold_up_the_end(one: Bench, agent: AgentProcess) -> None:
    seen: list[str] = []
    with dial(one) as remote:

        def watch() -> None:
            # it would go on with the next agent: it ends with its channel
            with contextlib.suppress(ShapeError, ValueError):
                seen.extend(event.kind for event in remote.events(follow=True))

        watcher = threading.Thread(target=watch)
        watcher.start()
        remote.attach(request(one))
        wait_until(lambda: "attached" in seen, "the event")
        remote.detach(one.device)
        began_s = time.monotonic()
        assert agent.end() == 0, f"got {agent.text()}"
        took_s = time.monotonic() - began_s
    watcher.join(20)
    assert not watcher.is_alive(), "got the watcher left"
    assert took_s < 4.0, f"got {took_s:.1f} s, want the watcher let go at once"


def test_a_flood_of_calls_is_answered_or_refused(one: Bench, agent: AgentProcess) -> None:
    """Sixteen callers of one agent; the same counts in its own page."""
    with dial(one) as remote:
        remote.attach(request(one))

        def call(number: int) -> int:
            return len(remote.class_list(one.device)) if number % 2 else len(remote.status())

        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(call, range(400)))
        assert set(answers) == {1, 8}, f"got {set(answers)}"
        remote.detach(one.device)


def test_memory_and_cpu_of_an_idle_agent(one: Bench, agent: AgentProcess) -> None:
    """Targets: 85 MB PSS; 0.5 % of a core with eight interfaces (one here)."""
    with dial(one) as remote:
        remote.attach(request(one))
    pss_kb = int(
        next(
            line for line in Path(f"/proc/{agent.pid}/smaps_rollup").read_text().splitlines()
            if line.startswith("Pss:")
        ).split()[1]
    )  # fmt: skip
    print(f"PSS {pss_kb / 1024:.1f} MB")
    assert pss_kb < 85 * 1024, f"got {pss_kb} kB, want at most 85 MB"
    with dial(one) as remote:
        remote.detach(one.device)
