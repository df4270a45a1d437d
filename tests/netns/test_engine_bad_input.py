# SPDX-License-Identifier: Apache-2.0
"""What is wrong is named, with its exit code and without a traceback, and nothing has changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from enginekit import Bench, Ran, environment, shapectl

from shapeagent.kernel.probe import probe_qdiscs
from shapeagent.model.errors import FailedError

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
]

# The command line with an image cache of its own, and with something done at a step.
DRIVER = """
import sys
from pathlib import Path
import shapeagent.kernel.compile as compiler
from shapeagent.service import attaching
compiler.find_image.__kwdefaults__["cache_dir"] = Path(sys.argv[1])
if sys.argv[2]:
    import subprocess
    real = attaching.link.read_traffic
    def step(*args):
        subprocess.run(["ip", "-n", sys.argv[2], "link", "delete", "d0"], check=True)
        return real(*args)
    attaching.link.read_traffic = step
sys.argv[1:] = sys.argv[3:]
from shapectl.cli import main
sys.exit(main())
"""


def drive(cache: Path, *arguments: str, gone_in: str = "", **env: str) -> Ran:
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(cache), gone_in, *arguments],
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def attach_words(one: Bench, *more: str) -> tuple[str, ...]:
    return ("--netns", one.netns, "attach", one.device, *more)


def check(ran: Ran, code: int, reference: str, *words: str) -> None:
    assert ran.code == code, f"got exit {ran.code}: {ran.err}, want {code}"
    # before it may stand what a slow machine says it is doing
    assert f"error: {reference}\n" in ran.err, f"got {ran.err}, want error: {reference}"
    assert "Traceback" not in ran.err, f"got {ran.err}"
    assert "hint:" in ran.err, f"got {ran.err}, want a next step"
    for word in words:
        assert word in ran.err, f"got {ran.err}, want {word!r} in it"


POLICY_ERRORS = """version = 1
default_class = "nobody"
control_class = "signal"
[classes.signal]
priority = 0
guarantee = "100M"
[classes.bulk]
priority = 99
guarantee = "10%"
[[rules]]
name = "x"
class = "bulk"
port = "90000"
protocol = "tcp"
"""


@pytest.mark.host
def test_wrong_words_and_policies(bench: Callable[..., Bench], tmp_path: Path) -> None:
    one = bench()
    before = one.host_state()
    rate = ("--link-rate", "100mbit")
    check(shapectl("--netns", one.netns, "attach", "d9", *rate), 2, "no-such-device", "d9")
    check(shapectl("--netns", "shp-not-there", "status"), 2, "no-such-netns")
    check(shapectl(*attach_words(one)), 2, "link-rate-unknown", "--link-rate")
    ran = shapectl(*attach_words(one, "--link-rate", "1Gbps"))
    check(ran, 2, "ambiguous-rate", "1gbit", "8gbit")
    bad = tmp_path / "bad.toml"
    bad.write_text(POLICY_ERRORS)
    ran = shapectl(*attach_words(one, *rate, "--policy", str(bad)))
    check(ran, 2, "policy-invalid", "nobody", "100M", "99", "90000")
    missing = str(tmp_path / "none.toml")
    ran = shapectl(*attach_words(one, *rate, "--policy", missing))
    assert ran.code == 2, f"got exit {ran.code}: {ran.err}, want 2"
    ran = shapectl(*attach_words(one, *rate, "--json", "--policy", str(bad)))
    assert json.loads(ran.out)["error"] == "policy-invalid", f"got {ran.out}"
    check(shapectl("--netns", one.netns, "status", one.device), 5, "not-attached")
    assert one.host_state() == before, "got a changed host, want nothing done"


def test_a_profile_that_the_kernel_lacks(bench: Callable[..., Bench]) -> None:
    one = bench()
    if {"prio", "tbf"} <= probe_qdiscs():
        pytest.skip("this kernel has prio")
    before = one.host_state()
    ran = shapectl(*attach_words(one, "--link-rate", "100mbit", "--profile", "prio"))
    check(ran, 4, "profile-unsupported", "prio")
    assert one.host_state() == before, "got a changed host, want nothing done"


@pytest.mark.host
def test_without_privilege() -> None:
    nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    readable = subprocess.run([*nobody, sys.executable, "-c", "import shapeagent"],
        env=environment(), capture_output=True, check=False)  # fmt: skip
    if readable.returncode:
        pytest.skip(f"nobody cannot read this checkout: {readable.stderr.decode()[-100:]}")
    for words in (("attach", "lo", "--link-rate", "1gbit"), ("detach", "lo"), ("status",)):
        ran = shapectl(*words, prefix=nobody)
        check(ran, 3, "missing-privilege", "sudo")


@pytest.mark.host
@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("VERSION = '1'\n", "wrong-bcc"),
        ("raise ImportError('libbcc.so.0: version mismatch')\n", "broken-bcc"),
        ("raise ModuleNotFoundError('No module named bcc', name='bcc')\n", "no-bcc"),
    ],
)
def test_a_bcc_that_is_none(
    bench: Callable[..., Bench], tmp_path: Path, text: str, reference: str
) -> None:
    """PyPI's bcc is another program."""
    one = bench()
    before = one.host_state()
    fake = tmp_path / "fake"
    fake.mkdir()
    (fake / "bcc.py").write_text(text)
    path = os.pathsep.join([str(fake), environment()["PYTHONPATH"]])
    words = attach_words(one, "--link-rate", "100mbit")
    ran = drive(tmp_path / "cache", *words, PYTHONPATH=path)
    check(ran, 4, reference, "bcc")
    assert one.host_state() == before, "got a changed host, want nothing done"


