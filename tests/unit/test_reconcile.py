# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shapeagent.policy.reconcile import (
    FORGET_S,
    MOST_RETRY_WAIT_S,
    MOST_TRIES,
    Choice,
    Dispute,
    Retry,
)


def test_the_first_is_put_back_at_once_and_each_next_later() -> None:
    dispute, now_s, times = Dispute(), 100.0, []
    while True:
        choice, due_s = dispute.choose(now_s)
        if choice is Choice.YIELD:
            break
        if choice is Choice.APPLY:
            dispute.applied(now_s)
            times.append(now_s)
        else:
            assert due_s > now_s, f"got {due_s}, want later than {now_s}"
            now_s = due_s
    assert times == [100.0, 101.0, 103.0, 107.0, 115.0], f"got {times}"


def test_who_has_yielded_stays_so_until_all_is_well() -> None:
    dispute = Dispute([0.0] * MOST_TRIES)
    assert dispute.choose(1.0)[0] is Choice.YIELD
    assert dispute.choose(1.0 + 2 * FORGET_S)[0] is Choice.YIELD, "got a try, want none unasked"
    assert dispute.settled(2.0), "got no end of the dispute, want one"
    assert not dispute.settled(3.0), "got a second end, want one"
    assert dispute.choose(4.0)[0] is Choice.APPLY


def test_a_dispute_is_forgotten_after_a_quiet_while() -> None:
    dispute = Dispute([0.0, 1.0, 3.0, 7.0])
    assert dispute.choose(7.0 + FORGET_S)[0] is Choice.APPLY
    assert not dispute.tries, f"got {dispute.tries}, want none remembered"


@given(st.lists(st.floats(0.0, 20.0), max_size=80))
def test_never_more_than_so_many_tries_in_one_dispute(steps: list[float]) -> None:
    dispute, now_s, applied = Dispute(), 0.0, 0
    for step in steps:
        now_s += step
        if dispute.choose(now_s)[0] is Choice.APPLY:
            dispute.applied(now_s)
            applied += 1
    assert applied <= MOST_TRIES, f"got {applied} tries"


def test_a_failed_attach_is_tried_less_and_less_often() -> None:
    retry, now_s, waits = Retry(), 0.0, []
    for _ in range(8):
        due_s = retry.failed(now_s)
        waits.append(due_s - now_s)
        now_s = due_s
    assert waits == [2, 4, 8, 16, 32, 60, 60, 60], f"got {waits}"
    assert waits[-1] == MOST_RETRY_WAIT_S
    retry.succeeded()
    assert retry.failed(now_s) - now_s == 2
