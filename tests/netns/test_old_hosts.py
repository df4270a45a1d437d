# SPDX-License-Identifier: Apache-2.0
"""Tools, limits, headers and compilers that are old, low, odd or missing (group H)."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from enginekit import (
    MBIT,
    NORMAL,
    Bench,
    Ran,
    UdpSink,
    UdpSource,
    environment,
    shapectl,
    wait_growth,
    wait_until,
)

from shapeagent.kernel import compile as compiler
from shapeagent.kernel import source
from shapeagent.kernel.compile import find_image
from shapeagent.kernel.headers import find_kernel_headers, header_package
from shapeagent.model.errors import ShapeError, UnsupportedError
from shapeagent.policy.builtin import default_policy_text

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
]

# The command line with an image cache of its own.
FRESH = """
import sys
from pathlib import Path
import shapeagent.kernel.compile as compiler
compiler.find_image.__kwdefaults__["cache_dir"] = Path(sys.argv[1])
sys.argv[1:] = sys.argv[2:]
from shapectl.cli import main
sys.exit(main())
"""
# `bpf()` answers EPERM, as under a container's seccomp profile: five instructions of classic BPF.
NO_BPF = """
import ctypes, os, struct, sys
numbers = {"x86_64": 321, "aarch64": 280}
code = [(0x20, 0, 0, 0), (0x15, 0, 1, numbers[os.uname().machine]),
        (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7fff0000)]
