# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapeagent.model.agentschema import load_agent_config
from shapeagent.model.errors import InputError

WHOLE = """
[agent]
reconcile = "1s"
on_exit = "rollback"

[[interface]]
device = "eth0"
link_rate = "10gbit"
profile = "htb"

[[interface]]
device = "bond0.5"
ingress = "police"

[tcp]
address = "[::1]:9595"
certificate = "/c"
key = "/k"
client_ca = "/a"
trust_domain = "fleet.example"

[tcp.roles]
"spiffe://fleet.example/controller" = "operator"

[audit]
max_size = "1MiB"
keep = 3
"""


def details_of(text: str) -> tuple[str, ...]:
    with pytest.raises(InputError) as caught:
        load_agent_config(text, "x")
    assert caught.value.reference == "agent-config-invalid", f"got {caught.value.reference}"
    return caught.value.details


def test_an_empty_file_is_a_configuration() -> None:
    found = load_agent_config("", "x")
    assert (found.interface, found.tcp) == ((), None), f"got {found}"
    assert found.metrics is not None
    assert found.metrics.address == ("127.0.0.1", 9911), f"got {found.metrics}, want loopback"


def test_a_whole_file_is_read() -> None:
    found = load_agent_config(WHOLE, "x")
    assert [one.device for one in found.interface] == ["eth0", "bond0.5"]
    assert found.interface[0].link_rate == 10_000_000_000
    assert found.agent.reconcile == 1.0
    assert found.tcp is not None
    assert found.tcp.address == ("::1", 9595), f"got {found.tcp.address}"
    assert found.audit.max_size == 1 << 20


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("[agent]\nreconsile = 1", 'line 2: agent.reconsile: is not a known key; did you mean "re'),
        ("[agent]\nreconcile = 2", 'line 2: agent.reconcile: 2 is not a text such as "2s"'),
        ('[agent]\nreconcile = "1h"', "is not between 0.2 and 60 s"),
        ("[[interface]]\n", "interface[1].device: is missing"),
        ('[[interface]]\ndevice = "a b"', "'a b' is not the name of an interface"),
        ('[[interface]]\ndevice = "a"\n[[interface]]\ndevice = "a"', "line 4: interface[2].device"),
        ('[[interface]]\ndevice = "a"\nshadow = 1', "interface[1].shadow"),
        ('[metrics]\naddress = "9911"', "is not an address such as"),
        ('[metrics]\naddress = "h:70000"', "is not an address such as"),
        ('[metrics]\ncertificate = "/c"', "certificate and key go together"),
        ("interface = 3", "interface: 3 is not a table"),
        ("agent = []", "agent: [] is not a table"),
        ("[agent\n", "not TOML"),
        (WHOLE.replace("spiffe://fleet", "spiffe://other"), "is not an identity of spiffe://fleet"),
        (WHOLE.replace('= "operator"', '= "root"'), "is not one of observer, operator, admin"),
        (WHOLE.replace('"/k"', '"k"'), "'k' is not an absolute path"),
    ],
)
def test_each_error_is_named_with_its_place(text: str, want: str) -> None:
    found = details_of(text)
    assert any(want in one for one in found), f"got {found}, want {want!r}"


def test_all_errors_are_named_at_once() -> None:
    found = details_of(
        '[agent]\non_exit = 1\nx = 2\n[[interface]]\nprofile = "no"\n[audit]\nkeep=0'
    )
    assert len(found) == 5, f"got {found}, want five"
    assert list(found) == sorted(found, key=lambda one: int(one.split()[1].rstrip(":")))


@given(st.text(max_size=300))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(InputError):
        load_agent_config(text, "x")
