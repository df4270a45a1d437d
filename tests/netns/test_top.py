# SPDX-License-Identifier: Apache-2.0
"""`shapectl top` on a real terminal: keys, sizes, signals, and the terminal put back."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from enginekit import (
    BULK,
    MBIT,
    SIGNAL_UDP,
    Bench,
    UdpSink,
    UdpSource,
    environment,
    pause,
    send_datagrams,
    wait_until,
)

pytestmark = [
    pytest.mark.host,
    pytest.mark.netns,
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
]

# The command itself, in an engine with the folders of the test.
_SCRIPT = """
import sys
from pathlib import Path
run_dir, bpffs_dir, *words = sys.argv[1:]
from shapectl.cli import main
from shapeagent.service import engine
engine.Engine.__init__.__kwdefaults__.update(run_dir=Path(run_dir), bpffs_dir=Path(bpffs_dir))
sys.exit(main(words))
"""
_HOME = b"\x1b[H"
_ENTER, _LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"
_ARRIVING = re.compile(r"^bulk +in ", re.MULTILINE)
_SHOW_CURSOR = b"\x1b[?25h"


def command(one: Bench, *words: str) -> list[str]:
    folders = (str(one.engine.run_dir), str(one.engine.bpffs_dir))
    return [sys.executable, "-c", _SCRIPT, *folders, "--netns", one.netns, "top", *words]


def plain(written: bytes) -> str:
    """Return what a terminal shows, without what moves or colours it."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode(errors="replace"))


class Terminal:
    """A process on a terminal of its own, and what it wrote there."""

    def __init__(self, words: list[str], *, columns: int = 80, lines: int = 24) -> None:
        self.master, self.slave = pty.openpty()
        self.resize(columns, lines)
        self.before = termios.tcgetattr(self.slave)
        self.written = b""
        slave = self.slave

        def own_terminal() -> None:
            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            words,
            stdin=slave, stdout=slave, stderr=slave,
            env=environment(TERM="xterm-256color", LANG="C.UTF-8"),
            start_new_session=True,
            preexec_fn=own_terminal,
        )  # fmt: skip

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("4H", lines, columns, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def read(self) -> None:
        while select.select([self.master], [], [], 0)[0]:
            self.written += os.read(self.master, 65536)

    def frame(self) -> str:
        """Return the last whole picture as text."""
        self.read()
        frames = self.written.split(_HOME)
        text = frames[-1 if b"hide" in frames[-1] or b" all" in frames[-1] else -2 :][0]
        return plain(text)

    def wait_for(self, shown: Callable[[str], bool], what: str, timeout_s: float = 30.0) -> str:
        def is_shown() -> bool:
            self.read()
            assert self.process.poll() is None, f"got an end: {self.written!r}"
            return self.written.count(_HOME) > 1 and shown(self.frame())

        deadline_s = time.monotonic() + timeout_s
        while not is_shown():
            assert time.monotonic() < deadline_s, f"got\n{self.frame()}\nwant {what}"
            pause(0.02)
        return self.frame()

    def modes(self) -> list[Any]:
        return termios.tcgetattr(self.slave)

    def wait_end(self, timeout_s: float = 20.0) -> int:
        deadline_s = time.monotonic() + timeout_s
        while self.process.poll() is None:  # it may wait for room on the terminal
            self.read()
            assert time.monotonic() < deadline_s, f"got no end: {self.written[-500:]!r}"
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.02)
        self.read()
        return self.process.returncode

    def check_put_back(self) -> None:
        assert self.modes() == self.before, f"got {self.modes()}, want {self.before}"
        assert self.written.rfind(_LEAVE) > self.written.rfind(_ENTER), "got the screen kept"
        assert self.written.rfind(_SHOW_CURSOR) > self.written.rfind(b"\x1b[?25l"), "no cursor"

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def one(bench: Callable[..., Bench]) -> Bench:
    made = bench()
    made.attach()
    return made


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    """Give a function that starts a command on a terminal."""
    with contextlib.ExitStack() as stack:

        def start(words: list[str], **options: Any) -> Terminal:
            made = Terminal(words, **options)
            stack.callback(made.close)
            return made

        yield start


@pytest.mark.rates
def test_keys_work_and_the_terminal_is_put_back(
    one: Bench, terminal: Callable[..., Terminal]
) -> None:
    top = terminal(command(one, "--interval", "200ms"))
    first = top.wait_for(lambda text: "bulk" in text, "the classes")
    assert "sort: class" in first
    assert one.device in first
    modes = top.modes()
    assert not modes[3] & (termios.ICANON | termios.ECHO), "got a terminal that echoes keys"
    with UdpSource(one.netns, (one.pair.peer_address4, BULK), bits_per_s=10 * MBIT):
        top.wait_for(
            lambda text: re.search(r"bulk +out +(?:9\.\d\d|1\d\.\d)M", text) is not None,
            "about 10 Mbit/s of bulk",
        )
        top.press("r")
        sorted_by = top.wait_for(lambda text: "sort: rate" in text, "the order by rate")
        assert sorted_by.index("bulk") < sorted_by.index("signal")
    top.press(" ")
    top.wait_for(lambda text: "paused" in text, "the pause")
    top.press("\x1b[A")  # an arrow is no key of ours
    top.press("e")
    top.wait_for(lambda text: "paused" in text and not _ARRIVING.search(text), "one direction only")
    top.press("q")
    assert top.wait_end() == 0
    top.check_put_back()


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 0)],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else None,
)
def test_terminal_is_put_back_after_a_signal(
    one: Bench, terminal: Callable[..., Terminal], number: signal.Signals, code: int
) -> None:
    top = terminal(command(one))
    top.wait_for(lambda text: "bulk" in text, "the classes")
    if number == signal.SIGINT:
        top.press("\x03")
    else:
        top.process.send_signal(number)
    assert top.wait_end() == code, f"got {top.process.returncode}: {top.written[-500:]!r}"
    top.check_put_back()
    assert b"Traceback" not in top.written
    assert "error:" not in plain(top.written)


