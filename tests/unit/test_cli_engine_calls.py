# SPDX-License-Identifier: Apache-2.0
"""What each command asks of the engine, and how it shows the answer.

The engine here is a fake of ours that answers with fixed reports; the real one
runs in tests/netns.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shapeagent.model.reports import (
    AttachPlan,
    AttachReport,
    AttachRequest,
    ClassPlanRow,
    ClassStatus,
    DetachReport,
    ExplainRequest,
    Explanation,
    InterfaceStatus,
    WhitelistChange,
    WhitelistRow,
)
from shapeagent.model.types import Match, WhitelistEntry
from shapectl.cli import main
from shapectl.session import Session

_PLAN = AttachPlan(
    device="eth0",
    netns="lab",
    profile="htb",
    profile_reason="the kernel has no prio",
    ingress="count",
    hook="tcx",
    link_rate_bits_per_s=100_000_000,
    link_rate_source="--link-rate",
    segment_limit_bytes=3028,
    segment_limit_note="auto: 2 MTU",
    policy_source="built-in",
    policy_digest="ab" * 32,
    classes=(
        ClassPlanRow(
            "bulk", 3, 10_000_000, 100_000_000, 50_000_000, 6056, 484.48, 1514,
            "bfifo 30280 bytes", "htb class 1:13",
        ),
    ),
    steps=("add clsact to eth0", "add the egress filter"),
    warnings=("97 % of the packets have no socket",),
)  # fmt: skip

_CLASS = ClassStatus(
    name="bulk", number=3, direction="egress", guarantee_bits_per_s=10_000_000,
    ceiling_bits_per_s=20_000_000, safe_ceiling_bits_per_s=5_000_000,
    ceiling_in_force_bits_per_s=20_000_000, lease_s_left=1.5, packets=10, wire_bytes=15000,
    drops=0, drop_wire_bytes=0, ce_marks=0, no_socket_packets=9, over_segment_packets=0,
    backlog_bytes=None, queue_drops=None,
)  # fmt: skip

_EXPLANATION = Explanation(
    packet="tcp 10.0.0.5:54321 > 10.0.0.9:2379", direction="egress", traffic_class="signal",
    reason="rule-port", rule="etcd", prefix=None, priority=0x10011, priority_text="1:11",
    mark=0, ceiling_bits_per_s=100_000_000, notes=("over the budget it becomes normal",),
)  # fmt: skip


def _interface(device: str) -> InterfaceStatus:
    return InterfaceStatus(
        device=device, index=2, netns=None, profile="htb", ingress="count", hook="tcx",
        shadow=False, link_rate_bits_per_s=100_000_000, segment_limit_bytes=0,
        policy_source="built-in", policy_digest="ab" * 32,
        attached_unix_s=1893456000.0, programs={"shp_egress": 7},
        verified_instructions={"shp_egress": 3000}, whitelist_entries=2, whitelist_generation=5,
        classes=(_CLASS,), reasons={"egress": {"default": 1, "rule-port": 9}},
        problems=("the egress filter is gone",), warnings=("encapsulated: 40 %",),
    )  # fmt: skip


class FakeEngine:
    """Answers like an engine with the interfaces `devices`, and keeps what it was asked."""

    def __init__(self, devices: Sequence[str] = ("eth0",)) -> None:
        self.devices = tuple(devices)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.session: Session | None = None
        self.rows: tuple[WhitelistRow, ...] = ()

    def _note(self, name: str, *args: Any, **kwargs: Any) -> None:
        self.calls.append((name, args, kwargs))

    def plan_attach(self, request: AttachRequest) -> AttachPlan:
        self._note("plan_attach", request)
        return _PLAN

    def attach(self, request: AttachRequest) -> AttachReport:
        self._note("attach", request)
        return AttachReport(_PLAN, True, True, 0.61, 0.82, {"shp_egress": 3000}, "cd" * 32)

    def detach(self, device: str, *, dry_run: bool = False) -> DetachReport:
        self._note("detach", device, dry_run=dry_run)
        return DetachReport(device, None, not dry_run, ("delete the filter",), ("one note",))

    def status(self, device: str | None = None) -> tuple[InterfaceStatus, ...]:
        wanted = self.devices if device is None else (device,)
        return tuple(_interface(name) for name in wanted)

    def explain(self, device: str, request: ExplainRequest) -> Explanation:
        self._note("explain", device, request)
        return _EXPLANATION

    def explain_pcap(self, device: str, path: Path, direction: str) -> Iterator[Explanation]:
        self._note("explain_pcap", device, path, direction)
        yield _EXPLANATION
        yield _EXPLANATION

    def class_list(self, device: str) -> tuple[ClassStatus, ...]:
        self._note("class_list", device)
        return (_CLASS,)

    def class_set(self, *args: Any, **kwargs: Any) -> ClassStatus:
        self._note("class_set", *args, **kwargs)
        return _CLASS

    def _change(self, name: str, *args: Any, **kwargs: Any) -> WhitelistChange:
        self._note(name, *args, **kwargs)
        return WhitelistChange(2, 0, 1, 3, 8, ("stored as x",), ("rule ssh decides first",))

    def whitelist_add(self, *args: Any, **kwargs: Any) -> WhitelistChange:
        return self._change("add", *args, **kwargs)

    def whitelist_remove(self, *args: Any, **kwargs: Any) -> WhitelistChange:
        return self._change("remove", *args, **kwargs)

    def whitelist_replace(self, *args: Any, **kwargs: Any) -> WhitelistChange:
        return self._change("replace", *args, **kwargs)

    def whitelist_import(self, *args: Any, **kwargs: Any) -> WhitelistChange:
        return self._change("import", *args, **kwargs)

    def whitelist_list(self, device: str) -> tuple[WhitelistRow, ...]:
        self._note("list", device)
        return self.rows


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    fake = FakeEngine()

    @contextmanager
    def give(self: Session) -> Iterator[FakeEngine]:
        fake.session = self
        yield fake

    monkeypatch.delenv("SHAPECTL_NETNS", raising=False)
    monkeypatch.setattr(Session, "engine", give)
    return fake


def test_attach_hands_every_option_over(engine: FakeEngine) -> None:
    code = main(
        [
            "attach", "eth0", "--policy", "p.toml", "--profile", "police", "--link-rate",
            "1.5gbit", "--ingress", "ifb", "--ingress-lease", "5m", "--shadow",
            "--segment-limit", "3028", "--reroute-ipv6", "--mark", "0xff0000",
            "--mark-ingress", "1",
        ]
    )  # fmt: skip
    assert code == 0
    assert engine.calls == [
        (
            "attach",
            (
                AttachRequest(
                    device="eth0", policy_path="p.toml", profile="police",
                    link_rate_bits_per_s=1_500_000_000, ingress="ifb", ingress_lease_s=300.0,
                    shadow=True, segment_limit="3028", reroute_ipv6=True,
                    egress_mark_mask=0xFF0000, ingress_mark_mask=1,
                ),
            ),
            {},
        )
    ]  # fmt: skip


def test_attach_without_options_leaves_every_choice_to_the_engine(engine: FakeEngine) -> None:
    assert main(["attach", "eth0"]) == 0
    assert engine.calls == [("attach", (AttachRequest(device="eth0"),), {})]


def test_dry_run_prints_the_plan_and_never_attaches(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["attach", "eth0", "--dry-run"]) == 0
    assert [call[0] for call in engine.calls] == ["plan_attach"]
    out, err = capsys.readouterr()
    for text in (
        "eth0 in namespace lab", "nothing was changed", "htb: the kernel has no prio",
        "100mbit (--link-rate)", "3,028 B (auto: 2 MTU)", "6,056 B", "484 µs", "1,514 B",
        "bfifo 30280 bytes", "htb class 1:13", " 1. add clsact", " 2. add the egress",
    ):  # fmt: skip
        assert text in out, f"got {out}, want {text!r}"
    assert err == "warning: 97 % of the packets have no socket\n"


def test_json_of_attach_is_the_report(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["attach", "eth0", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["plan"]["classes"][0]["enforced_by"] == "htb class 1:13"
    assert report["verified_instructions"] == {"shp_egress": 3000}


def test_detach_passes_dry_run(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["detach", "eth0"]) == 0
    assert main(["detach", "eth0", "--dry-run"]) == 0
    assert engine.calls == [
        ("detach", ("eth0",), {"dry_run": False}),
        ("detach", ("eth0",), {"dry_run": True}),
    ]
    assert " 1. delete the filter" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "variable", "want"),
    [
        (["status"], None, None),
        (["status"], "env", "env"),
        (["--netns", "front", "status"], "env", "front"),
        (["status", "--netns", "back"], "env", "back"),
        (["--netns", "front", "status", "--netns", "back"], None, "back"),
    ],
)
def test_namespace_comes_from_the_last_option_else_the_environment(
    words: list[str],
    variable: str | None,
    want: str | None,
    engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if variable is not None:
        monkeypatch.setenv("SHAPECTL_NETNS", variable)
    assert main(words) == 0
    assert engine.session is not None
    assert engine.session.netns == want, f"got {engine.session.netns}, want {want}"


def test_status_shows_classes_reasons_problems_and_warnings(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status"]) == 0
    out, err = capsys.readouterr()
    for text in ("eth0: profile htb", "2030-01-01T00:00:00Z", "generation 5", "1.5s left"):
        assert text in out, f"got {out}, want {text!r}"
    assert out.index("rule-port") < out.index("default "), "the commonest reason comes first"
    assert "not as attach left it: the egress filter is gone" in err
    assert "encapsulated: 40 %" in err


def test_status_of_nothing_is_no_error(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.devices = ()
    assert main(["status"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "no interface" in err
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"interfaces": []}


@pytest.mark.parametrize(
    ("devices", "exit_code", "reference"),
    [((), 5, "not-attached"), (("eth0", "eth1"), 2, "which-device")],
)
@pytest.mark.parametrize(
    "words",
    [
        ["class", "show"],
        ["class", "set", "bulk", "--ceiling", "20mbit"],
        ["explain", "10.0.0.1:1", "10.0.0.2:2"],
        ["whitelist", "add", "10.0.0.1"],
        ["whitelist", "list"],
    ],
)
def test_device_may_be_left_out_only_where_one_is_attached(
    words: list[str],
    devices: tuple[str, ...],
    exit_code: int,
    reference: str,
    engine: FakeEngine,
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine.devices = devices
    assert main([*words, "--json"]) == exit_code
    answer = json.loads(capsys.readouterr().out)
    assert answer["error"] == reference, f"got {answer}"
    assert all(name in answer["message"] for name in devices)
    assert main([*words, "--device", "eth1"]) == 0
    assert engine.calls[-1][1][0] == "eth1"


def test_class_set_as_in_the_issue(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["class", "set", "bulk", "--ceiling", "20mbit", "--for", "2s"]) == 0
    assert engine.calls == [
        ("class_set", ("eth0", "bulk", 20_000_000), {"lease_s": 2.0, "direction": "egress"})
    ]
    out = capsys.readouterr().out
    assert out == "eth0 egress: bulk at most 20mbit, for 2.0s, then the safe ceiling 5mbit\n"


def test_share_in_class_set_is_taken_of_the_attached_link(engine: FakeEngine) -> None:
    assert main(["class", "set", "bulk", "--ceiling", "50%", "--direction", "ingress"]) == 0
    assert engine.calls == [
        ("class_set", ("eth0", "bulk", 50_000_000), {"lease_s": None, "direction": "ingress"})
    ]


def test_explain_hands_the_packet_over_and_shows_the_decision(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(
        ["explain", "[2001:db8::5]:50000", "[2001:db8::9]:443", "--protocol", "udp",
         "--direction", "ingress", "--dscp", "ef", "--mark", "0x2a"]
    )  # fmt: skip
    assert code == 0
    want = ExplainRequest("2001:db8::5", "2001:db8::9", "udp", 50000, 443, "ingress", 46, 42)
    assert engine.calls == [("explain", ("eth0", want), {})]
    out = capsys.readouterr().out
    for text in ("signal", "rule-port", "etcd", "1:11", "100mbit", "over the budget"):
        assert text in out


def test_open_port_is_filled_in_and_said_so(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "10.0.0.5", "10.0.0.9:2379"]) == 0
    request = engine.calls[0][1][1]
    assert (request.source_port, request.destination_port) == (54321, 2379)
    assert "the source names no port: 54321" in capsys.readouterr().err


def test_protocol_without_ports_gets_none(engine: FakeEngine) -> None:
    assert main(["explain", "10.0.0.5", "10.0.0.9", "--protocol", "icmp"]) == 0
    request = engine.calls[0][1][1]
    assert (request.source_port, request.destination_port) == (None, None)


def test_pcap_answers_one_json_object_per_packet(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "--pcap", "a.pcap", "--direction", "ingress", "--json"]) == 0
    assert engine.calls == [("explain_pcap", ("eth0", Path("a.pcap"), "ingress"), {})]
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["traffic_class"] for row in rows] == ["signal", "signal"]


def test_whitelist_add_parses_entries_and_shows_notices_once(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    before = time.time()
    code = main(
        ["whitelist", "add", "192.0.2.67/24", "10.0.0.1,10.0.0.2", "--class", "stream",
         "--match", "source", "--owner", "ops", "--reason", "etcd", "--for", "1h",
         "--yes-everything"]
    )  # fmt: skip
    assert code == 0
    name, (device, entries), options = engine.calls[0]
    assert (name, device, options) == ("add", "eth0", {"yes_everything": True})
    first, second = entries
    assert first.source == (bytes([192, 0, 2, 0]), 24), "C61: host bits are cleared"
    assert (first.match, first.traffic_class, first.owner, first.reason) == (
        Match.SOURCE, "stream", "ops", "etcd",
    )  # fmt: skip
    assert before + 3600 <= first.expires_unix_s <= time.time() + 3600
    assert second.match is Match.PAIR
    out, err = capsys.readouterr()
    assert out == "eth0: 2 added, 0 removed, 1 unchanged; 3 in force, generation 8\n"
    assert "stored as 192.0.2.0/24" in err
    assert err.count("stored as x") == 1
    assert "warning: rule ssh decides first" in err


def test_whitelist_remove_needs_no_class(engine: FakeEngine) -> None:
    assert main(["whitelist", "remove", "10.0.0.1"]) == 0
    name, (_, entries), options = engine.calls[0]
    assert (name, options) == ("remove", {})
    assert entries[0].destination == (bytes([10, 0, 0, 1]), 32)


def test_whitelist_replace_reads_a_file_and_passes_the_generation(
    engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # C71: BOM, CRLF, comments, blank lines, duplicates, no final newline.
    path = tmp_path / "list.txt"
    path.write_bytes(b"\xef\xbb\xbf# head\r\n10.0.0.1 ; one\r\n\r\n10.0.0.1\r\n2001:db8::1")
    code = main(["whitelist", "replace", str(path), "--expect-generation", "7", "--json"])
    assert code == 0
    name, (_, entries), options = engine.calls[0]
    assert name == "replace"
    assert options == {"yes_everything": False, "expected_generation": 7}
    assert len(entries) == 2, f"got {entries}"
    answer = json.loads(capsys.readouterr().out)
    assert (answer["device"], answer["generation"]) == ("eth0", 8)
    assert any("repeats an entry" in text for text in answer["notices"])


def test_whitelist_import_with_a_bad_line_asks_nothing_of_the_engine(
    engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "list.txt"
    path.write_text("10.0.0.1\n192.0.2.1/33\n192.0.2.1198.51.100.7\n", encoding="utf-8")
    assert main(["whitelist", "import", str(path), "--json"]) == 2
    answer = json.loads(capsys.readouterr().out)
    assert answer["error"] == "whitelist-invalid"
    assert [text.split(":")[0] for text in answer["details"]] == ["line 2", "line 3"]
    assert engine.calls == []

    assert main(["whitelist", "import", str(path), "--lenient"]) == 0
    assert len(engine.calls[0][1][1]) == 1
    assert "2 lines cannot be used and were left out" in capsys.readouterr().err


def test_whitelist_import_reads_stdin(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"10.0.0.7\n")))
    assert main(["whitelist", "import", "-"]) == 0
    assert engine.calls[0][1][1][0].destination == (bytes([10, 0, 0, 7]), 32)


def test_exported_list_is_imported_as_the_same_entries(
    engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.rows = (
        WhitelistRow("either", None, "10.0.0.0/8", "signal", "ops", 'a "b" # c', None),
        WhitelistRow("pair", "2001:db8::1", "2001:db8::2", "bulk", "", "", 4e9),
        WhitelistRow("source", "10.0.0.1", None, "stream", "", "", None),
    )
    path = tmp_path / "out.txt"
    assert main(["whitelist", "export", str(path)]) == 0
    assert main(["whitelist", "export"]) == 0
    assert capsys.readouterr().out == path.read_text(encoding="utf-8")
    assert main(["whitelist", "import", str(path)]) == 0
    entries: tuple[WhitelistEntry, ...] = engine.calls[-1][1][1]
    got = [(e.match.value, e.traffic_class, e.owner, e.reason, e.expires_unix_s) for e in entries]
    assert got == [
        (r.match, r.traffic_class, r.owner, r.reason, r.expires_unix_s) for r in engine.rows
    ]


def test_whitelist_list_is_a_table_and_json(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.rows = (WhitelistRow("either", None, "10.0.0.0/8", "signal", "ops", "", None),)
    assert main(["whitelist", "list"]) == 0
    assert "10.0.0.0/8" in capsys.readouterr().out
    assert main(["whitelist", "list", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["entries"][0]["destination"] == "10.0.0.0/8"


def _demo_run(p99_us: float | None, ceiling_bits_per_s: int | None) -> dict[str, object]:
    delay = {"sent": 900, "lost": 3, "p50_us": 73.0, "p99_us": p99_us, "max_us": 120000.0}
    bulk = {"throughput_bits_per_s": 90_000_000, "ceiling_bits_per_s": ceiling_bits_per_s}
    return {"signal": delay, "stream": delay, "bulk": bulk}


@pytest.mark.parametrize(("improvement", "want"), [(54.3, "54.3 times better"), (None, "no samp")])
def test_demo_shows_both_runs_and_what_they_ran_over(
    improvement: float | None,
    want: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    result = {
        "before": _demo_run(None, None),
        "after": _demo_run(4200.0, 98_500_000),
        "improvement_p99": improvement,
        "wire_bits_per_s": 100_000_000,
        "link_rate_bits_per_s": 98_500_000,
        "queue_ms": 100.0,
        "queue_bytes": 1_250_000,
        "load": "8 bulk TCP flows",
    }
    asked: dict[str, Any] = {}

    def run_demo(**arguments: Any) -> dict[str, Any]:
        asked.update(arguments)
        return result

    monkeypatch.setattr("shapeagent.lab.demo.run_demo", run_demo)
    words = ["demo", "--duration", "2s", "--keep-samples", str(tmp_path)]
    assert main(words) == 0
    out, err = capsys.readouterr()
    for text in (
        "73 µs", "4.20 ms", "120.00 ms", "3 of 900", "90.0 Mbit/s", "98.5 Mbit/s",
        "at most 100 ms (1,250,000 B) in both runs", "8 bulk TCP flows", want,
    ):  # fmt: skip
        assert text in out, f"got {out}, want {text!r}"
    assert str(tmp_path) in err
    assert (asked["duration_s"], asked["output_dir"]) == (2.0, tmp_path)
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == result
