# SPDX-License-Identifier: Apache-2.0
"""What doctor says of faked hosts, word for word, and what each finding must have.

`SHAPECTL_WRITE_GOLDEN=1 pytest tests/unit/test_doctor.py` writes the texts anew.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from shapeagent.model.errors import InputError
from shapeagent.model.hostfacts import BpfProbe, KernelAnswers, RdmaPort, TrafficSample
from shapeagent.model.reports import DoctorReport, Finding, Severity
from shapeagent.policy.doctor import examine_host
from shapeagent.policy.doctor_device import examine_rdma
from shapeagent.service import doctor
from shapeagent.service.doctor import judge
from shapectl.cli import main
from shapectl.commands.doctor import print_report
from tests.unit import fakehost
from tests.unit.fakehost import FakeHost

_GOLDEN = Path(__file__).parent / "golden"

HOSTS: dict[str, tuple[Callable[[Path], FakeHost], str | None]] = {
    "healthy": (fakehost.healthy, None),
    "healthy-device": (fakehost.healthy, "enp65s0f0np0"),
    "roce": (fakehost.roce, None),
    "bare": (fakehost.bare, None),
    "mess": (fakehost.mess, None),
    "mess-bond0": (fakehost.mess, "bond0"),
}


@pytest.fixture(autouse=True)
def _no_header_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BCC_KERNEL_SOURCE", raising=False)


def report_of(name: str, folder: Path) -> DoctorReport:
    build, device = HOSTS[name]
    return judge(build(folder).look(device), device)


def by_id(report: DoctorReport) -> dict[str, Finding]:
    return {one.id: one for one in report.findings}


@pytest.mark.parametrize("name", HOSTS)
def test_text_is_the_golden_one(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_report(report_of(name, tmp_path))
    got = capsys.readouterr().out
    path = _GOLDEN / f"doctor-{name}.txt"
    if os.environ.get("SHAPECTL_WRITE_GOLDEN"):
        path.write_text(got, encoding="utf-8")
    assert got == path.read_text(encoding="utf-8"), f"got other words than {path.name}"


@pytest.mark.parametrize("name", HOSTS)
def test_each_finding_says_why_and_what_to_type(name: str, tmp_path: Path) -> None:
    report = report_of(name, tmp_path)
    for one in report.findings:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", one.id), f"got id {one.id!r}"
        has_both = bool(one.why and one.fix)
        assert has_both is (one.severity is not Severity.OK), f"got {one}"
    assert report.errors == sum(one.severity == "error" for one in report.findings)


def test_healthy_host_has_nothing_to_mend(tmp_path: Path) -> None:
    report = report_of("healthy", tmp_path)
    assert (report.errors, report.warnings) == (0, 0), f"got {report}"


def test_rdma_beside_flat_counters_is_named_and_not_claimed(tmp_path: Path) -> None:
    """C25: port_xmit_data rises by 10 GB/s, tx_bytes by 12.5 kB/s."""
    found = by_id(report_of("roce", tmp_path))
    active = found["rdma-active"]
    assert active.severity is Severity.WARNING
    assert active.subject == "ens1np0"
    assert "80gbit" in active.what, f"got {active.what}, want 10 GB/s as bits"
    assert "100kbit" in active.what, f"got {active.what}, want what TC sees"
    assert "protects nobody" in active.why


@pytest.mark.parametrize(
    ("device", "identity", "severity"),
    [
        ("bond0", "placement-bond", "warning"),
        ("br0", "placement-bridge", "warning"),
        ("bond0.7", "placement-vlan", "warning"),
        ("enx0123456789ab", "placement-member", "info"),
        ("veth-a.b", "placement-port", "info"),
    ],
)
def test_placement_names_the_devices_at_the_bottom(
    device: str, identity: str, severity: str, tmp_path: Path
) -> None:
    found = by_id(judge(fakehost.mess(tmp_path).look(device), device))
    assert found[identity].severity == severity
    if identity != "placement-port":
        want = "shapectl attach enx0123456789ab; shapectl attach eth1.5"
        assert found[identity].fix == want


@pytest.mark.parametrize(
    ("sent", "later", "want"),
    [
        (0, 0, "rdma"),
        (9_000_000, 9_000_000, "rdma-used"),
        (9_000_000, 9_100_000, "rdma-used"),  # 0.8 Mbit/s: keep-alives
        (9_000_000, 1_000, "rdma-used"),  # the counter began anew
        (0, 10_000_000_000, "rdma-active"),
        (None, None, "rdma-unknown"),
    ],
)
def test_rdma_is_judged_by_what_moved(sent: int | None, later: int | None, want: str) -> None:
    def sample(time_s: float, count: int | None) -> TrafficSample:
        return TrafficSample(time_s, (RdmaPort("mlx5_0", 1, "eth0", "Ethernet", count, 0),))

    found = examine_rdma(sample(0.0, sent), sample(1.0, later))
    assert [one.id for one in found] == [want]


@pytest.mark.parametrize(
    ("release", "probe", "want"),
    [
        ("6.13.0", None, "lpm-trie"),
        ("6.12.4", None, "lpm-trie-unproved"),
        ("5.15.0-91-generic", None, "lpm-trie-unproved"),
        # what a trie did counts more than the name of the kernel
        ("5.15.0-91-generic", fakehost.WORKING_BPF, "lpm-trie"),
        ("6.18.0", BpfProbe("", full_trie_updates=False), "lpm-trie-old"),
        ("6.12.4", BpfProbe("Operation not permitted."), "lpm-trie-unproved"),
    ],
)
def test_tries_are_judged_by_trying_one(
    release: str, probe: BpfProbe | None, want: str, tmp_path: Path
) -> None:
    """C73: by version only where none could be tried."""
    host = dataclasses.replace(fakehost.healthy(tmp_path).look().host, release=release)
    found = examine_host(host, KernelAnswers(bpf=probe))
    assert want in [one.id for one in found], f"got {[one.id for one in found]}"
    got = next(one for one in found if one.id.startswith("lpm-trie"))
    assert got.severity is (Severity.OK if want == "lpm-trie" else Severity.WARNING)


def test_compiled_classifier_makes_missing_headers_a_warning(tmp_path: Path) -> None:
    host = fakehost.bare(tmp_path).look().host
    for cached, want in ((False, Severity.ERROR), (True, Severity.WARNING)):
        found = examine_host(host, KernelAnswers(image_cached=cached))
        got = {one.id: one.severity for one in found}
        assert got["headers-missing"] is want
        assert got["bcc-missing"] is want


@pytest.mark.parametrize(("has_tcx", "want"), [(True, Severity.INFO), (False, Severity.ERROR)])
def test_clsact_is_missed_only_where_there_is_no_tcx(
    tmp_path: Path, has_tcx: bool, want: Severity
) -> None:
    host = fakehost.healthy(tmp_path).look().host
    kinds = frozenset({"clsact", "htb"})
    found = examine_host(
        host, KernelAnswers(qdiscs=frozenset({"htb"}), qdiscs_asked=kinds, has_tcx=has_tcx)
    )
    got = {one.id: one.severity for one in found}
    assert got["clsact-missing"] is want, f"got {got}"


def test_bindings_of_another_version_than_the_library_are_named(tmp_path: Path) -> None:
    one = fakehost.healthy(tmp_path)
    fakehost.write_tree(
        tmp_path,
        {"usr/lib/python3/dist-packages/bcc/version.py": "__version__ = '0.18.0'"},
    )
    found = by_id(judge(one.look()))
    assert found["bcc-broken"].severity is Severity.ERROR
    assert "0.18.0" in found["bcc-broken"].what


@pytest.mark.parametrize(("name", "want"), [("healthy", 0), ("roce", 0), ("bare", 1)])
def test_only_errors_make_exit_1(
    name: str,
    want: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = report_of(name, tmp_path)
    monkeypatch.setattr(doctor, "examine", lambda device, netns: report)
    assert main(["doctor"]) == want
    capsys.readouterr()
    assert main(["doctor", "--json"]) == want
    out = json.loads(capsys.readouterr().out)
    assert out["errors"] == report.errors
    assert out["findings"][0].keys() == {"id", "severity", "subject", "what", "why", "fix"}


def test_unknown_device_is_a_named_error(capsys: pytest.CaptureFixture[str]) -> None:
    for name, reference in (("no-such-dev", "no-such-device"), ("a/b", "bad-device-name")):
        with pytest.raises(InputError) as caught:
            doctor.examine(name)
        assert caught.value.reference == reference
        assert main(["doctor", name]) == 2
        assert capsys.readouterr().err.startswith(f"error: {reference}\n")


def test_names_of_others_cannot_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    finding = Finding("filters-shared", Severity.INFO, "eth0", "\x1b[2J", "\x1b[1m", "x\ny")
    print_report(DoctorReport("eth0", None, 0, 0, ("/a\x1b",), (finding,)))
    assert "\x1b" not in capsys.readouterr().out
