# SPDX-License-Identifier: Apache-2.0
"""SPIFFE ids by their strict grammar, and the table that maps them to roles.

An id names one workload, byte for byte. Whatever another parser could read as
the same name (other case, an escape, a port, a trailing slash) is refused, so
that no two spellings ever mean one identity.
Source: SPIFFE-ID §2 (grammar, 2,048 bytes), X509-SVID §4.1 (a leaf has a path).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from shapeagent.model.errors import InputError

#: From the least to the most; each may do what stands before it.
ROLES = ("observer", "operator", "admin")

MOST_ID_BYTES = 2048
_MOST_TRUST_DOMAIN_BYTES = 255
_SCHEME = "spiffe://"
_TRUST_DOMAIN = re.compile(r"[a-z0-9._-]+", re.ASCII)
_SEGMENT = re.compile(r"[A-Za-z0-9._-]+", re.ASCII)
_EXAMPLE = "spiffe://example.org/ns/prod/sa/scheduler"


@dataclass(frozen=True, slots=True, order=True)
class SpiffeId:
    """One workload of one trust domain; `str()` gives the only spelling there is."""

    trust_domain: str
    path: str  # with its leading slash, never empty

    def __str__(self) -> str:
        return f"{_SCHEME}{self.trust_domain}{self.path}"


def parse_trust_domain(text: str) -> str:
    """Return `text` where it is a trust domain.

    Raises: InputError spiffe-trust-domain.
    """
    if len(text) <= _MOST_TRUST_DOMAIN_BYTES and _TRUST_DOMAIN.fullmatch(text):
        return text
    raise InputError(
        "spiffe-trust-domain",
        f"{_shown(text)} is no trust domain: 1 to {_MOST_TRUST_DOMAIN_BYTES} characters of "
        "a-z, 0-9, '.', '-' and '_'.",
        hint="write it as in example.org: no scheme, no port, no capital",
    )


def parse_id(text: str) -> SpiffeId:
    """Return the id that `text` spells.

    Raises: InputError spiffe-id, with the first thing that is wrong.
    """
    if len(text) > MOST_ID_BYTES:
        raise _refused(text, f"is longer than {MOST_ID_BYTES} bytes")
    if not text.startswith(_SCHEME):
        raise _refused(text, f"does not begin with {_SCHEME} in lower case")
    trust_domain, slash, rest = text[len(_SCHEME) :].partition("/")
    if len(trust_domain) > _MOST_TRUST_DOMAIN_BYTES or not _TRUST_DOMAIN.fullmatch(trust_domain):
        raise _refused(
            text, "has no trust domain of a-z, 0-9, '.', '-' and '_' (no capital, port or user)"
        )
    if not slash:
        raise _refused(text, "names a trust domain and no workload: it has no path")
    for segment in rest.split("/"):
        if not segment:
            raise _refused(text, "has an empty segment or ends in a slash")
        if segment in {".", ".."}:
            raise _refused(text, f"has the segment {segment!r}")
        if not _SEGMENT.fullmatch(segment):
            raise _refused(
                text,
                "has a character outside A-Z, a-z, 0-9, '.', '-' and '_' in its path "
                "(no escape, query or fragment)",
            )
    return SpiffeId(trust_domain, f"/{rest}")


def _refused(text: str, why: str) -> InputError:
    return InputError(
        "spiffe-id", f"{_shown(text)} {why}.", hint=f"a SPIFFE id looks like {_EXAMPLE}"
    )


def _shown(text: str) -> str:
    """Return a stranger's text for a message: escaped, and not too long."""
    return ascii(text if len(text) <= 120 else text[:120] + "…")


@dataclass(frozen=True, slots=True)
class RoleTable:
    """Which role an id has. What is not in it has none.

    Ids are exact. A prefix would give the role to whoever may name a workload
    below it, which on most platforms is every team with a namespace.
    """

    trust_domain: str
    roles: Mapping[str, str]  # spelled id → role

    def role_of(self, identity: SpiffeId) -> str | None:
        """Return the role, None where it has none."""
        if identity.trust_domain != self.trust_domain:
            return None
        return self.roles.get(str(identity))


def parse_role_table(trust_domain: str, roles: Mapping[str, str]) -> RoleTable:
    """Return the table that a configuration spells.

    Args: roles: id → role.
    Raises: InputError spiffe-trust-domain, or agent-roles with every error as a detail.
    """
    parse_trust_domain(trust_domain)
    errors: list[str] = []
    for text, role in roles.items():
        if role not in ROLES:
            errors.append(f"{_shown(role)} is no role: {', '.join(ROLES)}")
        try:
            identity = parse_id(text)
        except InputError as error:
            errors.append(error.message)
            continue
        if identity.trust_domain != trust_domain:
            errors.append(f"{_shown(text)} is outside the trust domain {trust_domain}")
    if errors:
        raise InputError(
            "agent-roles",
            f"The table of roles has {len(errors)} error{'s' if len(errors) > 1 else ''}.",
            hint="each line gives one exact id of the trust domain one role; a role may also do "
            "what the lower ones may",
            details=errors,
        )
    return RoleTable(trust_domain, dict(roles))
