# SPDX-License-Identifier: Apache-2.0
"""Hosts that are not as they should be: named, with an exit code, and nothing is half done."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from enginekit import MBIT, Bench, engine_for, environment, shapectl
from killkit import each_step
from netlab import VethPair, ip, load_program

from shapeagent.kernel import bpf, rtnl
from shapeagent.kernel.link import list_devices
from shapeagent.kernel.netns import open_rtnl
from shapeagent.model.errors import ConflictError, ShapeError
from shapeagent.model.reports import AttachRequest

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
]

# An engine in a mount namespace of its own; `say` prints what an operation came to.
DRIVER = """
import json, subprocess, sys
from pathlib import Path
from shapeagent.model.errors import ShapeError
from shapeagent.model.reports import AttachRequest
from shapeagent.service.engine import Engine
from enginekit import entry, host_state

netns, device, run_dir, bpffs_dir = sys.argv[1:5]
warnings = []
engine = Engine(
    netns=netns, run_dir=Path(run_dir), bpffs_dir=Path(bpffs_dir), warn=warnings.append
)

def mount(*words):
    subprocess.run(["mount", *words], check=True)

def attach(**options):
    engine.attach(AttachRequest(device, link_rate_bits_per_s=100_000_000, **options))

def ceiling():
    rows = engine.status(device)[0].classes
    return next(row for row in rows if row.name == "bulk").ceiling_bits_per_s

def say(what, call):
    try:
        call()
        print(json.dumps([what, 0, "", ""]), flush=True)
    except ShapeError as error:
        print(json.dumps([what, error.exit_code, error.reference, error.message]), flush=True)

def tell(what, value):
    print(json.dumps([what, value]), flush=True)
"""


def drive(one: Bench, program: str) -> list[list[Any]]:
    """Return what a program on top of DRIVER printed, one list a line."""
    words = [one.netns, one.device, str(one.engine.run_dir), str(one.engine.bpffs_dir)]
    one.engine.run_dir.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private",
         sys.executable, "-c", DRIVER + program, *words],
        env=environment(), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"got exit {done.returncode}: {done.stderr}"
    return [json.loads(line) for line in done.stdout.splitlines()]


# --- the state folder


@pytest.mark.host
def test_a_disk_that_is_full_at_any_moment_of_attach_changes_nothing(
    bench: Callable[..., Bench],
) -> None:
    """F30: a file system with room for one block more each time, until attach fits."""
    one = bench()
    one.attach()  # the image is compiled
    one.engine.detach(one.device)
    got = drive(
        one,
        """
before = host_state(netns, device, engine)
for blocks in range(1, 60):
    mount("-t", "tmpfs", "-o", f"nr_blocks={blocks}", "tmpfs", run_dir)
    say(blocks, lambda: attach(ingress="ifb", segment_limit="3028"))
    fits = engine.status() != ()
    if fits:
        engine.detach(device)
    tell("same", host_state(netns, device, engine) == before)
    subprocess.run(["umount", run_dir], check=True)
    if fits:
        break
""",
    )
    same = [line[1] for line in got if line[0] == "same"]
    tries = [line for line in got if line[0] != "same"]
    assert all(same), f"got {got}, want the host as before each time"
    assert len(tries) >= 5, f"got {tries}, want several that do not fit"
    for blocks, code, reference, message in tries[:-1]:
        assert (code, reference) == (1, "state-unwritable"), f"got {message} with {blocks} blocks"
        assert "No space left" in message, f"got {message}"
    assert tries[-1][1] == 0, f"got {tries[-1]}, want an attach that fits"


@pytest.mark.host
def test_a_disk_that_fills_while_attached_changes_nothing_and_lets_detach_through(
    bench: Callable[..., Bench],
) -> None:
    """F30: shaping stays; a ceiling or list that cannot be written down is not changed."""
    one = bench()
    got = drive(
        one,
        """
before = host_state(netns, device, engine)
mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", run_dir)
attach(segment_limit="3028")
engine.class_set(device, "bulk", 40_000_000)
engine.whitelist_add(device, [entry("192.0.2.1 class=bulk")])
try:
    with open(run_dir + "/filler", "wb") as filler:
        while True:
            filler.write(bytes(4096))
            filler.flush()
except OSError:
    pass