raw = b"".join(struct.pack("=HBBI", *one) for one in code)
buffer = ctypes.create_string_buffer(raw)
program = struct.pack("@HxxxxxxQ", len(code), ctypes.addressof(buffer))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()  # PR_SET_SECCOMP, filter
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def fresh(
    cache: Path, one: Bench, *prefix: str, env: dict[str, str] | None = None, rate: str = "100mbit"
) -> Ran:
    """Return what `attach` did that finds nothing compiled."""
    words = ("--netns", one.netns, "attach", one.device, "--link-rate", rate)
    done = subprocess.run(
        [*prefix, sys.executable, "-c", FRESH, str(cache), *words],
        env=env or environment(), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    return Ran(done.returncode, done.stdout, done.stderr)


def refused(ran: Ran, code: int, reference: str, *words: str) -> None:
    assert ran.code == code, f"got exit {ran.code}: {ran.err}, want {code}"
    assert f"error: {reference}\n" in ran.err, f"got {ran.err}, want error: {reference}"
    assert "Traceback" not in ran.err, f"got {ran.err}"
    for word in words:
        assert word in ran.err, f"got {ran.err}, want {word!r} in it"


def test_without_headers_the_package_of_this_kernel_is_named(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    """C111: /lib/modules and /usr/src are empty; nothing is attached."""
    one = bench()
    before = one.host_state()
    hide = 'mount -t tmpfs none /usr/src && mount -t tmpfs none /lib/modules && exec "$@"'
    prefix = ("unshare", "--mount", "sh", "-c", hide, "sh")
    env = {key: text for key, text in environment().items() if key != "BCC_KERNEL_SOURCE"}
    ran = fresh(tmp_path / "cache", one, *prefix, env=env)
    release = os.uname().release
    refused(ran, 4, "no-kernel-headers", release, f"apt-get install {header_package(release)}")
    assert one.host_state() == before, "got a changed host, want nothing done"


@pytest.mark.host
def test_headers_of_another_version_and_no_modprobe_are_enough(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    """C111: a mismatch is no refusal (6.1's do for 6.18), and a container has no kmod."""
    one = bench()
    before = one.host_state()
    (tmp_path / "empty").mkdir()
    env = environment(PATH=str(tmp_path / "empty"), BCC_KERNEL_SOURCE=str(find_kernel_headers()))
    ran = fresh(tmp_path / "cache", one, env=env)
    assert ran.code == 0, f"got exit {ran.code}: {ran.err}, want it compiled and attached"
    assert "compiled" in ran.out, f"got {ran.out}, want it compiled anew"
    done = shapectl("--netns", one.netns, "detach", one.device)
    assert done.code == 0, f"got {done}"
    assert one.host_state() == before


def header_trees() -> list[Path]:
    """Return the parts of header packages that have a build tree of their own."""
    return sorted(
        path
        for path in Path("/usr/src").glob("linux-headers-*")
        if (path / "include/generated/autoconf.h").is_file()
    )


@pytest.mark.host
@pytest.mark.parametrize("tree", header_trees(), ids=lambda path: path.name)
def test_it_compiles_with_every_header_package_that_is_here(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C112: BCC and clang as Debian has them, and each installed series of headers."""
    monkeypatch.delenv("BCC_KERNEL_SOURCE", raising=False)
    release = tree.name.removeprefix("linux-headers-")
    merged = find_kernel_headers(
        release=release, modules_dir=tmp_path / "none", cache_dir=tmp_path / "headers"
    )
    assert merged.name == release, f"got {merged}, want the tree of {release}"
    monkeypatch.setenv("BCC_KERNEL_SOURCE", str(merged))
    image, compiled = find_image(cache_dir=tmp_path / "images")
    assert compiled, "got it from a cache, want it compiled"
    assert set(image.programs) == set(compiler.PROGRAMS), f"got {set(image.programs)}"
    assert image.headers == str(merged), f"got {image.headers}"


def test_only_uapi_headers_are_included() -> None:
    """C112: what the kernel keeps for itself changes from release to release."""
    text = source.flatten(source.source_dir() / source.MAIN_FILE)
    found = sorted(set(re.findall(r"^\s*#\s*include\s*[<\"]([^>\"]+)", text, re.M)))
    assert found, "got no include at all, want the kernel's"
    uapi = find_kernel_headers() / "include/uapi"
    for name in found:
        assert (uapi / name.removeprefix("uapi/")).is_file(), (
            f"got <{name}>, want uapi headers only"
        )


@pytest.mark.host
def test_headers_that_this_bcc_cannot_read_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C112: bcc's version and the headers stand in the message, older headers in the hint."""
    real, tree = find_kernel_headers(), tmp_path / "tree"

    def link(below: str, but: str) -> None:
        (tree / below).mkdir()
        for path in (real / below).iterdir():
            if path.name != but:
                (tree / below / path.name).symlink_to(path.resolve())

    for below, but in (
        ("", "include"),
        ("include", "uapi"),
        ("include/uapi", "linux"),
        ("include/uapi/linux", "if_ether.h"),
    ):
        link(below, but)
    (tree / "include/uapi/linux/if_ether.h").write_text("#error too new for this compiler\n")
    monkeypatch.setenv("BCC_KERNEL_SOURCE", str(tree))
    with pytest.raises(UnsupportedError) as caught:
        find_image(cache_dir=tmp_path / "images")
    got = caught.value
    assert (got.reference, got.exit_code) == ("compile-failed", 4), f"got {got.reference}"
    assert re.search(r"BCC \d+\.\d+", got.message), f"got {got.message}, want the version"
    assert str(tree) in got.message, f"got {got.message}, want the headers named"
    assert "too old" in (got.hint or ""), f"got {got.hint}"
    assert any("too new for this compiler" in line for line in got.details), f"got {got.details}"


@pytest.mark.host
@pytest.mark.parametrize(
    "text",
    [
        "raise OSError('libbcc.so.0: undefined symbol: bpf_module_create_b')\n",
        "raise AttributeError('undefined symbol: bcc_free_memory')\n",
    ],
    ids=["OSError", "AttributeError"],
)
def test_a_bcc_of_two_halves_is_named_with_both(
    bench: Callable[..., Bench], tmp_path: Path, text: str
) -> None:
    """C114: path and version of the package and of the library."""
    one = bench()
    before = one.host_state()
    package = tmp_path / "fake" / "bcc"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(text)
    (package / "version.py").write_text("__version__ = '0.30.1'\n")
    path = os.pathsep.join([str(package.parent), environment()["PYTHONPATH"]])
    ran = fresh(tmp_path / "cache", one, env=environment(PYTHONPATH=path))
    refused(ran, 4, "broken-bcc", "undefined symbol", str(package), "0.30.1", "libbcc.so.0")
    assert one.host_state() == before, "got a changed host, want nothing done"


def test_an_old_tc_in_path_is_never_asked(bench: Callable[..., Bench], tmp_path: Path) -> None:
    """C116: everything goes by netlink."""
    one = bench()
    before = one.host_state()
    called = tmp_path / "called"
    for name in ("tc", "ip"):
        tool = tmp_path / name
        tool.write_text(
            f'#!/bin/sh\necho "{name} $*" >>{called}\n'
            'echo "Unknown qdisc \\"htb\\", hence option \\"default\\" is unparsable" >&2\nexit 1\n'
        )
        tool.chmod(0o755)
    env = environment(PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    for arguments in (
        ("attach", one.device, "--link-rate", "100mbit", "--ingress", "ifb"),
        ("status", one.device),
        ("class", "set", "bulk", "--ceiling", "20mbit"),
        ("residue",),
        ("doctor", one.device),
        ("detach", one.device),
    ):
        ran = shapectl("--netns", one.netns, *arguments, env=env)
        allowed = (0, 1) if arguments[0] in ("doctor", "residue") else (0,)
        assert ran.code in allowed, f"got exit {ran.code} from {arguments}: {ran.err}"
    assert not called.exists(), f"got {called.read_text()}, want no tool called"
    assert one.host_state() == before, f"got {one.host_state()}, want {before}"


@pytest.mark.host
@pytest.mark.parametrize("wanted", [65_536, None], ids=["64k", "the highest allowed"])
def test_the_limit_of_locked_memory_is_never_lowered(
    bench: Callable[..., Bench], tmp_path: Path, wanted: int | None
) -> None:
    """C117: since 5.11 maps do not count, and whoever runs beside us keeps what they had."""
    one = bench()
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] if wanted is None else wanted
    program = (
        "import json, resource, sys; from pathlib import Path\n"
        "from shapeagent.kernel.compile import find_image\n"
        "from shapeagent.model.reports import AttachRequest\n"
        "from shapeagent.service.engine import Engine\n"
        "netns, device, run_dir, bpffs_dir, cache, limit = sys.argv[1:]\n"
        "def now(): return resource.getrlimit(resource.RLIMIT_MEMLOCK)\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (int(limit), int(limit)))\n"
        "before = now()\n"
        "find_image(cache_dir=Path(cache))\n"
        "engine = Engine(netns=netns, run_dir=Path(run_dir), bpffs_dir=Path(bpffs_dir))\n"
        "engine.attach(AttachRequest(device, link_rate_bits_per_s=100_000_000))\n"
        "print(json.dumps([before, now()]))\n"
        "engine.detach(device)\n"
    )
    engine = one.engine
    words = [one.netns, one.device, str(engine.run_dir), str(engine.bpffs_dir), str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", program, *words, str(limit)],
        env=environment(), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"got exit {done.returncode}: {done.stderr}"
    before, after = json.loads(done.stdout)
    assert before == [limit, limit], f"got {before}, want {limit} to begin with"
    for had, has in zip(before, after, strict=True):
        higher = has == resource.RLIM_INFINITY or (had != resource.RLIM_INFINITY and has >= had)
        assert higher, f"got {after} after attach, want at least {before}"


@pytest.mark.parametrize(
    ("dropped", "named"),
    [("net_admin", "CAP_NET_ADMIN"), ("bpf,-sys_admin", "CAP_BPF")],
)
def test_root_without_a_capability_is_told_which(dropped: str, named: str) -> None:
    """C119: before anything else; what only reads goes on."""
    prefix = ("setpriv", f"--bounding-set=-{dropped}", f"--inh-caps=-{dropped}")
    for words in (("attach", "lo", "--link-rate", "1gbit"), ("detach", "lo")):
        ran = shapectl(*words, prefix=prefix)
        refused(ran, 3, "missing-privilege", named)
        assert ran.err.startswith("error: missing-privilege\n"), f"got {ran.err}"
    ran = shapectl("doctor", "--json", prefix=prefix)
    assert ran.code in (0, 1), f"got exit {ran.code}: {ran.err}"
    found = {one["id"]: one for one in json.loads(ran.out)["findings"]}
    assert named in found["capabilities-missing"]["what"], f"got {sorted(found)}"
    assert shapectl("policy", "show", prefix=prefix).code == 0, "got it refused, want it read"


def test_a_seccomp_profile_that_forbids_bpf_is_named(bench: Callable[..., Bench]) -> None:
    """C119: with all capabilities it is none of them that is missing."""
    one = bench()
    before = one.host_state()
    words = ("--netns", one.netns, "attach", one.device, "--link-rate", "100mbit")
    done = subprocess.run(
        [sys.executable, "-c", NO_BPF, "-m", "shapectl", *words],
        env=environment(), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    ran = Ran(done.returncode, done.stdout, done.stderr)
    refused(ran, 3, "missing-capability", "seccomp")
    assert one.host_state() == before, "got a changed host, want nothing done"


def test_a_program_that_the_verifier_refuses_changes_nothing(
    bench: Callable[..., Bench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F22: the verifier's words are kept, and not a packet is lost or delayed for a retry."""
    one = bench()
    before = one.host_state()
    folder = tmp_path / "bpf"
    shutil.copytree(source.source_dir(), folder)
    main = folder / source.MAIN_FILE
    text = main.read_text()
    changed = re.sub(
        r"(\nint shp_egress\(struct __sk_buff \*(\w+)\)\n\{\n)",
        r"\1\tif (*(volatile __u8 *)(long)\2->data == 7)\n\t\treturn -1;\n",
        text,
    )
    assert changed != text, "got no place for a read without a check"
    main.write_text(changed)
    monkeypatch.setattr(compiler, "source_dir", lambda: folder)
    pair = one.pair
    with UdpSink(pair.peer_netns, NORMAL) as sink:
        target = (pair.peer_address4, NORMAL)
        with UdpSource(pair.netns, target, packets_per_s=1000, size=64) as sender:
            wait_growth(lambda: sink.received, 50, "probes before")
            with pytest.raises(UnsupportedError) as caught:
                one.attach()
            wait_growth(lambda: sink.received, 50, "probes after")
            sender.end()
        wait_until(lambda: sink.received == sender.sent, f"all {sender.sent}, got {sink.received}")
    got = caught.value
    assert (got.reference, got.exit_code) == ("verifier-refused", 4), f"got {got.reference}"
    assert "shp_egress" in got.message, f"got {got.message}, want the program named"
    assert any("invalid access to packet" in line for line in got.details), f"got {got.details}"
    assert one.host_state() == before, "got a changed host, want nothing done"


@pytest.mark.parametrize("how", ["deleted", "a folder", "not TOML", "unreadable for its bytes"])
def test_without_its_policy_file_the_last_accepted_policy_stays(
    bench: Callable[..., Bench], tmp_path: Path, how: str
) -> None:
    """F39: it stays in force, and who asks for the file is told."""
    one = bench()
    path = tmp_path / "policy.toml"
    path.write_text(default_policy_text())
    report = one.attach(policy_path=str(path))
    assert report.changed, f"got {report}"
    state, programs = one.state(), one.status().programs
    path.unlink()
    if how == "a folder":
        path.mkdir()
    elif how == "not TOML":
        path.write_text("version = ")
    elif how != "deleted":
        path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ShapeError) as caught:
        one.attach(policy_path=str(path))
    told = caught.value
    assert told.exit_code == 2, f"got {told.reference}, exit {told.exit_code}, want 2"
    assert str(path) in f"{told.message} {told.details}", f"got {told}, want the file named"
    assert one.state() == state, "got another state, want the accepted policy to stay"
    got = one.status()
    assert (got.problems, got.programs) == ((), programs), f"got {got}, want it untouched"
    # everything that needs the policy has it from where attach kept it
    one.engine.class_set(one.device, "bulk", 20 * MBIT)
    assert one.classes()["bulk"].ceiling_bits_per_s == 20 * MBIT
