# SPDX-License-Identifier: Apache-2.0
"""The pinned map that operators fill with bpftool, by the commands that the README gives."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from ipaddress import ip_address

import pytest

from shapeagent.model.codes import Code
from tests.bpf import frames
from tests.bpf.frames import tcp4, tcp6
from tests.bpf.kit import BULK, NORMAL, STREAM, Rig

pytestmark = pytest.mark.skipif(shutil.which("bpftool") is None, reason="bpftool is not installed")

DEFAULT = NORMAL, Code.DEFAULT


def bpftool(*words: str) -> str:
    """Return bpftool's output."""
    done = subprocess.run(["bpftool", *words], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, f"bpftool {' '.join(words)}: {done.stderr or done.stdout}"
    return done.stdout


def hex_bytes(raw: bytes) -> list[str]:
    """Return bytes as bpftool wants them after `hex`."""
    return [f"{byte:02x}" for byte in raw]


def key_of(address: str) -> list[str]:
    """Return the key: the remote address in network order, IPv4 as ::ffff:a.b.c.d."""
    packed = ip_address(address).packed
    return hex_bytes(packed if len(packed) == 16 else bytes(10) + b"\xff\xff" + packed)


def value_of(number: int, expires_boot_s: int = 0) -> list[str]:
    """Return the value: class u32, padding, end in seconds of CLOCK_BOOTTIME; little-endian."""
    return hex_bytes(number.to_bytes(4, "little") + bytes(4) + expires_boot_s.to_bytes(8, "little"))


@pytest.mark.parametrize("address", [frames.PEER4, frames.PEER6])
def test_bpftool_puts_an_address_into_a_class_and_takes_it_out(rig: Rig, address: str) -> None:
    pinned = str(rig.folder / "manual")
    frame = tcp6(1, 2) if ":" in address else tcp4(1, 2)
    assert rig.classify(frame) == DEFAULT  # cached as default from here on
    key = ["key", "hex", *key_of(address)]
    bpftool("map", "update", "pinned", pinned, *key, "value", "hex", *value_of(BULK))
    rig.next_jiffy()
    got = rig.classify(frame)
    assert got == (BULK, Code.MANUAL), f"got {got}, want bulk by the manual map"
    shown = json.loads(bpftool("-j", "map", "lookup", "pinned", pinned, *key))
    assert int(shown["value"][0], 16) == BULK
    bpftool("map", "delete", "pinned", pinned, *key)
    rig.next_jiffy()
    got = rig.classify(frame)
    assert got == DEFAULT, f"got {got}, want the default class"


def test_an_entry_by_bpftool_ends_at_its_boot_time(rig: Rig) -> None:
    end = int(time.clock_gettime(time.CLOCK_BOOTTIME)) + 2
    words = ["key", "hex", *key_of(frames.PEER4), "value", "hex", *value_of(STREAM, end)]
    bpftool("map", "update", "pinned", str(rig.folder / "manual"), *words)
    got = rig.classify(tcp4(1, 2))
    assert got == (STREAM, Code.MANUAL), f"got {got}, want stream until {end}"

    def is_over() -> bool:
        return rig.classify(tcp4(1, 2)) == DEFAULT

    rig.wait(is_over, "end of the manual entry")
    late = time.clock_gettime(time.CLOCK_BOOTTIME) - end
    assert 0 <= late < 0.5, f"got the end {late:.3f} s after its time, want within half a second"


def test_an_entry_by_bpftool_that_is_over_does_not_count(rig: Rig) -> None:
    past = max(1, int(time.clock_gettime(time.CLOCK_BOOTTIME)) - 1)
    words = ["key", "hex", *key_of(frames.PEER4), "value", "hex", *value_of(STREAM, past)]
    bpftool("map", "update", "pinned", str(rig.folder / "manual"), *words)
    got = rig.classify(tcp4(1, 2))
    assert got == DEFAULT, f"got {got}, want the default class"