during = host_state(netns, device, engine)
say("ceiling", lambda: engine.class_set(device, "bulk", 50_000_000))
tell("in force", ceiling())
many = [entry(f"10.0.{n >> 8}.{n & 255} class=bulk") for n in range(2_000)]  # one may fit yet
say("whitelist", lambda: engine.whitelist_add(device, many))
tell("entries", len(engine.whitelist_list(device)))
tell("listed", sum(row.packets >= 0 for row in engine.status(device)[0].classes) > 0)
tell("problems", engine.status(device)[0].problems)
tell("unchanged", host_state(netns, device, engine).tree == during.tree)
say("detach", lambda: engine.detach(device))
tell("restored", host_state(netns, device, engine).tree == before.tree
     and host_state(netns, device, engine).gso == before.gso)
tell("left", engine.status())
""",
    )
    told = {line[0]: line[1:] for line in got}
    for what in ("ceiling", "whitelist"):
        assert told[what][:2] == [1, "state-unwritable"], f"got {told[what]} for {what}"
    assert told["in force"] == [40 * MBIT], f"got {told['in force']}, want the old ceiling"
    assert told["entries"] == [1], f"got {told['entries']}, want the old list"
    assert told["problems"] == [[]], f"got {told['problems']}"
    assert told["unchanged"] == [True], "got a changed tree"
    assert told["detach"][0] == 0, f"got {told['detach']}"
    assert told["restored"] == [True], "got another tree or limit than before"
    assert told["left"] == [[]], f"got {told['left']}, want nothing attached"


@pytest.mark.host
def test_a_read_only_folder_changes_nothing(bench: Callable[..., Bench]) -> None:
    """C44: status works, from the kernel's copy too; changes are refused by name."""
    one = bench()
    got = drive(
        one,
        """
mount("-t", "tmpfs", "tmpfs", run_dir)
attach()
during = host_state(netns, device, engine)
state = next(Path(run_dir).glob("*/state.json"))
good = state.read_bytes()
state.write_bytes(bytes(1887))
mount("-o", "remount,ro", run_dir)
say("status", lambda: engine.status(device))
tell("warned", [text for text in warnings if "state.json" in text] != [])
tell("shown", [text for text in engine.status(device)[0].warnings if "state.json" in text] != [])
say("ceiling", lambda: engine.class_set(device, "bulk", 50_000_000))
say("attach", attach)
say("detach", lambda: engine.detach(device))
tell("same", host_state(netns, device, engine) == during)
mount("-o", "remount,rw", run_dir)
say("later", lambda: engine.detach(device))
""",
    )
    told = {line[0]: line[1:] for line in got}
    assert told["status"][0] == 0, f"got {told['status']}, want it to work"
    assert told["warned"] == [True], "got no warning"
    assert told["shown"] == [True], "got nothing about it in the status"
    for what in ("ceiling", "attach", "detach"):
        assert told[what][:2] == [1, "state-unwritable"], f"got {told[what]} for {what}"
    assert told["same"] == [True], "got a changed host"
    assert told["later"][0] == 0, f"got {told['later']}"


# --- bpffs


def test_bpffs_missing_or_read_only(bench: Callable[..., Bench]) -> None:
    """F6: mounted where it is missing; refused where it is read-only."""
    one = bench()
    before = one.host_state()
    got = drive(
        one,
        """
subprocess.run(["umount", "--lazy", "/sys/fs/bpf"], check=True)
say("missing", attach)
tell("mounted", Path(bpffs_dir).is_dir())
say("detach", lambda: engine.detach(device))
Path(bpffs_dir).rmdir()
mount("-o", "remount,ro", "/sys/fs/bpf")
say("read-only", attach)
tell("states", [path.name for path in Path(run_dir).glob("*/*")])
""",
    )
    told = {line[0]: line[1:] for line in got}
    assert told["missing"][0] == 0, f"got {told['missing']}, want it mounted"
    assert told["mounted"] == [True]
    assert told["detach"][0] == 0, f"got {told['detach']}"
    assert told["read-only"][:2] == [4, "no-bpffs"], f"got {told['read-only']}"
    assert told["states"] == [[]], f"got {told['states']} left"
    assert one.host_state() == before, f"got {one.host_state()}, want {before}"


