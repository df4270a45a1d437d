# SPDX-License-Identifier: Apache-2.0
"""A root qdisc of someone else's: refused, taken over, and put back as `tc` showed it."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from enginekit import BULK, MBIT, Bench, environment, send_datagrams, shapectl
from netlab import ip, load_program, tc
from treekit import HTB, MANY_QUEUES, NESTED_HTB, ONE_QUEUE, TBF, build, tc_says

from shapeagent.kernel import snapshot, tcobjects
from shapeagent.kernel.link import read_gso
from shapeagent.kernel.netns import open_rtnl
from shapeagent.kernel.rtnl import attribute_text, attribute_u32, build_tc, nested
from shapeagent.model.errors import ConflictError, FailedError
from shapeagent.model.reports import AttachRequest
from shapeagent.service import restoring
from shapeagent.service.hook import Place

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
]

SCRIPT = Path(__file__).resolve().parents[2] / "packaging" / "shapectl-panic-off"


def check_same(one: Bench, wanted: dict[str, object], state: object) -> None:
    got = tc_says(one.netns, one.device)
    assert got == wanted, f"got {json.dumps(got)}, want {json.dumps(wanted)}"
    found = one.host_state()
    assert found == state, f"got {found}, want {state}"


@pytest.mark.parametrize("name", [*ONE_QUEUE, *MANY_QUEUES])
def test_a_foreign_tree_comes_back_as_tc_showed_it(bench: Callable[..., Bench], name: str) -> None:
    """F8, C39: refused first, with nothing changed; then taken over, twice."""
    one = bench(queues=4 if name in MANY_QUEUES else 1)
    build({**ONE_QUEUE, **MANY_QUEUES}[name], one.netns, one.device)
    shown, before = tc_says(one.netns, one.device), one.host_state()
    with pytest.raises(ConflictError) as caught:
        one.attach()
    assert caught.value.reference == "qdisc-busy", f"got {caught.value.reference}"
    assert "--takeover" in (caught.value.hint or ""), f"got {caught.value.hint}"
    check_same(one, shown, before)
    for _ in range(2):
        report = one.attach(takeover=True, ingress="ifb")
        assert report.plan.takes_over == before_root(shown), f"got {report.plan.takes_over}"
        assert not report.plan.warnings or "no words" not in str(report.plan.warnings)
        during = one.host_state()
        assert during.tree.root is not None
        assert during.tree.root.handle == 0x53480000, f"got {during.tree.root}, want ours"
        assert during.residue == (), f"got {during.residue} while attached, want nothing left"
        assert one.status().problems == (), f"got {one.status().problems}"
        assert not one.attach(takeover=True, ingress="ifb").changed, "got changed, want the same"
        notes = one.engine.detach(one.device).notes
        assert notes == (), f"got {notes}, want nothing to say"
        check_same(one, shown, before)
    one.check_programs_gone()


def before_root(shown: dict[str, object]) -> str:
    qdiscs = shown["qdisc"]
    assert isinstance(qdiscs, list)
    root = next(one for one in qdiscs if one.get("root"))
    return f"{root['kind']} {root['handle']}"


def test_the_restored_tree_works_as_before(bench: Callable[..., Bench]) -> None:
    """Packets find the classes by the restored filters, and no qdisc loses one."""
    one = bench()
    build(HTB, one.netns, one.device)
    ports = {2379: "5:10", 8000: "5:21", BULK: "5:20"}

    def sent_to(handle: str) -> int:
        text = tc("-s", "class", "show", "dev", one.device, "classid", handle, netns=one.netns)
        return int(text.split("Sent ")[1].split()[2]) if "Sent" in text else 0

    one.attach(takeover=True)
    send_datagrams(one.pair, BULK, 50)
    assert one.packets().get("bulk", 0) >= 50, f"got {one.packets()}, want 50 of bulk"
    one.engine.detach(one.device)
    for port in (2379,):
        already = sent_to(ports[port])
        send_datagrams(one.pair, port, 40)
        got = sent_to(ports[port]) - already
        assert got == 40, f"got {got} packets of port {port} in {ports[port]}, want 40"


def test_a_bpf_filter_of_theirs_comes_back_with_its_program(bench: Callable[..., Bench]) -> None:
    """Its program has no other holder: it is kept by a pin of ours until then."""
    one = bench()
    build(HTB, one.netns, one.device)
    descriptor = load_program(0x50010)
    options = nested(
        2, attribute_u32(6, descriptor), attribute_text(7, "theirs"), attribute_u32(8, 1)
    )
    kind = attribute_text(1, "bpf")
    for handle in (1, 2):
        body = build_tc(
            *(one.index, kind, options), handle=handle, parent=0x50000, info=9 << 16 | 0x300
        )
        with open_rtnl(one.netns) as rtnl:
            rtnl.request(44, 0x600, body)
    os.close(descriptor)
    shown, before = tc_says(one.netns, one.device), one.host_state()
    assert "theirs" in json.dumps(shown), f"got {shown}, want their filter"
    one.attach(takeover=True)
    one.engine.detach(one.device)
    check_same(one, shown, before)


def test_a_tree_that_the_kernel_does_not_tell_whole_is_refused(bench: Callable[..., Bench]) -> None:
    one = bench()
    tc(
        *("qdisc", "add", "dev", one.device, "root", "handle", "7:"),
        *("estimator", "1s", "4s", "pfifo", "limit", "5"),
        netns=one.netns,
    )
    before = one.host_state()
    ran = shapectl(
        *("--netns", one.netns, "attach", one.device, "--link-rate", "100mbit", "--takeover")
    )
    assert ran.code == 5, f"got exit {ran.code}: {ran.err}, want 5"
    for word in ("qdisc-not-restorable", "pfifo 7:", "estimator", "--profile police"):
        assert word in ran.err, f"got {ran.err}, want {word!r} in it"
    assert one.host_state() == before, "got a changed host, want nothing done"


@pytest.mark.parametrize("how", ["refused", "differs"])
def test_a_tree_that_does_not_come_back_is_refused(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A kernel that takes a leaf back otherwise, or not at all: named, and nothing is changed."""
    one = bench()
    build(HTB, one.netns, one.device)
    before = one.host_state()
    real = tcobjects.build_request

    def other(
        thing: tcobjects.TcObject, index: int, program_fd: Callable[[int], int]
    ) -> tuple[int, bytes]:
        if thing.kind == "pfifo":
            options = b"" if how == "refused" else b"\x05\0\0\0"
            thing = dataclasses.replace(thing, options=options)
        return real(thing, index, program_fd)

    monkeypatch.setattr(snapshot, "build_request", other)
    with pytest.raises(ConflictError) as caught:
        one.attach(takeover=True)
    assert caught.value.reference == "qdisc-not-restorable", f"got {caught.value}"
    text = f"{caught.value.message} {caught.value.details}"
    assert "pfifo 50:" in text, f"got {text}, want the node named"
    assert one.host_state() == before, "got a changed host, want nothing done"


