# SPDX-License-Identifier: Apache-2.0
"""`shapectl residue`: nothing after a detach, and every kind of leftover when it is there."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from enginekit import Bench, add_bpf_filter, residue_of, shapectl
from netlab import ip, load_program, tc

from shapeagent.kernel import bpf, filters, link, maps, routes
from shapeagent.kernel.netns import open_rtnl
from shapeagent.model.types import Direction

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
]


@contextlib.contextmanager
def filter_left(one: Bench) -> Iterator[None]:
    tc("qdisc", "add", "dev", one.device, "clsact", netns=one.netns)
    descriptor = load_program()
    add_bpf_filter(
        *(one.netns, one.device, Direction.INGRESS, descriptor),
        pref=filters.PREF,
        handle=filters.HANDLE,
    )
    os.close(descriptor)
    yield
    tc("qdisc", "del", "dev", one.device, "clsact", netns=one.netns)


@contextlib.contextmanager
def qdisc_left(one: Bench) -> Iterator[None]:
    tc("qdisc", "add", "dev", one.device, "root", "handle", "5348:", "htb", netns=one.netns)
    yield
    tc("qdisc", "del", "dev", one.device, "root", netns=one.netns)


@contextlib.contextmanager
def ifb_left(one: Bench) -> Iterator[None]:
    with open_rtnl(one.netns) as rtnl:
        made = link.create_ifb(rtnl, one.device)
        yield
        link.delete_ifb(rtnl, made.index)


@contextlib.contextmanager
def unmarked_ifb_left(one: Bench) -> Iterator[None]:
    """What an attach leaves that is killed between making its IFB and marking it."""
    name = link.derive_ifb_name(one.device, ())
    ip("link", "add", name, "type", "ifb", netns=one.netns)
    yield
    ip("link", "delete", name, netns=one.netns)


@contextlib.contextmanager
def route_left(one: Bench) -> Iterator[None]:
    words = ("2001:db8::7/128", "dev", one.device, "proto", str(routes.ROUTE_PROTOCOL))
    ip("-6", "route", "add", *words, netns=one.netns)
    yield
    ip("-6", "route", "del", *words, netns=one.netns)


@contextlib.contextmanager
def pin_left(one: Bench) -> Iterator[None]:
    one.engine.bpffs_dir.mkdir(mode=0o700, exist_ok=True)
    folder = one.engine.bpffs_dir / one.key
    folder.mkdir()
    descriptor = load_program()
    bpf.pin(descriptor, str(folder / "left"))
    os.close(descriptor)
    yield
    (folder / "left").unlink()
    folder.rmdir()


@contextlib.contextmanager
def program_left(one: Bench) -> Iterator[None]:
    descriptor = filters.load_redirect()
    one.program_ids.add(bpf.program_facts(descriptor).id)
    yield
    os.close(descriptor)


@contextlib.contextmanager
def map_left(one: Bench) -> Iterator[None]:
    used = bpf.create_map("ctl", maps.SHAPES["ctl"])
    # r1 = map; r0 = 0; exit: a program of ours, which the test does not look at
    code = struct.pack("=BBhi", 0x18, 0x11, 0, used) + bytes(8)
    code += struct.pack("=BBhi", 0xB7, 0, 0, 0) + struct.pack("=BBhi", 0x95, 0, 0, 0)
    descriptor, _log = bpf.load_program("shp_left", code)
    one.map_ids.add(bpf.map_id(used))
    os.close(used)
    yield
    os.close(descriptor)


@contextlib.contextmanager
def state_left(one: Bench) -> Iterator[None]:
    folder = one.engine.run_dir / one.key
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("\0" * 1887)  # C44
    yield
    shutil.rmtree(folder)


@contextlib.contextmanager
def undo_left(one: Bench) -> Iterator[None]:
    one.engine.run_dir.mkdir(exist_ok=True)
    path = one.engine.run_dir / f"{one.key}.kept-undo"
    path.write_text("# shapectl-undo 1 d0 -\n")
    yield
    path.unlink()


@pytest.mark.parametrize(
    ("kind", "left"),
    [
        ("filter", filter_left),
        ("qdisc", qdisc_left),
        ("ifb", ifb_left),
        ("ifb", unmarked_ifb_left),
        ("route", route_left),
        ("pin", pin_left),
        ("program", program_left),
        ("map", map_left),
        ("state", state_left),
        ("undo", undo_left),
    ],
)
def test_each_kind_of_leftover_is_listed(
    bench: Callable[..., Bench],
    kind: str,
    left: Callable[[Bench], contextlib.AbstractContextManager[None]],
) -> None:
    """F5: named by what it is, and gone from the list when it is gone."""
    one = bench()
    assert residue_of(one.engine) == (), "got something left before the test"
    with left(one):
        found = residue_of(one.engine, one.program_ids, one.map_ids)
        assert [text.split(":")[0] for text in found] == [kind], f"got {found}, want one {kind}"
    found = residue_of(one.engine, one.program_ids, one.map_ids)
    assert found == (), f"got {found}, want nothing"


def test_an_ifb_in_use_and_one_of_others_are_no_residue(bench: Callable[..., Bench]) -> None:
    """Even where someone took our mark off the one, and whatever the other is called."""
    one = bench()
    one.attach(ingress="ifb")
    ip("link", "set", one.state()["ifb"], "alias", "", netns=one.netns)
    ip("link", "add", "shpifb0", "type", "ifb", netns=one.netns)
    ip("link", "add", "shpifb0123456789"[:15], "type", "veth", netns=one.netns)
    found = one.host_state().residue
    assert found == (), f"got {found}, want nothing"


@pytest.mark.hooks("clsact")
def test_a_lowered_segment_limit_is_listed_with_the_way_back(bench: Callable[..., Bench]) -> None:
    """All else was removed by hand, and the attach is marked as one that did not end."""
    one = bench()
    one.attach(profile="police", segment_limit="3028")
    one.change_state(complete=False)
    tc("qdisc", "del", "dev", one.device, "clsact", netns=one.netns)
    items = {item.kind: item for item in one.engine.residue(wait_s=0).items}
    assert {"state", "pin", "segment-limit"} <= set(items), f"got {set(items)}"
    limit = items["segment-limit"]
    assert "gso_max_size 65536" in limit.fix, f"got {limit}, want the limit before"
    ip(*limit.fix.split()[3:], netns=one.netns)
    assert "segment-limit" not in {item.kind for item in one.engine.residue(wait_s=0).items}
    one.engine.detach(one.device)
    assert one.host_state().residue == (), f"got {one.host_state().residue}"


def test_an_attachment_in_force_is_no_residue(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.attach(ingress="ifb")
    assert residue_of(one.engine, one.program_ids, one.map_ids) == ()
    assert one.engine.residue(wait_s=0).attached == 1, "got it not counted"
    index = one.index
    ip("link", "delete", one.device, netns=one.netns)
    kinds = {text.split(":")[0] for text in residue_of(one.engine)}
    assert {"state", "pin", "ifb"} <= kinds, f"got {kinds} with device {index} gone"
    one.engine.detach(one.device)
    assert residue_of(one.engine, one.program_ids, one.map_ids) == ()


def test_the_command_lists_them_and_how_to_remove_them(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    one = bench()
    with qdisc_left(one), ifb_left(one):
        ran = shapectl("--netns", one.netns, "residue", "--json")
        assert ran.code == 1, f"got exit {ran.code}: {ran.err}, want 1"
        items = {item["kind"]: item for item in json.loads(ran.out)["items"]}
        for kind in ("qdisc", "ifb"):
            assert items[kind]["netns"] == one.netns, f"got {items[kind]}"
            words = items[kind]["fix"].split()
            assert words[1:3] == ["-n", one.netns], f"got {words}, want a command for there"
        shown = shapectl("--netns", one.netns, "residue")
        assert f"tc -n {one.netns} qdisc del dev d0 root" in shown.out, f"got {shown.out}"
    ran = shapectl("--netns", one.netns, "residue", "--json")
    # programs and maps are the whole kernel's: other tests may be running
    left = [one for one in json.loads(ran.out)["items"] if one["kind"] not in ("program", "map")]
    assert not left, f"got {left}, want nothing left"
    assert ran.code == (1 if json.loads(ran.out)["items"] else 0), f"got exit {ran.code}"