def pin_program(path: Path) -> None:
    descriptor = load_program()
    bpf.pin(descriptor, str(path))
    os.close(descriptor)


def pin_map(path: Path) -> None:
    descriptor = bpf.create_map("theirs", bpf.MapShape(bpf.MapType.ARRAY, 4, 4, 1, 0))
    bpf.pin(descriptor, str(path))
    os.close(descriptor)


@pytest.mark.host
@pytest.mark.parametrize("make", [pin_program, pin_map, Path.mkdir])
def test_what_is_not_ours_in_our_pin_folder_stays(
    bench: Callable[..., Bench], make: Callable[[Path], None]
) -> None:
    """Before attach it is refused, and nothing changes; detach leaves it and says so."""
    one = bench()
    one.attach()
    one.engine.detach(one.device)
    clean = one.host_state()
    one.engine.bpffs_dir.mkdir(mode=0o700, exist_ok=True)
    one.pins.mkdir(mode=0o700)
    foreign = one.pins / "theirs"
    make(foreign)
    before = one.host_state()
    with pytest.raises(ConflictError) as caught:
        one.attach()
    assert caught.value.reference == "pins-foreign", f"got {caught.value}"
    assert "theirs" in caught.value.message, f"got {caught.value.message}, want it named"
    assert foreign.exists(), "got it deleted"
    assert one.host_state() == before, f"got {one.host_state()}, want {before}"
    remove(foreign)
    one.attach()
    make(foreign)
    report = one.engine.detach(one.device)
    assert any("theirs" in note for note in report.notes), f"got {report.notes}"
    assert [pin.name for pin in one.pins.iterdir()] == ["theirs"], "got more or less left"
    remove(foreign)
    one.pins.rmdir()
    assert one.host_state() == clean, f"got {one.host_state()}, want {clean}"


def remove(path: Path) -> None:
    if path.is_dir():
        path.rmdir()
    else:
        path.unlink()


@pytest.mark.parametrize("where", ["above", "folder"])
def test_a_pin_where_our_folder_should_be_is_refused(
    bench: Callable[..., Bench], where: str
) -> None:
    one = bench()
    one.attach()
    one.engine.detach(one.device)
    path = one.engine.bpffs_dir
    if where == "folder":
        path.mkdir(mode=0o700, exist_ok=True)
        path = one.pins
    else:
        path.rmdir()
    pin_program(path)
    try:
        with pytest.raises(ConflictError) as caught:
            one.attach()
        assert caught.value.reference == "pins-foreign", f"got {caught.value}"
        assert path.exists(), "got it deleted"
    finally:
        path.unlink()
    found = one.host_state()
    assert (found.states, found.filters, found.residue) == ((), (), ()), f"got {found}"


# --- tools and privileges


@pytest.mark.host
def test_no_tool_is_needed(bench: Callable[..., Bench], tmp_path: Path) -> None:
    """C116: neither tc nor ip is in PATH."""
    one = bench()
    before = one.host_state()
    (tmp_path / "empty").mkdir()
    env = environment(PATH=str(tmp_path / "empty"))
    words = ("--netns", one.netns)
    for arguments in (
        ("attach", one.device, "--link-rate", "100mbit", "--ingress", "ifb"),
        ("status",),
        ("class", "set", "bulk", "--ceiling", "20mbit"),
        ("detach", one.device),
    ):
        ran = shapectl(*words, *arguments, env=env)
        assert ran.code == 0, f"got exit {ran.code} from {arguments}: {ran.err}"
    assert one.host_state() == before, f"got {one.host_state()}, want {before}"