@pytest.mark.host
def test_no_kernel_headers(bench: Callable[..., Bench], tmp_path: Path) -> None:
    one = bench()
    before = one.host_state()
    words = attach_words(one, "--link-rate", "100mbit")
    ran = drive(tmp_path / "cache", *words, BCC_KERNEL_SOURCE=str(tmp_path))
    check(ran, 4, "no-kernel-headers")
    assert one.host_state() == before, "got a changed host, want nothing done"


def test_an_interface_that_goes_away_in_the_middle(bench: Callable[..., Bench]) -> None:
    """C34 through the command: one line, exit 1, no traceback."""
    one = bench()
    ran = drive(
        Path("/var/cache/shapectl/images"),
        *attach_words(one, "--link-rate", "100mbit"),
        gone_in=one.netns,
    )
    check(ran, 1, "interface-gone", "d0 went away")
    shown = shapectl("--netns", one.netns, "status", "--json")
    assert json.loads(shown.out)["interfaces"] == [], f"got {shown.out}, want nothing attached"


@pytest.mark.host
@pytest.mark.parametrize("damage", ["", "\0" * 1887, '{"schema": 1, "device": "d0"', "[]", "null"])
def test_a_damaged_state_is_named_and_detach_takes_our_filters(
    bench: Callable[..., Bench], damage: str
) -> None:
    """C44, without the kernel's copy: the pins say what is ours; what nobody remembers is said."""
    one = bench()
    clean = one.host_state()
    one.attach(profile="police", segment_limit="off")
    one.forget_kept()
    (one.engine.run_dir / one.key / "state.json").write_text(damage)
    with pytest.raises(FailedError) as caught:
        one.engine.status(one.device)
    assert caught.value.reference == "state-damaged", f"got {caught.value}"
    report = one.engine.detach(one.device)
    left = one.host_state()
    assert any("no state" in note for note in report.notes), f"got {report.notes}"
    assert left.filters == (), f"got {left.filters}, want our filters gone"
    assert left.pins == clean.pins, f"got {left.pins}, want the pins gone"
    one.check_programs_gone()
    one.attach(profile="police", segment_limit="off")
    one.engine.detach(one.device)
    left = one.host_state()
    assert left.tree.nodes == clean.tree.nodes, f"got {left.tree}, want {clean.tree}"
