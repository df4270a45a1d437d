# SPDX-License-Identifier: Apache-2.0
"""Rules for every run: one that executes no test has failed, also when all were skipped."""

from __future__ import annotations

import pytest
from hypothesis import settings

# A time limit for each example fails on a busy machine and says nothing about the code.
settings.register_profile("shapectl", deadline=None)
settings.load_profile("shapectl")

_executed: set[str] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remember which tests ran to a result."""
    if report.when == "call" and report.outcome != "skipped":
        _executed.add(report.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail a run in which nothing was executed."""
    asked_to_run = not session.config.option.collectonly
    if asked_to_run and exitstatus == pytest.ExitCode.OK and not _executed:
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