def test_stopped_and_continued_as_a_job(one: Bench, terminal: Callable[..., Terminal]) -> None:
    # only a process with a shell above it can be stopped by Ctrl-Z
    script = '"$@"; echo "stopped-$?"; fg; echo "ended-$?"'
    top = terminal(["bash", "-mc", script, "bash", *command(one, "--interval", "200ms")])
    top.wait_for(lambda text: "bulk" in text, "the classes")
    top.press("\x1a")

    def has(text: bytes) -> bool:
        top.read()
        return text in top.written

    wait_until(lambda: has(b"stopped-148"), "the shell to see it stopped")
    wait_until(lambda: top.written.count(_ENTER) == 2, "the screen again after fg")
    assert top.written.index(_LEAVE) < top.written.index(b"stopped-148")
    top.wait_for(lambda text: "bulk" in text, "the classes again")
    top.press("q")
    wait_until(lambda: has(b"ended-0"), "its end by q")
    assert top.wait_end() == 0
    top.check_put_back()


def test_screen_follows_the_size_of_the_terminal(
    one: Bench, terminal: Callable[..., Terminal]
) -> None:
    top = terminal(command(one, "--interval", "10s"))
    top.wait_for(lambda text: "history" in text, "the history at 80 columns")
    top.resize(60, 12)
    found = top.wait_for(lambda text: "bulk" in text and "history" not in text, "60 columns", 5)
    assert max(len(line.rstrip()) for line in found.splitlines()) <= 60
    assert len(found.splitlines()) <= 12
    top.resize(100, 30)
    top.wait_for(lambda text: "history" in text, "100 columns", 5)
    top.press("q")
    assert top.wait_end() == 0


def test_it_goes_on_while_an_interface_comes_and_goes(
    one: Bench, terminal: Callable[..., Terminal]
) -> None:
    top = terminal(command(one, one.device, "--interval", "200ms"))
    top.wait_for(lambda text: "bulk" in text, "the classes")
    one.engine.detach(one.device)
    top.wait_for(lambda text: "not attached" in text.splitlines()[0], "the reason")
    one.attach()
    send_datagrams(one.pair, SIGNAL_UDP, 10)
    top.wait_for(lambda text: "not attached" not in text, "the interface again")
    top.press("q")
    assert top.wait_end() == 0
    top.check_put_back()


def test_device_that_is_not_attached_is_an_error_and_no_screen(
    one: Bench, terminal: Callable[..., Terminal]
) -> None:
    one.engine.detach(one.device)
    top = terminal(command(one, one.device))
    assert top.wait_end() == 5
    assert "error: not-attached" in plain(top.written)
    assert _ENTER not in top.written
    assert top.modes() == top.before


def test_without_a_terminal_it_says_what_to_type(one: Bench) -> None:
    done = subprocess.run(
        command(one), capture_output=True, text=True, timeout=60, check=False, env=environment()
    )
    assert done.returncode == 2
    assert "error: not-a-terminal" in done.stderr
    assert "shapectl top --once" in done.stderr
    assert done.stdout == ""


@pytest.mark.rates
def test_once_prints_the_rates_as_json(one: Bench) -> None:
    target = (one.pair.peer_address4, BULK)
    with UdpSink(one.pair.peer_netns, BULK), UdpSource(one.netns, target, bits_per_s=8 * MBIT):
        done = subprocess.run(
            command(one, "--once", "--json", "--interval", "2s"),
            capture_output=True, text=True, timeout=60, check=True, env=environment(),
        )  # fmt: skip
    found = json.loads(done.stdout)
    assert 2.0 <= found["interval_s"] < 4
    (interface,) = found["interfaces"]
    assert (interface["device"], interface["netns"]) == (one.device, one.netns)
    rows = {(row["name"], row["direction"]): row for row in interface["classes"]}
    assert len(rows) == 8
    bulk = rows["bulk", "egress"]
    assert bulk["bits_per_s"] == pytest.approx(8 * MBIT, rel=0.1), f"got {bulk}"
    assert bulk["sent_bits_per_s"] == pytest.approx(bulk["bits_per_s"], rel=0.05), f"got {bulk}"
    assert bulk["ceiling_use"] == pytest.approx(
        bulk["sent_bits_per_s"] / bulk["ceiling_bits_per_s"]
    )
    assert rows["signal", "egress"]["drops_per_s"] == 0
