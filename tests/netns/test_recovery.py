# SPDX-License-Identifier: Apache-2.0
"""Damaged state files are put aside and made again from what the kernel holds (C44)."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from enginekit import BULK, MBIT, Bench, entry, send_datagrams, shapectl

from shapeagent.kernel import bpf, kept
from shapeagent.model.errors import ConflictError
from shapeagent.service import listfacts
from shapeagent.service.state import seal, unseal

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
]

FILES = ("state.json", "policy.toml", "snapshot.json", "undo")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def nul(path: Path) -> None:
    path.write_bytes(bytes(1887))


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def changed(path: Path) -> None:
    """One digit, and still well formed: only a checksum tells."""
    text = path.read_text()
    place = max(text.rfind(digit) for digit in "0123456789")
    path.write_text(text[:place] + str(9 - int(text[place])) + text[place + 1 :])


def other_type(path: Path) -> None:
    path.write_text("[]" if path.suffix == ".json" else "\xff\xfe")


def missing(path: Path) -> None:
    path.unlink()


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE = (empty, nul, cut, changed, other_type, missing, folder)


@pytest.mark.host
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("options", [{"profile": "htb", "ingress": "ifb"}, {"profile": "police"}])
def test_a_damaged_state_is_made_again_and_everything_works(
    bench: Callable[..., Bench], damage: Callable[[Path], None], options: dict[str, str]
) -> None:
    """Status says so for good, class set goes on, detach puts all back, the limits too."""
    one = bench()
    said: list[str] = []
    one.engine.warn = said.append
    before = one.host_state()
    one.attach(segment_limit="3028", **options)
    one.engine.class_set(one.device, "bulk", 40 * MBIT)
    good = one.engine.store(one.key).read()
    path = one.engine.run_dir / one.key / "state.json"
    damage(path)
    status = one.status()
    assert status.problems == (), f"got {status.problems}, want all as attach left it"
    assert any("state.json was damaged" in text for text in status.warnings), f"got {status}"
    assert any(str(path) in text for text in said), f"got {said}, want it said aloud"
    aside = list(path.parent.glob("state.json.corrupt-*"))
    assert len(aside) == (damage is not missing), f"got {aside} put aside"
    found = one.engine.store(one.key).read()
    assert good is not None
    assert found is not None
    assert found.ceilings == good.ceilings, f"got {found.ceilings}, want the last ones set"
    assert not one.attach(segment_limit="3028", **options).changed, "got another attachment"
    done = one.engine.class_set(one.device, "bulk", 50 * MBIT)
    assert done.ceiling_bits_per_s == 50 * MBIT, f"got {done}"
    send_datagrams(one.pair, BULK, 20)
    assert one.packets().get("bulk") == 20, f"got {one.packets()}, want 20 of bulk"
    report = one.engine.detach(one.device)
    assert report.notes == (), f"got {report.notes}, want nothing to say"
    assert one.host_state() == before, f"got {one.host_state()}, want {before}"
    one.check_programs_gone()


@pytest.mark.host
@pytest.mark.parametrize("name", FILES[1:])
@pytest.mark.parametrize("damage", DAMAGE)
def test_any_other_damaged_file_is_made_again_by_the_next_change(
    bench: Callable[..., Bench], damage: Callable[[Path], None], name: str
) -> None:
    one = bench()
    before = one.host_state()
    one.attach(profile="htb", segment_limit="3028")
    path = one.engine.run_dir / one.key / name
    good = path.read_bytes()
    damage(path)
    one.engine.class_set(one.device, "bulk", 50 * MBIT)
    assert path.read_bytes() == good, f"got {path.read_bytes()[:80]!r}, want what it was"
    status = one.status()
    assert any(f"{name} was damaged" in text for text in status.warnings), f"got {status.warnings}"
    assert status.problems == (), f"got {status.problems}"
    assert one.engine.detach(one.device).notes == ()
    assert one.host_state() == before, f"got {one.host_state()}, want {before}"


@pytest.mark.host
@pytest.mark.parametrize("command", ["detach", "attach"])
def test_a_folder_that_is_gone_is_made_again(bench: Callable[..., Bench], command: str) -> None:
    """Somebody cleaned /run: the attachment is in force, and no residue."""
    one = bench()
    before = one.host_state()
    one.attach(profile="htb", segment_limit="3028")
    during = one.host_state()
    shutil.rmtree(one.engine.run_dir / one.key)
    assert one.host_state().residue == (), f"got {one.host_state().residue}, want none"
    if command == "attach":
        assert not one.attach(profile="htb", segment_limit="3028").changed
        assert one.host_state() == during, f"got {one.host_state()}, want {during}"
    one.engine.detach(one.device)
    assert one.host_state() == before, f"got {one.host_state()}, want {before}"


def test_a_state_damaged_in_the_middle_of_a_detach_is_finished(bench: Callable[..., Bench]) -> None:
    one = bench()
    before = one.host_state()
    one.attach(profile="htb")
    one.change_state(complete=False)
    nul(one.engine.run_dir / one.key / "state.json")
    with pytest.raises(ConflictError) as caught:
        one.engine.class_set(one.device, "bulk", 50 * MBIT)
    assert caught.value.reference == "attach-unfinished", f"got {caught.value}"
    one.engine.detach(one.device)
    assert one.host_state() == before, f"got {one.host_state()}, want {before}"


@pytest.mark.host
def test_of_damaged_files_a_few_are_kept(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.attach(profile="police")
    path = one.engine.run_dir / one.key / "state.json"
    for _ in range(12):
        nul(path)
        one.status()
    found = list(path.parent.glob("*.corrupt-*"))
    assert len(found) == 8, f"got {len(found)} files put aside, want the last 8"
    assert len(one.status().warnings) <= 12, f"got {one.status().warnings}"


@pytest.mark.host
@pytest.mark.parametrize("text", ['{"schema": 99}', None])
def test_a_state_of_another_version_is_refused_and_left(
    bench: Callable[..., Bench], text: str | None
) -> None:
    """F4: no damage; who wrote it knows what to do with it."""
    one = bench()
    before = one.host_state()
    one.attach(profile="police")
    path = one.engine.run_dir / one.key / "state.json"
    good = path.read_bytes()
    path.write_text(text or seal('{"novelty": 1, ' + unseal(good.decode())[1:]))
    newer = path.read_bytes()
    during = one.host_state()
    for call in (one.status, one.attach, lambda: one.engine.detach(one.device)):
        with pytest.raises(ConflictError) as caught:
            call()
        assert caught.value.reference == "state-other-version", f"got {caught.value}"
        assert caught.value.exit_code == 5, f"got {caught.value.exit_code}"
    assert path.read_bytes() == newer, "got another file, want it left alone"
    assert not list(path.parent.glob("*.corrupt-*")), "got it put aside, want it left"
    assert one.host_state() == during, f"got {one.host_state()}, want {during}"
    assert any("another version" in text for text in during.residue), f"got {during.residue}"
    path.write_bytes(good)
    one.engine.detach(one.device)
    assert one.host_state() == before, f"got {one.host_state()}, want {before}"


LINES = (
    "192.0.2.1 class=signal match=destination owner=ops reason=leases",
    "192.0.2.2 class=bulk match=source",
    "192.0.2.3 class=stream match=either",
    "2001:db8::7 class=signal match=destination",
    "198.51.100.0/24 class=stream match=either owner=ops",
    "198.51.100.0/25 class=bulk match=source",
    "2001:db8:1::/48 class=bulk match=destination",
    "10.0.0.1>10.0.0.2 class=signal",
    "203.0.113.9 class=signal match=destination expires=2099-01-01T00:00:00Z",
)


def last_cut(path: Path) -> None:
    """A change that was acknowledged is gone, and nothing else."""
    path.write_bytes(path.read_bytes()[:-40])


def last_missing(path: Path) -> None:
    """As `last_cut`, but what is left is whole."""
    data = path.read_bytes()
    path.write_bytes(data[: data.rindex(listfacts.MAGIC)])


def byte_changed(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.rindex(bytes((203, 0, 113, 9)))] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage", [empty, nul, cut, last_cut, last_missing, byte_changed, missing, folder]
)
def test_a_damaged_whitelist_is_read_from_the_kernel(
    bench: Callable[..., Bench], damage: Callable[[Path], None]
) -> None:
    one = bench()
    one.attach(profile="police")
    one.engine.whitelist_replace(one.device, [entry(line) for line in LINES[:-1]])
    one.engine.whitelist_add(one.device, [entry(LINES[-1])])
    want = one.engine.whitelist_list(one.device)
    assert len(want) == len(LINES), f"got {want}"
    before_it = one.status().whitelist_generation
    path = one.engine.run_dir / one.key / "whitelist.log"
    damage(path)
    looks_whole = damage in (byte_changed, last_missing)  # `status` reads the last record's end
    assert any("whitelist" in text for text in one.status().warnings) or looks_whole
    got = one.engine.whitelist_list(one.device)
    same = {(row.match, row.source, row.destination, row.traffic_class) for row in want}
    found = {(row.match, row.source, row.destination, row.traffic_class) for row in got}
    assert found == same, f"got {found}, want {same}"
    old = {(row.match, row.source, row.destination): row for row in want}
    for row in got:
        before = old[row.match, row.source, row.destination]
        assert row.owner in ("", before.owner), f"got {row}, want {before}"
        assert (row.expires_unix_s is None) == (before.expires_unix_s is None)
        if row.expires_unix_s is not None and before.expires_unix_s is not None:
            off_s = abs(row.expires_unix_s - before.expires_unix_s)
            assert off_s < 2, f"got an expiry off by {off_s} s"
    assert one.status().whitelist_generation > before_it, "got a generation that was there before"
    assert any("whitelist was damaged" in text for text in one.status().warnings)
    if damage in (last_cut, last_missing, byte_changed):
        assert any(row.owner == "ops" for row in got), f"got {got}, want what lines still say"
    one.engine.whitelist_add(one.device, [entry("192.0.2.77 class=bulk")])
    assert len(one.engine.whitelist_list(one.device)) == len(LINES) + 1
    assert one.status().whitelist_entries == len(LINES) + 1


def test_many_prefixes_are_read_from_their_hash(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.attach(profile="police")
    lines = [f"10.{i >> 8}.{i & 255}.0/24 class=bulk match=either" for i in range(5_000)]
    one.engine.whitelist_replace(one.device, [entry(line) for line in lines])
    want = {row.destination for row in one.engine.whitelist_list(one.device)}
    assert (one.pins / "nets4").exists()
    nul(one.engine.run_dir / one.key / "whitelist.log")
    got = {row.destination for row in one.engine.whitelist_list(one.device)}
    assert got == want, f"got {len(got)} prefixes, want {len(want)}"


@pytest.mark.host
def test_the_command_line_warns(bench: Callable[..., Bench]) -> None:
    one = bench()
    before = one.host_state()
    words = ("--netns", one.netns)
    assert shapectl(*words, "attach", one.device, "--link-rate", "100mbit").code == 0
    try:
        path = Path("/run/shapectl") / one.key / "state.json"
        nul(path)
        ran = shapectl(*words, "status")
        assert ran.code == 0, f"got exit {ran.code}: {ran.err}"
        assert "warning: " in ran.err, f"got {ran.err}"
        assert str(path) in ran.err, f"got {ran.err}, want the file named"
    finally:
        ran = shapectl(*words, "detach", one.device)
    assert ran.code == 0, f"got exit {ran.code}: {ran.err}"
    assert "as it was before attach" in ran.out, f"got {ran.out}"
    assert one.host_state() == before, f"got {one.host_state()}, want {before}"
    assert not path.parent.exists(), f"got {path.parent} left"


# --- the copies themselves


@pytest.fixture
def pins() -> Iterator[Path]:
    above = Path("/sys/fs/bpf") / f"shp-{secrets.token_hex(4)}"
    made = above / "1-1"
    above.mkdir(mode=0o700)
    made.mkdir(mode=0o700)
    yield made
    for pin in made.iterdir():
        pin.unlink()
    made.rmdir()
    above.rmdir()


@pytest.mark.parametrize("size", [0, 1, 4087, 4088, 4089, 100_000])
def test_a_copy_reads_back_whatever_its_size(pins: Path, size: int) -> None:
    data = os.urandom(size)
    assert kept.keep(pins, "state.json", data), "got no copy"
    assert kept.read_kept(pins, "state.json") == data
    again = os.urandom(2 * size + 1)  # it grows, and shrinks
    for text in (again, data):
        assert kept.keep(pins, "state.json", text)
        assert kept.read_kept(pins, "state.json") == text
    assert [pin.name for pin in pins.iterdir()] == ["kept_state"]
    kept.forget(pins, "state.json")
    assert kept.read_kept(pins, "state.json") is None


def test_a_copy_that_was_written_half_counts_as_none(pins: Path) -> None:
    kept.keep(pins, "state.json", bytes(range(256)) * 40)
    descriptor = bpf.get_pinned(str(kept.pin_of(pins, "state.json")))
    bpf.update(descriptor, (1).to_bytes(4, "little"), bytes(kept.SLOT_BYTES))
    os.close(descriptor)
    assert kept.read_kept(pins, "state.json") is None


def test_a_copy_in_somebody_elses_folder_is_not_believed(pins: Path) -> None:
    kept.keep(pins, "state.json", b"{}")
    pins.chmod(0o777)
    assert kept.read_kept(pins, "state.json") is None
    pins.chmod(0o700)
    assert kept.read_kept(pins, "state.json") == b"{}"
