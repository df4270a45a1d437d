# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from shapeagent.model.errors import ConflictError, FailedError, InputError
from shapeagent.service.engine import Engine
from shapeagent.service.writer import MAX_WAITING, Writer

Make = Callable[..., Writer]


@pytest.fixture
def writer() -> Iterator[Make]:
    made: list[Writer] = []

    def create(**options: object) -> Writer:
        one = Writer(Engine(), **options)  # type: ignore[arg-type]
        one.start()
        made.append(one)
        return one

    yield create
    for one in made:
        one.stop(10.0)


def raise_input_error(_: Engine) -> None:
    raise InputError("bad", "It is bad.")


def test_work_is_done_in_order_in_one_other_thread(writer: Make) -> None:
    one = writer()
    seen: list[int] = []

    def note(number: int) -> int:
        seen.append(number)
        return threading.get_ident()

    with ThreadPoolExecutor(16) as pool:
        calls = [
            pool.submit(one.run, lambda _, n=number: note(n), timeout_s=10) for number in range(200)
        ]
        idents = {call.result(20) for call in calls}
    assert len(idents) == 1, f"got {len(idents)} threads, want one"
    assert idents != {threading.get_ident()}
    assert sorted(seen) == list(range(200))


def test_an_error_comes_back_and_the_thread_goes_on(writer: Make) -> None:
    one = writer()
    with pytest.raises(InputError, match="It is bad"):
        one.run(raise_input_error, timeout_s=5)
    assert one.run(lambda _: 7, timeout_s=5) == 7


def test_a_call_that_waits_too_long_is_never_done(writer: Make) -> None:
    one = writer()
    began, go = threading.Event(), threading.Event()
    done: list[str] = []

    def hold(_: Engine) -> None:
        began.set()
        go.wait(10)

    holder = threading.Thread(target=lambda: one.run(hold, timeout_s=10))
    holder.start()
    began.wait(5)
    with pytest.raises(ConflictError) as caught:
        one.run(lambda _: done.append("late"), timeout_s=0.05)
    assert caught.value.reference == "agent-busy"
    assert one.busy_s > 0.04, f"got {one.busy_s}, want the time it holds"
    go.set()
    holder.join(5)
    one.run(lambda _: done.append("next"), timeout_s=5)
    assert done == ["next"], f"got {done}, want only what came in time"


def test_work_that_has_begun_goes_on_past_the_caller(writer: Make) -> None:
    one = writer()
    go, ended = threading.Event(), threading.Event()

    def slow(_: Engine) -> None:
        go.wait(10)
        ended.set()

    with pytest.raises(FailedError) as caught:
        one.run(slow, timeout_s=0.05)
    assert caught.value.reference == "still-running"
    go.set()
    assert ended.wait(5), "got no end of the work, want it done"


def test_too_many_calls_are_refused(writer: Make) -> None:
    one = writer()
    go = threading.Event()
    threading.Thread(target=lambda: one.run(lambda _: go.wait(20), timeout_s=20)).start()
    end_s = time.monotonic() + 5
    while not one.busy_s and time.monotonic() < end_s:
        time.sleep(0.001)
    refused = 0
    for _ in range(MAX_WAITING + 5):
        with pytest.raises(ConflictError) as caught:
            one.run(lambda _: None, timeout_s=0.0)
        refused += "calls wait" in caught.value.message
    go.set()
    assert refused == 5, f"got {refused} refused for want of room, want 5"


def test_idle_is_called_between_calls_and_when_woken(writer: Make) -> None:
    calls: list[float] = []
    looked = threading.Event()

    def idle() -> float | None:
        calls.append(time.monotonic())
        looked.set()
        return None if len(calls) > 2 else 0.02

    one = writer(idle=idle)
    end_s = time.monotonic() + 5
    while len(calls) < 3 and time.monotonic() < end_s:
        time.sleep(0.005)
    assert len(calls) == 3, f"got {len(calls)} calls, want 3"
    looked.clear()
    one.wake()
    assert looked.wait(5), "got no look after a wake"
    one.run(lambda _: None, timeout_s=5)


def test_a_flood_of_calls_does_not_keep_idle_away(writer: Make) -> None:
    looks: list[float] = []

    def idle() -> float:
        looks.append(time.monotonic())
        return 0.02

    one = writer(idle=idle)
    stop = threading.Event()

    def flood() -> None:
        while not stop.is_set():
            one.run(lambda _: None, timeout_s=5)

    threads = [threading.Thread(target=flood) for _ in range(8)]
    for thread in threads:
        thread.start()
    end_s = time.monotonic() + 5
    while len(looks) < 10 and time.monotonic() < end_s:
        time.sleep(0.01)
    stop.set()
    for thread in threads:
        thread.join(5)
    assert len(looks) >= 10, f"got {len(looks)} looks in 5 s, want 10"


def test_what_waits_at_the_end_is_refused() -> None:
    one = Writer(Engine())
    go = threading.Event()
    one.start()
    caught: list[str] = []

    def late() -> None:
        try:
            one.run(lambda _: None, timeout_s=10)
        except ConflictError as error:
            caught.append(error.reference)

    first = threading.Thread(target=lambda: one.run(lambda _: go.wait(10), timeout_s=10))
    first.start()
    end_s = time.monotonic() + 5
    while not one.busy_s and time.monotonic() < end_s:
        time.sleep(0.001)
    second = threading.Thread(target=late)
    second.start()
    while one.waiting < 1 and time.monotonic() < end_s:
        time.sleep(0.001)
    stopper = threading.Thread(target=one.stop)
    stopper.start()
    while not one.is_stopping and time.monotonic() < end_s:
        time.sleep(0.001)
    go.set()
    for thread in (first, second, stopper):
        thread.join(5)
    assert caught == ["agent-stopping"], f"got {caught}"
    with pytest.raises(ConflictError):
        one.run(lambda _: None, timeout_s=1)
