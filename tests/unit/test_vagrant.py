# SPDX-License-Identifier: Apache-2.0
"""The VM's files agree with each other, and `make test-vagrant` names what is wrong."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VAGRANT = ROOT / "vagrant"
RUNNER = ROOT / "tests" / "vagrant" / "run.py"


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )


def test_nics_have_the_same_addresses_outside_and_inside() -> None:
    outside = dict(re.findall(r'^([A-Z]+)_MAC = "([0-9a-f:]+)"', read("Vagrantfile"), re.MULTILINE))
    inside = dict(re.findall(r"^([a-z]+)_mac=([0-9a-f:]+)", read("network.sh"), re.MULTILINE))
    assert set(outside) == {"MGMT", "DATA", "PEER"}, f"got {sorted(outside)}"
    assert outside == {name.upper(): mac for name, mac in inside.items()}, (
        f"got {outside} in the Vagrantfile and {inside} in network.sh, want the same"
    )


def read(name: str) -> str:
    return (VAGRANT / name).read_text(encoding="utf-8")


def test_no_key_is_in_the_tree() -> None:
    for path in VAGRANT.rglob("*"):
        if path.is_file() and ".vagrant" not in path.parts:
            text = path.read_text(encoding="utf-8", errors="replace")
            assert not re.search(r"PRIVATE KEY|ssh-(rsa|ed25519) AAAA", text), (
                f"got a key in {path}"
            )


@pytest.mark.skipif(shutil.which("ruby") is None, reason="ruby is not installed")
def test_the_vagrantfiles_are_ruby() -> None:
    for name in ("Vagrantfile", "Vagrantfile.box"):
        done = run("ruby", "-c", str(VAGRANT / name))
        assert done.returncode == 0, f"got {done.stderr} from {name}, want no syntax error"


def test_the_digest_names_what_the_box_is_made_of() -> None:
    script = str(VAGRANT / "build-box.sh")
    first, second = run(script, "--print-digest"), run(script, "--print-digest")
    assert re.fullmatch(r"[0-9a-f]{12}\n", first.stdout), f"got {first.stdout!r}, {first.stderr!r}"
    assert first.stdout == second.stdout, "got two digests of the same files"
    wrong = run(script, "--frob")
    assert wrong.returncode == 2, f"got exit {wrong.returncode}, want 2"
    assert wrong.stderr.startswith("error: bad-argument\n"), f"got {wrong.stderr}"


def test_runner_refuses_what_is_no_pytest_argument() -> None:
    done = run(sys.executable, str(RUNNER), "--tests", "tests/netns; reboot")
    assert done.returncode == 2, f"got exit {done.returncode}: {done.stderr}, want 2"
    assert done.stderr.startswith("error: bad-tests\n"), f"got {done.stderr}"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to come as far as the tools")
def test_runner_names_the_tools_that_are_missing(tmp_path: Path) -> None:
    # /usr/sbin is searched too: libvirtd is there, qemu-system-x86_64 is not.
    done = run(sys.executable, str(RUNNER), PATH=str(tmp_path))
    assert done.returncode == 4, f"got exit {done.returncode}: {done.stderr}, want 4"
    assert done.stderr.startswith("error: missing-tool\n"), f"got {done.stderr}"
    assert "qemu-system-x86_64" in done.stderr, f"got {done.stderr}, want the name"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to drop root")
def test_runner_without_root_says_sudo() -> None:
    nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    done = run(*nobody, sys.executable, str(RUNNER))
    if "ModuleNotFoundError" in done.stderr or "can't open file" in done.stderr:
        pytest.skip("nobody cannot read this checkout")
    assert done.returncode == 3, f"got exit {done.returncode}: {done.stderr}, want 3"
    assert "sudo make test-vagrant" in done.stderr, f"got {done.stderr}"