def test_a_root_with_handles_of_ours_is_not_taken_over(bench: Callable[..., Bench]) -> None:
    one = bench()
    tc("qdisc", "add", "dev", one.device, "root", "handle", "5348:", "htb", netns=one.netns)
    before = one.host_state()
    assert any(text.startswith("qdisc: ") for text in before.residue), f"got {before.residue}"
    with pytest.raises(ConflictError) as caught:
        one.attach(takeover=True)
    assert caught.value.reference == "qdisc-busy", f"got {caught.value}"
    assert "residue" in (caught.value.hint or ""), f"got {caught.value.hint}"
    assert one.host_state() == before, "got a changed host, want nothing done"


def test_takeover_where_nothing_is_to_be_taken_over(bench: Callable[..., Bench]) -> None:
    one = bench()
    before = one.host_state()
    for options in ({}, {"profile": "police"}, {"shadow": True}):
        report = one.attach(takeover=True, **options)
        assert report.plan.takes_over is None, f"got {report.plan.takes_over}"
        one.engine.detach(one.device)
        assert one.host_state() == before, f"got {one.host_state()}, want {before}"


def test_a_dry_run_says_that_it_keeps_a_copy(bench: Callable[..., Bench]) -> None:
    one = bench()
    build(HTB, one.netns, one.device)
    shown, before = tc_says(one.netns, one.device), one.host_state()
    words = ("--netns", one.netns, "attach", one.device, "--link-rate", "100mbit", "--takeover")
    ran = shapectl(*words, "--dry-run")
    assert ran.code == 0, f"got exit {ran.code}: {ran.err}"
    assert 'keep a copy of d0\'s root qdisc "htb 5:"' in ran.out, f"got {ran.out}"
    check_same(one, shown, before)


