# SPDX-License-Identifier: Apache-2.0
"""Where an agent is: a Unix socket, or TCP with certificates. Loads no gRPC."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from shapeagent.model.errors import InputError

DEFAULT_PORT = 7443
_HINT = "unix:/run/shapectl/operator.sock, agent.example.org:7443 or [2001:db8::7]:7443"
_TCP = re.compile(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([A-Za-z0-9._-]+))(?::([0-9]{1,5}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class AgentAddress:
    """A place where an agent listens."""

    target: str  # as gRPC wants it: "unix:/run/…", "dns:///host:7443", "ipv6:[::1]:7443"
    pid: int | None = None  # of an agent on this host
    netns: str | None = None  # the named namespace that it serves, where not the one it is in

    @property
    def is_unix(self) -> bool:
        """Whether it is a Unix socket: its file mode is the credential."""
        return self.target.startswith("unix:")

    def __str__(self) -> str:
        return self.target.removeprefix("dns:///")


def parse_address(text: str) -> AgentAddress:
    """Return the address that a text names.

    Raises: InputError agent-address.
    """
    if text.startswith(("unix:", "/")):
        path = text.removeprefix("unix:").removeprefix("//")
        if not path.startswith("/") or "\0" in path:
            raise _bad(text, "the path of a socket is absolute")
        return AgentAddress(f"unix:{path}")
    found = _TCP.fullmatch(text)
    if found is None:
        raise _bad(text, "it is neither a socket's path nor HOST:PORT")
    port = int(found[3]) if found[3] else DEFAULT_PORT
    if not 0 < port <= 65_535:
        raise _bad(text, f"{port} is no port (1 to 65535)")
    if found[1]:
        return AgentAddress(f"ipv6:[{found[1]}]:{port}")
    return AgentAddress(f"dns:///{found[2]}:{port}")


def _bad(text: str, why: str) -> InputError:
    return InputError("agent-address", f"{text!r} is not an agent's address: {why}.", hint=_HINT)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The files of a client: who it trusts, and who it is."""

    ca: Path
    certificate: Path
    key: Path

    @classmethod
    def beside(cls, certificate: Path) -> TlsFiles:
        """Return the files that `shapectl agent certs` puts beside a client's certificate."""
        key = certificate.with_name(f"{certificate.stem}-key{certificate.suffix}")
        return cls(certificate.with_name("ca.pem"), certificate, key)
