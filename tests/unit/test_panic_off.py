# SPDX-License-Identifier: Apache-2.0
"""shapectl-panic-off with tools that only write down how they were called."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from shapectl.commands.panic_off import find_script

SCRIPT = Path(__file__).resolve().parents[2] / "packaging" / "shapectl-panic-off"
HEADER = "# shapectl-undo 1 d0 -\n"


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """Give a folder with a tc, ip and rm that note their arguments and do nothing.

    `tc` fails where `failing` names a word of its arguments.
    """
    folder = tmp_path / "tools"
    folder.mkdir()
    for name in ("tc", "ip", "rm"):
        text = f'#!/bin/sh\nprintf "%s\\n" "{name} $*" >>"{tmp_path}/called"\n'
        text += f'read -r word <"{tmp_path}/failing" || exit 0\n'
        text += 'case " $* " in *" $word "*) exit 2 ;; esac\n'
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (tmp_path / "failing").write_text("")
    return folder


def run(
    tools: Path, lines: str, *words: str, key: str = "77-3"
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the script over one file of lines; returns what the tools were called with."""
    state = tools.parent / "state"
    (state / key).mkdir(parents=True, exist_ok=True)
    (state / key / "undo").write_text(lines.replace("STATE", str(state)))
    called = tools.parent / "called"
    called.unlink(missing_ok=True)
    done = subprocess.run(
        ["env", "-i", f"PATH={tools}", "/bin/sh", str(SCRIPT), "--state", str(state), *words],
        cwd=tools,  # where a pattern would find names
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return done, called.read_text().splitlines() if called.exists() else []


def test_lines_of_attach_are_run_in_order(tools: Path) -> None:
    lines = [
        "tc -n n1 filter del dev d0 egress protocol all pref 21320 handle 0x5348 bpf",
        "ip -n n1 link delete dev shpifb123456789",
        "tc -n n1 qdisc del dev d0 root handle 5348: htb",
        "tc -n n1 qdisc add dev d0 root handle 5: htb default 20",
        "tc -n n1 class add dev d0 parent 5: classid 5:1 htb rate 8000bit",
        "tc -n n1 filter add dev d0 parent 5: protocol 0x0800 pref 1 u32 match u32 0 0",
        "ip -n n1 link set dev d0 gso_max_size 65536 gso_max_segs 65535",
        "ip -n n1 route flush cache",
        "ip -n n1 -6 route flush dev d0 proto 181",
        "rm -r -f -- /sys/fs/bpf/shapectl/77-3",
        f"rm -r -f -- {tools.parent}/state/77-3",
    ]
    done, called = run(tools, HEADER + "\n".join(lines) + "\n")
    assert done.returncode == 0, f"got {done}"
    assert called == lines, f"got {called}, want {lines}"


@pytest.mark.parametrize(
    "line",
    [
        "rm -r -f -- /etc",
        "rm -r -f -- STATE",
        "rm -r -f -- STATE/",
        "rm -r -f -- STATE/../other",
        "rm -r -f -- STATE/77-3/..",
        "rm -r -f -- STATE/77-3 /etc",
        "rm -r -f -- /sys/fs/bpf/other",
        "rm -rf STATE/77-3",
        "sh -c id",
        "/bin/sh STATE/x",
        "tc -batch /tmp/x",
        "tc exec bpf import /tmp/x",
        "ip netns exec n1 id",
        "ip -n n1 netns del n1",
        "ip link add d1 type dummy",
        "ip route flush table main",
        "tc qdisc replace dev d0 root pfifo",
        "tc",
        "ip -n",
    ],
)
def test_a_line_that_attach_never_writes_is_not_run(tools: Path, line: str) -> None:
    done, called = run(tools, f"{HEADER}{line}\n")
    assert called == [], f"got {called} called by {line!r}"
    assert done.returncode == 1, f"got {done}, want it said"
    assert "no line of attach" in done.stderr, f"got {done.stderr}"


def test_nothing_in_a_line_is_evaluated(tools: Path) -> None:
    """C46: names of devices may hold whatever a shell gives a meaning to."""
    words = "tc qdisc add dev $(id)`id`*;id|id root handle 5: htb default ${HOME} ?c ~ #x"
    done, called = run(tools, f"{HEADER}{words}\n")
    assert called == [words], f"got {called}, want the words as they stand"
    assert done.returncode == 0, f"got {done}"


def test_where_the_old_tree_does_not_come_back_the_way_to_it_stays(tools: Path) -> None:
    (tools.parent / "failing").write_text("5:\n")
    lines = (
        "tc qdisc del dev d0 root handle 5348: htb\n"
        "tc qdisc add dev d0 root handle 5: htb default 20\n"
        "tc class add dev d0 parent 9: classid 9:1 htb rate 8000bit\n"
        "ip link set dev d0 gso_max_size 65536 gso_max_segs 65535\n"
        "rm -r -f -- STATE/77-3\n"
    )
    done, called = run(tools, HEADER + lines)
    assert done.returncode == 1, f"got {done}"
    assert [words.split()[0:3] for words in called] == [
        ["tc", "qdisc", "del"],
        ["tc", "qdisc", "add"],
        ["ip", "link", "set"],
    ], f"got {called}, want the limits back and nothing removed"


def test_what_is_gone_already_is_no_failure(tools: Path) -> None:
    (tools.parent / "failing").write_text("del\n")
    done, _ = run(tools, f"{HEADER}tc qdisc del dev d0 root handle 5348: htb\n")
    assert done.returncode == 0, f"got {done}"


def test_a_dry_run_runs_nothing(tools: Path) -> None:
    line = "tc qdisc add dev d0 root handle 5: htb"
    done, called = run(tools, f"{HEADER}{line}\ntc qdisc del dev d0 clsact\n", "--dry-run")
    assert called == [], f"got {called} called"
    assert done.stdout.splitlines() == [line, "tc qdisc del dev d0 clsact"], f"got {done.stdout}"


def test_device_and_namespace_choose_what_is_undone(tools: Path) -> None:
    text = "# shapectl-undo 1 d0 n1\ntc -n n1 qdisc del dev d0 root handle 5348: htb\n"
    for words, hit in (
        (("d0",), True),
        (("d1",), False),
        (("d1", "d0"), True),
        (("--netns", "n1"), True),
        (("--netns", "n2"), False),
        (("--netns", "n1", "--", "d0"), True),
    ):
        done, called = run(tools, text, *words)
        assert bool(called) is hit, f"got {called} by {words}"
        named = any(word.startswith("d") for word in words)
        assert done.returncode == (1 if named and not hit else 0), f"got {done} by {words}"


@pytest.mark.parametrize("header", ["", "# shapectl-undo 2 d0 -\n", "# something\n"])
def test_a_file_of_another_version_is_left(tools: Path, header: str) -> None:
    done, called = run(tools, f"{header}tc qdisc del dev d0 root handle 5348: htb\n")
    assert (done.returncode, called) == (1, []), f"got {done}, {called}"


def test_a_link_is_left(tools: Path) -> None:
    run(tools, HEADER)
    undo = tools.parent / "state" / "77-3" / "undo"
    other = tools.parent / "other"
    other.write_text(f"{HEADER}tc qdisc del dev d0 root handle 5348: htb\n")
    (tools.parent / "state" / "88-3").mkdir()
    (tools.parent / "state" / "88-3" / "undo").symlink_to(other)
    done, called = run(tools, HEADER)
    assert (done.returncode, called) == (1, []), f"got {done}, {called}"
    assert "not a file of ours" in done.stderr, f"got {done.stderr} ({undo})"


def test_usage_and_missing_tools(tools: Path) -> None:
    for words, code in ((("--help",), 0), (("--nonsense",), 2), (("--netns",), 2)):
        done, _ = run(tools, HEADER, *words)
        assert done.returncode == code, f"got {done} by {words}"


def test_the_script_is_found_and_can_be_run() -> None:
    path = find_script()
    assert os.access(path, os.X_OK), f"got {path}, which cannot be run"
    assert path.name == "shapectl-panic-off"