def test_an_attach_that_fails_puts_the_tree_back(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = bench()
    build(HTB, one.netns, one.device)
    shown, before = tc_says(one.netns, one.device), one.host_state()

    def fail(*_: object, **__: object) -> None:
        raise FailedError("for-the-test", "no program today")

    monkeypatch.setattr(Place, "add", fail)
    with pytest.raises(FailedError) as caught:
        one.engine.attach(AttachRequest(one.device, link_rate_bits_per_s=100 * MBIT, takeover=True))
    assert caught.value.reference == "for-the-test", f"got {caught.value}"
    check_same(one, shown, before)


_KILLED = """
import os, signal, sys
from pathlib import Path
from shapeagent.kernel import qdisc, snapshot
from shapeagent.service.engine import Engine
from shapeagent.service.hook import Place
from shapeagent.model.reports import AttachRequest
netns, device, run_dir, bpffs, verb, where, count = sys.argv[1:]
left = [int(count)]
def dying(function):
    def wrapped(*arguments, **options):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)
    return wrapped
engine = Engine(netns=netns, run_dir=Path(run_dir), bpffs_dir=Path(bpffs))
module, name = where.split(".")
real = getattr({"snapshot": snapshot, "qdisc": qdisc, "Place": Place}[module], name)
if verb == "attach":
    request = AttachRequest(device, link_rate_bits_per_s=100_000_000, takeover=True)
    engine.plan_attach(request)  # the program is in the cache, the tree proven
if where == "qdisc.apply_tree":
    messages = qdisc._tree_messages
    def counted(*arguments):
        for one in messages(*arguments):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            yield one
    qdisc._tree_messages = counted
elif where == "snapshot.build_request":
    snapshot.build_request = dying(real)
elif where == "Place.add":
    Place.add = dying(real)
elif where == "qdisc.delete_root":
    qdisc.delete_root = dying(real)
if verb == "attach":
    engine.attach(request)
else:
    engine.detach(device)
"""


def die_in(one: Bench, verb: str, where: str, count: int) -> bool:
    """Run a verb in a process that kills itself; returns whether it came to that."""
    done = subprocess.run(
        [
            *(sys.executable, "-c", _KILLED, one.netns, one.device),
            *(str(one.engine.run_dir), str(one.engine.bpffs_dir), verb, where, str(count)),
        ],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode in (0, -signal.SIGKILL), f"got {done.returncode}: {done.stderr}"
    return done.returncode != 0


@pytest.mark.parametrize(
    ("where", "count"),
    [("qdisc.apply_tree", 0), ("qdisc.apply_tree", 1), ("qdisc.apply_tree", 7),
     ("Place.add", 0), ("Place.add", 1)],
)  # fmt: skip
def test_after_a_kill_in_attach_detach_puts_the_tree_back(
    bench: Callable[..., Bench], where: str, count: int
) -> None:
    """F3, C36: in front of the first change of a qdisc, behind it, and later."""
    one = bench()
    build(HTB, one.netns, one.device)
    shown, before = tc_says(one.netns, one.device), one.host_state()
    assert die_in(one, "attach", where, count), f"got no kill at {where} {count}"
    assert any(text.startswith("state: ") for text in one.host_state().residue), "got no residue"
    one.engine.detach(one.device)
    check_same(one, shown, before)


def test_after_a_kill_in_detach_a_second_one_goes_on(bench: Callable[..., Bench]) -> None:
    """At every object of the old tree that is made again, and in front of the first."""
    one = bench()
    build(HTB, one.netns, one.device)
    shown, before = tc_says(one.netns, one.device), one.host_state()
    one.attach(takeover=True)
    assert die_in(one, "detach", "qdisc.delete_root", 0), "got no kill"
    count = 0
    while die_in(one, "detach", "snapshot.build_request", count):
        # the next one finds more of it there: it dies at a later object each time
        got = one.host_state().residue
        assert any(text.startswith(("pin: ", "state: ")) for text in got) or not got
        count = min(count + 1, 2)
    check_same(one, shown, before)


def test_a_kill_between_attach_and_detach_changes_nothing(bench: Callable[..., Bench]) -> None:
    """The attach of one process is undone by another, which knows only what is written down."""
    one = bench()
    build(NESTED_HTB, one.netns, one.device)
    shown, before = tc_says(one.netns, one.device), one.host_state()
    words = (sys.executable, "-m", "shapectl", "--netns", one.netns)
    try:
        with subprocess.Popen(
            [*words, "attach", one.device, "--link-rate", "100mbit", "--takeover"],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            out, err = process.communicate(timeout=300)
            assert process.returncode == 0, f"got {process.returncode}: {err} {out}"
    finally:
        ran = shapectl("--netns", one.netns, "detach", one.device)
    assert ran.code == 0, f"got exit {ran.code}: {ran.err}"
    check_same(one, shown, before)


def test_a_root_that_someone_put_in_our_place_stays(bench: Callable[..., Bench]) -> None:
    """F9: theirs is left alone, and what stood there first is kept in words of tc."""
    one = bench()
    build(HTB, one.netns, one.device)
    shown = tc_says(one.netns, one.device)
    one.attach(takeover=True)
    tc("qdisc", "replace", "dev", one.device, "root", "handle", "7:", "pfifo", netns=one.netns)
    report = one.engine.detach(one.device)
    left = one.host_state()
    assert left.tree.root_kind == "pfifo", f"got {left.tree.root_kind}, want theirs"
    assert left.filters == (), f"got {left.filters}, want ours gone"
    kept = one.engine.run_dir / f"{one.key}.kept-undo"
    assert any(str(kept) in note for note in report.notes), f"got {report.notes}, want {kept}"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600, f"got {kept.stat()}"
    assert [text.split(":")[0] for text in left.residue] == ["undo"], f"got {left.residue}"
    tc("qdisc", "del", "dev", one.device, "root", netns=one.netns)
    for line in kept.read_text().splitlines():
        if " add dev " in line:
            tc(*line.split()[3:], netns=one.netns)
    assert tc_says(one.netns, one.device) == shown, "got another tree from the kept lines"
    kept.unlink()


def test_a_restore_that_fails_keeps_what_a_second_one_needs(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = bench()
    build(HTB, one.netns, one.device)
    shown, before = tc_says(one.netns, one.device), one.host_state()
    one.attach(takeover=True)
    with monkeypatch.context() as patched:
        real = tcobjects.build_request

        def refused(
            thing: tcobjects.TcObject, index: int, program_fd: Callable[[int], int]
        ) -> tuple[int, bytes]:
            if thing.kind == "bfifo":
                thing = dataclasses.replace(thing, kind="nosuch")
            return real(thing, index, program_fd)

        patched.setattr(snapshot, "build_request", refused)
        with pytest.raises(FailedError) as caught:
            one.engine.detach(one.device)
    assert caught.value.reference == "restore-refused", f"got {caught.value.reference}"
    assert str(one.engine.run_dir) in (caught.value.hint or ""), f"got {caught.value.hint}"
    assert any(text.startswith("state: ") for text in one.host_state().residue)
    one.engine.detach(one.device)
    check_same(one, shown, before)


@pytest.mark.parametrize("name", ["state.json", "snapshot.json", "policy.toml", "undo"])
def test_with_a_damaged_file_the_old_tree_comes_back(
    bench: Callable[..., Bench], name: str
) -> None:
    """C44: by the kernel's copy."""
    one = bench()
    build(HTB, one.netns, one.device)
    shown, before = tc_says(one.netns, one.device), one.host_state()
    one.attach(takeover=True)
    (one.engine.run_dir / one.key / name).write_bytes(bytes(1887))
    notes = one.engine.detach(one.device).notes
    assert notes == (), f"got {notes}, want nothing to say"
    check_same(one, shown, before)


@pytest.mark.parametrize("name", ["state.json", "snapshot.json", "policy.toml"])
def test_with_a_damaged_state_the_old_tree_is_still_kept_in_words(
    bench: Callable[..., Bench], name: str
) -> None:
    """C44: without the kernel's copies detach takes away what it knows as ours.

    The lines outlive the folder.
    """
    one = bench()
    build(HTB, one.netns, one.device)
    shown = tc_says(one.netns, one.device)
    one.attach(takeover=True)
    one.forget_kept()
    (one.engine.run_dir / one.key / name).write_bytes(bytes(1887))
    report = one.engine.detach(one.device)
    kept = one.engine.run_dir / f"{one.key}.kept-undo"
    assert any(str(kept) in note for note in report.notes), f"got {report.notes}, want {kept}"
    left = one.host_state()
    assert (left.filters, left.pins) == ((), ()), f"got {left}, want ours gone"
    if left.tree.root is not None and left.tree.root.handle == 0x53480000:
        tc("qdisc", "del", "dev", one.device, "root", netns=one.netns)
    if left.tree.hook is not None:  # nobody knows any more who made it
        tc("qdisc", "del", "dev", one.device, "clsact", netns=one.netns)
    for line in kept.read_text().splitlines():
        if " add dev " in line:
            tc(*line.split()[3:], netns=one.netns)
    assert tc_says(one.netns, one.device) == shown, "got another tree from the kept lines"
    kept.unlink()


def test_what_changes_between_plan_and_replacement_is_noticed(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = bench()
    build(TBF, one.netns, one.device)
    real = restoring.take_over
    changed: list[object] = []

    def late(*arguments: object) -> None:
        tc(
            *("qdisc", "replace", "dev", one.device, "root", "handle", "8001:"),
            *("tbf", "rate", "22mbit", "burst", "7777", "limit", "54321"),
            netns=one.netns,
        )
        changed.append(one.host_state().tree)
        real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("shapeagent.service.attaching.take_over", late)
    with pytest.raises(ConflictError) as caught:
        one.attach(takeover=True)
    assert caught.value.reference == "qdisc-changed", f"got {caught.value}"
    found = one.host_state()
    assert found.tree == changed[0], f"got {found.tree}, want their new one"
    assert (found.states, found.pins, found.residue) == ((), (), ()), f"got {found}"


# --- with a shell alone


def panic_off(one: Bench, tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the script with tc, ip and rm in PATH, and nothing else."""
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    for tool in ("tc", "ip", "rm"):
        if not (tools / tool).exists():
            found = subprocess.run(
                ["sh", "-c", f"command -v {tool}"], capture_output=True, text=True, check=True
            )
            (tools / tool).symlink_to(found.stdout.strip())
    return subprocess.run(
        ["env", "-i", f"PATH={tools}", "/bin/sh", str(SCRIPT), "--state",
         str(one.engine.run_dir), *words],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", [*ONE_QUEUE, *MANY_QUEUES])
def test_a_shell_alone_puts_everything_back(
    bench: Callable[..., Bench], tmp_path: Path, name: str
) -> None:
    """F33: no Python, three tools; limits, filters, clsact, IFB, pins and state too."""
    one = bench(queues=4 if name in MANY_QUEUES else 1)
    build({**ONE_QUEUE, **MANY_QUEUES}[name], one.netns, one.device)
    shown, before = tc_says(one.netns, one.device), one.host_state()
    one.attach(takeover=True, ingress="ifb")
    undo = one.engine.run_dir / one.key / "undo"
    assert stat.S_IMODE(undo.stat().st_mode) == 0o600, f"got {undo.stat()}"
    assert undo.stat().st_uid == 0, f"got {undo.stat()}"
    listed = panic_off(one, tmp_path, "--dry-run")
    assert "qdisc add" in listed.stdout, f"got {listed}, want the lines"
    assert one.status().problems == (), "got damage by a dry run"
    done = panic_off(one, tmp_path, one.device)
    assert done.returncode == 0, f"got {done}"
    check_same(one, shown, before)
    again = panic_off(one, tmp_path)
    assert again.returncode == 0, f"got {again}, want nothing to do"


@pytest.mark.hooks("tcx", "clsact")
def test_a_shell_alone_puts_a_default_root_back(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    for profile in ("htb", "police"):
        one = bench()
        before = one.host_state()
        one.attach(profile=profile)
        done = panic_off(one, tmp_path, "--netns", one.netns)
        assert done.returncode == 0, f"got {done}"
        assert one.host_state() == before, f"got {one.host_state()}, want {before}"


@pytest.mark.hooks("clsact")
def test_a_shell_alone_leaves_the_root_of_others(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    one = bench()
    build(HTB, one.netns, one.device)
    one.attach(takeover=True)
    tc("qdisc", "replace", "dev", one.device, "root", "handle", "7:", "pfifo", netns=one.netns)
    tc("filter", "add", "dev", one.device, "egress", "prio", "9", "u32", "match", "u32", "0", "0",
       netns=one.netns)  # fmt: skip
    done = panic_off(one, tmp_path)
    assert done.returncode == 1, f"got {done}, want it said"
    assert "not all back" in done.stderr, f"got {done.stderr}"
    left = one.host_state()
    assert left.tree.root_kind == "pfifo", f"got {left.tree.root_kind}, want theirs"
    assert left.tree.hook is not None, "got no clsact, want the one that others use"
    assert {found.pref for found in left.filters} == {9}, f"got {left.filters}, want theirs"
    assert left.states, "got no state, want it for another try"
    with open_rtnl(one.netns) as rtnl:
        assert read_gso(rtnl, one.index).max_size_bytes == 65536, "got a lowered limit"


@pytest.mark.parametrize("name", ["enx78e7d1ea46da", "eth0.100", "a.b-c$(x)*?[]#", ".hidden"])
def test_names_that_a_shell_or_a_path_could_misread(
    bench: Callable[..., Bench], tmp_path: Path, name: str
) -> None:
    """C46: dots, 15 characters, and what is special to a shell, through both ways back."""
    one = bench()
    ip("link", "set", one.device, "down", netns=one.netns)
    ip("link", "set", one.device, "name", name, netns=one.netns)
    ip("link", "set", name, "up", netns=one.netns)
    one.device = name
    build(HTB, one.netns, name)
    shown, before = tc_says(one.netns, name), one.host_state()
    one.attach(takeover=True, ingress="ifb")
    one.engine.detach(name)
    check_same(one, shown, before)
    one.attach(takeover=True, ingress="ifb")
    done = panic_off(one, tmp_path, name)
    assert done.returncode == 0, f"got {done}"
    check_same(one, shown, before)


def test_the_command_hands_over_to_the_script(bench: Callable[..., Bench]) -> None:
    one = bench()
    build(HTB, one.netns, one.device)
    shown, before = tc_says(one.netns, one.device), one.host_state()
    words = ("--netns", one.netns)
    ran = shapectl(*words, "attach", one.device, "--link-rate", "100mbit", "--takeover")
    assert ran.code == 0, f"got exit {ran.code}: {ran.err}"
    ran = shapectl(*words, "panic-off", one.device)
    assert ran.code == 0, f"got exit {ran.code}: {ran.err}"
    check_same(one, shown, before)
