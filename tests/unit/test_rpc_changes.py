# SPDX-License-Identifier: Apache-2.0
"""Changes are made once per request id, are audited before the reply, and outlast the agent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from rpckit import DEVICE, FakeEngine, Service, code_of, refusal, serving, wait_for

from shapeagent.model.errors import FailedError, InputError
from shapeagent.proto.shapectl.v1 import shaper_pb2
from shapeagent.service.rpc import requestids
from shapeagent.service.rpc.contracts import Role
from shapeagent.service.rpc.requestids import FILE_NAME, Answer, RequestIds


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def service(tmp_path: Path, engine: FakeEngine) -> Iterator[Service]:
    with serving(tmp_path, engine) as one:
        yield one


def set_class(
    service: Service,
    request_id: str,
    ceiling: int = 5_000_000,
    *,
    role: Role = Role.OPERATOR,
    timeout_s: float = 10.0,
) -> Any:
    request = shaper_pb2.SetClassRequest(
        request_id=request_id, device=DEVICE, class_name="bulk", ceiling_bits_per_s=ceiling
    )
    with service.channel(role) as channel:
        method = channel.unary_unary(
            "/shapectl.v1.ShaperService/SetClass",
            request_serializer=shaper_pb2.SetClassRequest.SerializeToString,
            response_deserializer=shaper_pb2.SetClassResponse.FromString,
        )
        return method(request, timeout=timeout_s)


def times_set(engine: FakeEngine) -> int:
    return engine.names().count("set_ceiling")


def test_a_repetition_gets_the_remembered_answer(service: Service, engine: FakeEngine) -> None:
    first = set_class(service, "one")
    assert set_class(service, "one") == first
    assert times_set(engine) == 1, f"got {engine.names()}"
    assert len(service.audit.lines) == 1, f"got {service.audit.lines}"


def test_another_request_with_the_same_id_is_refused(service: Service, engine: FakeEngine) -> None:
    set_class(service, "one")
    with pytest.raises(grpc.RpcError) as caught:
        set_class(service, "one", 6_000_000)
    assert code_of(caught.value) == "INVALID_ARGUMENT"
    assert refusal(caught.value).reference == "request-id-reused"
    assert times_set(engine) == 1


def test_ids_of_different_callers_do_not_meet(service: Service, engine: FakeEngine) -> None:
    set_class(service, "one", role=Role.OPERATOR)
    set_class(service, "one", 6_000_000, role=Role.ADMIN)
    assert times_set(engine) == 2


def test_what_failed_is_tried_again(service: Service, engine: FakeEngine) -> None:
    engine.raises = FailedError("map-full", "full")
    with pytest.raises(grpc.RpcError):
        set_class(service, "one")
    engine.raises = None
    set_class(service, "one")
    assert times_set(engine) == 1
    results = [one.result for one in service.audit.lines]
    assert results == ["map-full", "ok"], f"got {results}"


def test_twice_at_once_is_one_change(service: Service, engine: FakeEngine) -> None:
    engine.hold.clear()
    with ThreadPoolExecutor(8) as pool:
        pending = [pool.submit(set_class, service, "one") for _ in range(8)]
        wait_for(lambda: engine.names() == ["session"], "the first call to begin")
        engine.hold.set()
        answers = [one.result(10) for one in pending]
    assert len({one.SerializeToString() for one in answers}) == 1
    assert times_set(engine) == 1, f"got {engine.names()}"


def test_whoever_comes_while_it_runs_waits_only_so_long(
    service: Service, engine: FakeEngine
) -> None:
    engine.hold.clear()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(set_class, service, "one")
        wait_for(lambda: engine.names() == ["session"], "the first call to begin")
        with pytest.raises(grpc.RpcError) as caught:
            set_class(service, "one", timeout_s=0.3)
        with pytest.raises(grpc.RpcError) as other:
            set_class(service, "one", 6_000_000, timeout_s=5)
        engine.hold.set()
        first.result(10)
    assert code_of(caught.value) in {"DEADLINE_EXCEEDED", "ABORTED"}
    assert refusal(other.value).reference == "request-id-reused"


def test_a_change_that_outlives_its_caller_is_acknowledged(
    service: Service, engine: FakeEngine
) -> None:
    """F27: a slow change under a short deadline; the second try finds what came of it."""
    engine.hold.clear()
    with pytest.raises(grpc.RpcError) as caught:
        set_class(service, "one", timeout_s=0.5)
    assert code_of(caught.value) == "DEADLINE_EXCEEDED"
    assert not service.audit.lines, "got a line of what has not ended"
    assert service.audit.open == 1
    engine.hold.set()
    wait_for(lambda: len(service.audit.lines) == 1, "the line of the late change")
    assert service.audit.lines[0].result == "ok"
    set_class(service, "one")
    assert times_set(engine) == 1, f"got {engine.names()}"
    assert len(service.audit.lines) == 1


def test_a_late_failure_is_written_down_and_can_be_tried_again(
    service: Service, engine: FakeEngine
) -> None:
    engine.hold.clear()
    with pytest.raises(grpc.RpcError):
        set_class(service, "one", timeout_s=0.5)
    engine.raises = FailedError("map-full", "full")
    engine.hold.set()
    wait_for(lambda: bool(service.audit.lines), "the line of the late failure")
    assert service.audit.lines[0].result == "map-full"
    assert service.audit.open == 0
    engine.raises = None
    set_class(service, "one")
    assert times_set(engine) == 1


def test_what_has_not_begun_in_time_never_begins(service: Service, engine: FakeEngine) -> None:
    engine.hold.clear()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(set_class, service, "one")
        wait_for(lambda: engine.names() == ["session"], "the first call to begin")
        with pytest.raises(grpc.RpcError) as caught:
            set_class(service, "two", timeout_s=0.6)
        assert code_of(caught.value) in {"UNAVAILABLE", "DEADLINE_EXCEEDED"}
        engine.hold.set()
        first.result(10)
    wait_for(lambda: service.audit.open == 0, "every ticket to end")
    # gRPC tries again what was refused as busy: each try has its line
    found = [one.result for one in service.audit.lines if one.request_id == "two"]
    assert set(found) == {"agent-busy"}, f"got {found}"
    assert engine.names().count("session") == 1, f"got {engine.names()}"


def test_a_change_whose_caller_has_gone_never_begins(service: Service, engine: FakeEngine) -> None:
    engine.hold.clear()
    with ThreadPoolExecutor(1) as pool, service.channel() as channel:
        first = pool.submit(set_class, service, "one")
        wait_for(lambda: engine.names() == ["session"], "the first call to begin")
        request = shaper_pb2.SetClassRequest(
            request_id="two", device=DEVICE, class_name="bulk", ceiling_bits_per_s=7_000_000
        )
        method = channel.unary_unary("/shapectl.v1.ShaperService/SetClass")
        second = method.future(request.SerializeToString(), timeout=30)
        wait_for(lambda: service.audit.open == 2, "the second call to wait for the writer")
        second.cancel()
        # on the same connection, so behind it: once this is answered, that has arrived
        channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=10)
        engine.hold.set()
        first.result(10)
    wait_for(lambda: service.audit.open == 0, "every ticket to end")
    assert engine.names().count("session") == 1, f"got {engine.names()}"
    found = {one.request_id: one.result for one in service.audit.lines}
    assert found == {"one": "ok", "two": "agent-busy"}, f"got {found}"


def test_without_an_audit_log_nothing_is_changed(service: Service, engine: FakeEngine) -> None:
    service.audit.full = True
    with pytest.raises(grpc.RpcError) as caught:
        set_class(service, "one")
    assert refusal(caught.value).reference == "audit-unwritable"
    assert not engine.calls, f"got {engine.calls}"
    with service.remote(Role.OBSERVER) as remote:
        remote.status()  # reads go on
        with pytest.raises(Exception, match="has the role"):  # and a denial stays one
            remote.detach(DEVICE)
    service.audit.full = False
    set_class(service, "one")
    assert times_set(engine) == 1


def test_answers_outlast_a_restart(tmp_path: Path) -> None:
    first, second = FakeEngine(), FakeEngine()
    with serving(tmp_path, first) as service:
        answer = set_class(service, "one")
    with serving(tmp_path, second) as service:
        assert set_class(service, "one") == answer
        assert not second.calls, f"got {second.calls}, want the remembered answer"
        with pytest.raises(grpc.RpcError):
            set_class(service, "one", 6_000_000)


# --- the store


_WRITER = """
import sys
from pathlib import Path
from shapeagent.service.rpc.requestids import Answer, RequestIds
store = RequestIds(Path(sys.argv[1]))
for number in range(1_000_000):
    store.remember("who", str(number), Answer(b"d", b"m" * 100))
    print(number, flush=True)