def test_root_of_a_user_namespace_is_told_what_it_lacks() -> None:
    """F32."""
    prefix = ("unshare", "--user", "--map-root-user", "--net")
    done = subprocess.run([*prefix, "true"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this host allows no user namespace: {done.stderr}")
    for words in (("attach", "lo", "--link-rate", "1gbit"), ("detach", "lo"), ("status",)):
        ran = shapectl(*words, prefix=prefix)
        assert ran.code == 3, f"got exit {ran.code} from {words}: {ran.err}, want 3"
        assert "error: missing-privilege\n" in ran.err, f"got {ran.err}"
        assert "CAP_BPF" in ran.err, f"got {ran.err}, want the capability named"
        assert "Traceback" not in ran.err, f"got {ran.err}"


# --- others, and devices that go


@pytest.mark.host
def test_two_attaches_at_once_make_one(bench: Callable[..., Bench]) -> None:
    """F16: whoever comes second waits, and finds it attached or is told who holds the lock."""
    one = bench()
    one.attach()
    one.engine.detach(one.device)
    before = one.host_state()
    program = (
        DRIVER
        + """
sys.stdin.readline()
say("attach", attach)
"""
    )
    words = [one.netns, one.device, str(one.engine.run_dir), str(one.engine.bpffs_dir)]
    for _ in range(5):
        with contextlib.ExitStack() as stack:
            processes = [
                stack.enter_context(
                    subprocess.Popen(
                        [sys.executable, "-c", program, *words],
                        env=environment(),
                        text=True,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                    )
                )
                for _ in range(2)
            ]
            for process in processes:
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
            told = [json.loads(process.communicate(timeout=120)[0]) for process in processes]
        results = sorted((code, reference) for _, code, reference, _ in told)
        assert results[0] == (0, ""), f"got {told}, want one that attached"
        assert results[1] in ((0, ""), (5, "locked")), f"got {told}"
        found = one.host_state()
        assert len(found.ours) == 2, f"got {found.ours}, want one per direction"
        assert one.status().problems == (), f"got {one.status().problems}"
        one.engine.detach(one.device)
        assert one.host_state() == before, f"got {one.host_state()}, want {before}"


@pytest.mark.slow
@pytest.mark.host
@pytest.mark.parametrize("operation", ["attach", "detach"])
def test_a_device_that_goes_before_any_change_leaves_nothing(
    veth_pair: Callable[..., VethPair],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    operation: str,
) -> None:
    """C34: before the first request to the kernel, the second, and so on to the end."""
    real_request, real_call = rtnl.Rtnl.request, bpf.bpf_call
    left: list[int] = []
    pair = veth_pair()

    def step() -> None:
        if left and left[0] == 0:
            left.clear()
            ip("link", "delete", pair.device, netns=pair.netns)
        elif left:
            left[0] -= 1

    def request(self: rtnl.Rtnl, *arguments: Any) -> Any:
        step()
        return real_request(self, *arguments)

    def call(command: int, attr: Any) -> Any:
        if command in (0, 5, 6):
            step()
        return real_call(command, attr)

    monkeypatch.setattr(rtnl.Rtnl, "request", request)
    monkeypatch.setattr(bpf, "bpf_call", call)

    with engine_for(pair.netns, tmp_path) as engine:
        wanted = AttachRequest(
            pair.device, link_rate_bits_per_s=100 * MBIT, ingress="ifb", segment_limit="3028"
        )

        def run(number: int) -> bool:
            """Return whether the device went."""
            if operation == "detach" and not engine.status():
                engine.attach(wanted)
            left[:] = [number]
            error: ShapeError | None = None
            try:
                if operation == "attach":
                    engine.attach(wanted)
                else:
                    engine.detach(pair.device)
            except ShapeError as caught:
                error = caught
            went = not left
            left.clear()
            if error is not None:
                got = f"got {error.reference}: {error.message}, before change {number}"
                assert error.reference in ("interface-gone", "no-such-device"), got
                assert error.exit_code in (1, 2), f"got exit {error.exit_code}"
            return went

        def recover(number: int) -> None:
            where = f"gone before change {number} of {operation}"
            with contextlib.suppress(ShapeError):
                engine.detach(pair.device)
            assert not list(engine.run_dir.glob("*/*")), f"got a state left, {where}"
            assert not list(engine.bpffs_dir.glob("*")), f"got pins left, {where}"
            with open_rtnl(pair.netns) as netlink:
                names = [one.name for one in list_devices(netlink) if one.name.startswith("shpifb")]
            assert not names, f"got {names} left, {where}"
            words = ("type", "veth", "peer", "name", pair.peer_device, "netns", pair.peer_netns)
            ip("link", "add", pair.device, *words, netns=pair.netns)
            ip("link", "set", pair.device, "up", netns=pair.netns)

        steps = each_step(run, recover)
        print(f"{operation}: {steps} changes")
        assert steps >= 5, f"got {steps} changes, want them found"
        engine.detach(pair.device)
