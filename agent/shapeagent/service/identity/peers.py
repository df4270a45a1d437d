# SPDX-License-Identifier: Apache-2.0
"""Who calls over TCP, asked anew for each call.

The handshake proves that a client holds the key of a certificate of the bundle
of that moment, once; a session that is resumed is not even asked that. And a
connection can stand for weeks: so each call is held to
the clock, the bundle and the table of roles of now. A certificate that ended,
or whose CA left the bundle, is refused on the next call, and a stream that runs
when it is asked again; the client then connects anew with a newer one.

Metadata is never looked at: what a client writes about itself proves nothing.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from shapeagent.service.identity.certificates import (
    Bundle,
    ClientCertificate,
    IdentityError,
    refusal,
    verify_client,
)
from shapeagent.service.identity.spiffe import RoleTable

if TYPE_CHECKING:
    import grpc

# Verifying a chain takes 0.2 ms, finding it again 2 µs.
_MOST_KNOWN = 1024


class Trust(Protocol):
    """Where the CAs of now come from; `tls.ServerTls` is one."""

    @property
    def bundle(self) -> Bundle: ...

    @property
    def bundle_generation(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Peer:
    """Who calls, and as what."""

    who: str  # the SPIFFE id
    role: str  # one of spiffe.ROLES
    peer: str  # as gRPC names it: ipv4:192.0.2.7:49152
    not_after_unix_s: float  # from then on its chain holds no more


class PeerAuthenticator:
    """Names the caller of each call, or refuses it."""

    def __init__(
        self, roles: RoleTable, trust: Trust, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._roles = roles
        self._trust = trust
        self._clock = clock
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, tuple[int, ClientCertificate]] = OrderedDict()

    def replace_roles(self, roles: RoleTable) -> None:
        """Use another table from the next call on."""
        self._roles = roles

    def authenticate(self, context: grpc.ServicerContext) -> Peer:
        """Return who makes this call; asked again, whether a stream that runs may go on.

        Raises: IdentityError: client-not-authenticated, client-certificate-…,
            client-identity-…, client-trust-domain, client-unknown.
        """
        return self.identify(context.auth_context(), context.peer())

    def identify(self, auth_context: Mapping[str, Sequence[bytes]], peer: str) -> Peer:
        """Return who stands behind gRPC's facts of a connection. Raises: as `authenticate`."""
        if list(auth_context.get("transport_security_type", ())) != [b"ssl"]:
            raise refusal("client-not-authenticated", "The connection is not TLS.")
        leaves = list(auth_context.get("x509_pem_cert", ()))
        if len(leaves) != 1:
            raise refusal(
                "client-certificate-missing", "The client shows no certificate of its own."
            )
        chain = b"".join(auth_context.get("x509_pem_cert_chain", ()))
        return self._decide(leaves[0], chain, peer)

    def _decide(self, leaf_pem: bytes, chain_pem: bytes, peer: str) -> Peer:
        certificate = self._certificate(leaf_pem, chain_pem)
        identity = certificate.identity
        who = str(identity)
        roles = self._roles
        if identity.trust_domain != roles.trust_domain:
            raise refusal(
                "client-trust-domain",
                f"The client is of the trust domain {identity.trust_domain}, and this agent of "
                f"{roles.trust_domain}.",
                who=who,
            )
        role = roles.role_of(identity)
        if role is None:
            raise refusal("client-unknown", f"{who} has no role at this agent.", who=who)
        return Peer(who, role, peer, certificate.not_after_unix_s)

    def _certificate(self, leaf_pem: bytes, chain_pem: bytes) -> ClientCertificate:
        now_unix_s = self._clock()
        # The generation first: a bundle that changes in between is then asked again next time.
        generation = self._trust.bundle_generation
        key = hashlib.sha256(leaf_pem + b"\0" + chain_pem).digest()
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
        if known is not None and known[0] == generation:
            found = known[1]
            if found.not_before_unix_s <= now_unix_s < found.not_after_unix_s:
                return found
        # Another chain may still hold where this one ended: all of it is asked again.
        found = verify_client(leaf_pem, chain_pem, self._trust.bundle, now_unix_s)
        with self._lock:
            self._known[key] = (generation, found)
            if len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
        return found


__all__ = ["IdentityError", "Peer", "PeerAuthenticator", "Trust"]
