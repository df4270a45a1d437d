# SPDX-License-Identifier: Apache-2.0
"""Help and completion stay light: no pyroute2 (120-200 ms), no bcc (73 MB), no rich.

So do the commands that look at an attachment or change it (their target is 0.2 s):
tests/netns/test_light_commands.py runs them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_HEAVY = (
    *("bcc", "pyroute2", "rich", "pydantic", "ctypes", "cryptography", "grpc"),
    *("shapeagent.kernel", "shapeagent.lab"),
)

HEAVY_FOR_THE_ENGINE = frozenset(
    {
        *("bcc", "pyroute2", "rich", "pydantic", "grpc", "psutil", "prometheus_client"),
        *("cryptography", "shapeagent.service.identity"),
        *("shutil", "subprocess", "tempfile", "importlib.metadata", "importlib.resources"),
        *(
            "shapeagent.kernel.hostfacts",
            "shapeagent.kernel.livefacts",
            "shapeagent.kernel.tclines",
        ),
        *("shapeagent.lab", "shapeagent.model.hostfacts", "shapeagent.model.schema"),
        *("shapeagent.policy.doctor", "shapeagent.policy.whitelist"),
        *("shapeagent.service.detaching", "shapeagent.service.doctor"),
        *("shapeagent.service.explaining", "shapeagent.service.residue"),
    }
)

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
        (["agent", "certs", "--help"], 0),
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


# What `attach` again, `status`, `class set` and `whitelist add` load before they know more.
_ENGINE_SCRIPT = """
import sys
before = set(sys.modules)
import shapectl.commands.attach, shapectl.commands.class_, shapectl.commands.whitelist
import shapeagent.service.attaching, shapeagent.service.engine
print(*sorted(set(sys.modules) - before))
"""


def test_the_engine_itself_is_light() -> None:
    run = subprocess.run(
        [sys.executable, "-c", _ENGINE_SCRIPT],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": f"{_ROOT / 'agent'}:{_ROOT / 'ctl'}"},
    )
    loaded = run.stdout.split()
    assert "shapeagent.service.engine" in loaded, f"got {loaded}"
    heavy = [name for name in loaded if name in HEAVY_FOR_THE_ENGINE]
    assert not heavy, f"importing the engine loaded {heavy}"


def test_ctrl_c_while_modules_are_read_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt\n")
    path = os.pathsep.join([str(tmp_path), *(entry for entry in sys.path if entry)])
    done = subprocess.run(
        [sys.executable, "-m", "shapectl", "status"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 130, f"got exit {done.returncode}, want 130"
    assert done.stderr == "error: interrupted\nStopped by Ctrl-C.\n", f"got {done.stderr!r}"