"""


def test_an_acknowledged_answer_outlasts_sigkill(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "PYTHONPATH": f"{root / 'agent'}"}
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(tmp_path)], stdout=subprocess.PIPE, env=env
        )
        assert process.stdout is not None
        for _ in range(200):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split()
        process.stdout.close()
        process.wait(10)
        last = int(rest[-2]) if len(rest) > 1 else 199  # the newest line may be cut
        store = RequestIds(tmp_path)
        missing = [n for n in range(last + 1) if store.find("who", str(n)) is None]
        store.close()
        assert not missing, f"got {len(missing)} lost of {last + 1}"


def test_the_store_is_bounded(tmp_path: Path) -> None:
    store = RequestIds(tmp_path, most_kept=100)
    for number in range(1_000):
        store.remember("who", str(number), Answer(b"d", b"m"))
    assert store.find("who", "999") == Answer(b"d", b"m")
    assert store.find("who", "0") is None
    kept = sum(store.find("who", str(n)) is not None for n in range(1_000))
    assert kept <= 100 + requestids._TRIM_EVERY, f"got {kept}"
    store.close()


def test_large_answers_are_bounded_in_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requestids, "MOST_BYTES", 10_000)
    monkeypatch.setattr(requestids, "_TRIM_EVERY", 8)
    store = RequestIds(tmp_path)
    for number in range(80):
        store.remember("who", str(number), Answer(b"d", b"m" * 1_000))
    kept = sum(store.find("who", str(n)) is not None for n in range(80))
    assert 1 <= kept <= 18, f"got {kept}"
    assert store.find("who", "79") is not None
    store.close()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b"no database at all, but some text" * 100),
        lambda path: path.write_bytes(path.read_bytes()[:5_000] + bytes(3_000)),
        lambda path: path.write_bytes(b"SQLite format 3\0" + bytes(200)),
    ],
    ids=["text", "cut", "header"],
)
def test_a_damaged_store_is_put_aside(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    store = RequestIds(tmp_path)
    for number in range(50):
        store.remember("who", str(number), Answer(b"d", b"m" * 500))
    store.close()
    path = tmp_path / FILE_NAME
    damage(path)
    store = RequestIds(tmp_path)
    store.remember("who", "new", Answer(b"d", b"m"))
    assert store.find("who", "new") is not None
    store.close()
    aside = list(tmp_path.glob(f"{FILE_NAME}.corrupt-*"))
    assert len(aside) == 1, f"got {aside}"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FailedError) as caught:
        RequestIds(tmp_path / "file")
    assert caught.value.reference == "state-unwritable"


def test_a_store_that_fails_later_is_named(tmp_path: Path) -> None:
    store = RequestIds(tmp_path)
    store._connection.execute("DROP TABLE answers")
    with pytest.raises(FailedError) as caught:
        store.find("who", "a")
    assert caught.value.reference == "state-damaged"
    store.close()


def test_what_the_disk_does_not_take_is_known_and_written_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = RequestIds(tmp_path)
    most = store._connection.execute("PRAGMA max_page_count = 1").fetchone()[0]  # as it is now
    for number in range(200):
        store.remember("who", str(number), Answer(b"d", bytes(1000)))
    assert store._unwritten, f"got all of them written in {most} pages, want a full database"
    for number in range(200):
        assert store.find("who", str(number)) == Answer(b"d", bytes(1000)), f"got none of {number}"
    said = [one for one in caplog.messages if "Cannot write" in one]
    assert len(said) == 1, f"got {said}, want one line for all"
    store._connection.execute("PRAGMA max_page_count = 100000")
    store.remember("who", "last", Answer(b"d", b"m"))
    store.close()
    again = RequestIds(tmp_path)
    for number in range(200):
        assert again.find("who", str(number)) is not None, f"got {number} lost"
    again.close()


def test_memory_for_what_the_disk_does_not_take_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requestids, "MOST_UNWRITTEN", 10)
    store = RequestIds(tmp_path)
    store._connection.execute("DROP TABLE answers")
    for number in range(50):
        store.remember("who", str(number), Answer(b"d", b"m"))
    assert [key for _, key in store._unwritten] == [str(number) for number in range(40, 50)]
    store.close()


def test_the_file_is_for_root_alone(tmp_path: Path) -> None:
    store = RequestIds(tmp_path / "state")
    store.close()
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "state" / FILE_NAME).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", ["a", "A-b_c.d:1", "x" * 64])
def test_request_ids_that_are_good(text: str) -> None:
    requestids.check_request_id(text)


@pytest.mark.parametrize("text", ["", "x" * 65, "a b", "ü", "a\n", "a/b", "\0"])
def test_request_ids_that_are_not(text: str) -> None:
    with pytest.raises(InputError):
        requestids.check_request_id(text)
