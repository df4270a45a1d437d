# SPDX-License-Identifier: Apache-2.0
"""Shell completion: the script, and the words it gets."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shapectl.cli import main

_ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_asks_shapectl_for_the_words(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert f"_SHAPECTL_COMPLETE={shell}_complete" in out
    assert main(["completion", shell, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["script"].strip() == out.strip()


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_accepts_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", "bash"])
    script = capsys.readouterr().out
    run = subprocess.run(
        ["bash", "-n"], input=script, capture_output=True, text=True, check=False, timeout=30
    )
    assert (run.returncode, run.stderr) == (0, "")


def _complete(line: str) -> list[str]:
    """Return the words that bash is offered for the last word of `line`."""
    words = line.split(" ")
    run = subprocess.run(
        [sys.executable, "-m", "shapectl"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={
            **os.environ,
            "PYTHONPATH": f"{_ROOT / 'agent'}:{_ROOT / 'ctl'}",
            "_SHAPECTL_COMPLETE": "bash_complete",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(words) - 1),
        },
    )
    assert run.stderr == "", f"got {run.stderr}"
    return [row.partition(",")[2] for row in run.stdout.splitlines()]


def test_commands_options_choices_and_devices_are_offered() -> None:
    assert _complete("shapectl at") == ["attach"]
    assert _complete("shapectl whitelist re") == ["remove", "replace"]
    assert _complete("shapectl attach eth0 --profile p") == ["prio", "police"]
    assert "lo" in _complete("shapectl detach l")
