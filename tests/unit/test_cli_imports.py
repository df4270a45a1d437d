# SPDX-License-Identifier: Apache-2.0
"""Help and completion stay light: no pyroute2 (120-200 ms), no bcc (73 MB), no rich."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_HEAVY = ("bcc", "pyroute2", "rich", "pydantic", "ctypes", "shapeagent.kernel", "shapeagent.lab")

_SCRIPT = """
import sys
from shapectl.cli import main
before = set(sys.modules)
code = main(sys.argv[1:])
print("modules:", *sorted(sys.modules))
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("words", "exit_code"),
    [
        (["--help"], 0),
        (["whitelist", "add", "--help"], 0),
        (["explain", "--help"], 0),
        (["demo", "--help"], 0),
        (["--version"], 0),
        (["completion", "bash"], 0),
        (["attach"], 2),
        (["attach", "eth0", "--link-rate", "1Gbps"], 2),
        (["policy", "example"], 0),
    ],
)
def test_nothing_heavy_is_loaded(words: list[str], exit_code: int) -> None:
    run = subprocess.run(
        [sys.executable, "-c", _SCRIPT, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "PYTHONPATH": f"{_ROOT / 'agent'}:{_ROOT / 'ctl'}"},
    )
    assert run.returncode == exit_code, f"got {run.returncode}: {run.stderr}"
    loaded = run.stdout.split("modules:")[1].split()
    heavy = [name for name in loaded if name in _HEAVY]
    assert not heavy, f"shapectl {' '.join(words)} loaded {heavy}"
