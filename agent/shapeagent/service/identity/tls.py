# SPDX-License-Identifier: Apache-2.0
"""The agent's TLS: what it shows, whom it asks for a certificate, and how both change.

TCP is mTLS only. Certificate, key and CA bundle are looked at on each new
handshake and on each tick of the daemon: a renewed file is in use without a
restart, connections that stand go on, a broken one changes nothing and is
reported. A connection that stands is held to the bundle of now by `peers`.

What gRPC itself refuses in the handshake (no certificate, another CA, out of
time, not for clients) no Python code ever sees: it writes a line without the
peer's address to stderr, which is the journal.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from shapeagent.model.errors import ShapeError
from shapeagent.service.identity.certificates import (
    Bundle,
    ServerPair,
    load_bundle,
    load_server_pair,
    time_text,
)
from shapeagent.service.identity.watched import WatchedFiles

_LOG = logging.getLogger(__name__)

# Who renews does so at half (SPIRE) or two thirds (cert-manager, certbot) of a lifetime: with a
# fifth left, renewal has failed. Two weeks are enough notice for certificates made by hand.
_WARN_SHARE = 0.2
_WARN_MOST_S = 14 * 86_400.0


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Where the PEM files are."""

    certificate: Path  # leaf first, then intermediates
    key: Path
    client_ca: Path  # one or more CAs


@dataclass(frozen=True, slots=True)
class TlsFacts:
    """What metrics and `status` show of the agent's TLS."""

    server_not_after_unix_s: float
    ca_not_after_unix_s: float  # the first to end of those that hold
    server_spiffe_id: str | None
    loaded_unix_s: float  # the younger of the pair and the bundle
    reloads: int  # of pair and bundle together, since the start
    refusals: int  # different contents that were not taken
    handshakes: int  # begun, also those that gRPC refuses
    error: ShapeError | None  # why what is on disk is not in use


class ServerTls:
    """Server credentials that follow their files.

    Args:
        clock: seconds since the epoch.

    Raises: InputError file-unreadable, or as `load_server_pair` and `load_bundle`. A pair
        that is out of its time is no error here: a renewed one is then taken up by itself.
    """

    def __init__(self, files: TlsFiles, *, clock: Callable[[], float] = time.time) -> None:
        self.files = files
        self._clock = clock
        self._lock = threading.Lock()
        self._pair: WatchedFiles[ServerPair] | None = None
        self._bundle: WatchedFiles[Bundle] | None = None
        self._pair_files = self._pair = WatchedFiles(
            (files.certificate, files.key), self._load_pair
        )
        self._bundle_files = self._bundle = WatchedFiles((files.client_ca,), self._load_bundle)
        self._shown = self._generations()
        self._handshakes = 0

    @property
    def bundle(self) -> Bundle:
        """The CAs that clients must lead to now."""
        return self._bundle_files.value

    @property
    def bundle_generation(self) -> int:
        """One more with each new bundle in use."""
        return self._bundle_files.generation

    def credentials(self) -> grpc.ServerCredentials:
        """Return credentials for one `add_secure_port`; they demand a client certificate."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(), self._on_handshake, require_client_authentication=True
        )

    def refresh(self) -> bool:
        """Return True where a new pair or bundle was taken into use; says so in the log.

        For the daemon's tick: without it an expired file would be noticed by the next client.
        """
        changed = False
        for what, watched in (("server pair", self._pair_files), ("bundle", self._bundle_files)):
            refusals = watched.refusals
            if watched.refresh():
                changed = True
                _LOG.info("tls: new %s in use", what)
            elif watched.refusals != refusals and watched.error is not None:
                _LOG.warning(
                    "tls: new %s refused, the last good one stays in use: %s: %s",
                    what,
                    watched.error.reference,
                    watched.error.message,
                )
        return changed

    def facts(self) -> TlsFacts:
        """Return what is in use and how it came there."""
        both = (self._pair_files, self._bundle_files)
        return TlsFacts(
            server_not_after_unix_s=self._pair_files.value.not_after_unix_s,
            ca_not_after_unix_s=self.bundle.not_after_unix_s(self._clock()),
            server_spiffe_id=self._pair_files.value.spiffe_id,
            loaded_unix_s=max(one.loaded_unix_s for one in both),
            reloads=sum(one.generation - 1 for one in both),
            refusals=sum(one.refusals for one in both),
            handshakes=self._handshakes,
            error=next((one.error for one in both if one.error is not None), None),
        )

    def warnings(self) -> tuple[str, ...]:
        """Return what an operator should act on: ends that come near, refused files, open keys."""
        now_unix_s = self._clock()
        pair = self._pair_files.value
        ends = [
            (f"server certificate {self.files.certificate}", *_times(pair)),
            *(
                (f"client CA in {self.files.client_ca}", one.not_valid_before_utc.timestamp(),
                 one.not_valid_after_utc.timestamp())
                for one in self.bundle.certificates
            ),
        ]  # fmt: skip
        found = [
            text
            for what, begin, end in ends
            if (text := _end_warning(what, begin, end, now_unix_s)) is not None
        ]
        found += [
            f"{error.reference}: {error.message} The last good one stays in use."
            for error in (self._pair_files.error, self._bundle_files.error)
            if error is not None
        ]
        if (exposed := _exposure(self.files.key)) is not None:
            found.append(exposed)
        return tuple(found)

    def _load_pair(self, contents: Sequence[bytes]) -> ServerPair:
        pair = load_server_pair(contents)
        self._check_time(pair, self._pair)
        return pair

    def _load_bundle(self, contents: Sequence[bytes]) -> Bundle:
        bundle = load_bundle(contents)
        self._check_time(bundle, self._bundle)
        return bundle

    def _check_time(
        self,
        new: ServerPair | Bundle,
        in_use: WatchedFiles[ServerPair] | WatchedFiles[Bundle] | None,
    ) -> None:
        """Refuse what is out of its time, where what is in use is not."""
        now_unix_s = self._clock()
        try:
            new.check_time(now_unix_s)
        except ShapeError:
            if in_use is None:
                return
            try:
                in_use.value.check_time(now_unix_s)
            except ShapeError:
                return
            raise

    def _on_handshake(self) -> grpc.ServerCertificateConfiguration | None:
        """Return what gRPC shall use from this handshake on; None where it has it already."""
        with self._lock:
            self._handshakes += 1
            self.refresh()
            generations = self._generations()
            if generations == self._shown:
                return None
            self._shown = generations
            return self._configuration()

    def _generations(self) -> tuple[int, int]:
        return self._pair_files.generation, self._bundle_files.generation

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        pair = self._pair_files.value
        return grpc.ssl_server_certificate_configuration(
            [(pair.key_pem, pair.certificate_pem)], root_certificates=self.bundle.pem
        )


def _times(pair: ServerPair) -> tuple[float, float]:
    return pair.not_before_unix_s, pair.not_after_unix_s


def _end_warning(what: str, begin: float, end: float, now_unix_s: float) -> str | None:
    if now_unix_s >= end:
        return f"certificate-expired: {what} ended {time_text(end)}."
    if now_unix_s < begin:
        return f"certificate-not-yet-valid: {what} holds only from {time_text(begin)} on."
    left_s = end - now_unix_s
    if left_s > min(_WARN_MOST_S, (end - begin) * _WARN_SHARE):
        return None
    return f"certificate-expires-soon: {what} ends {time_text(end)}, in {_span_text(left_s)}."


def _span_text(seconds: float) -> str:
    for unit, length_s in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds:.0f} seconds"


def _exposure(key: Path) -> str | None:
    try:
        mode = os.stat(key).st_mode & 0o777
    except OSError:
        return None  # its absence is the watcher's error
    if not mode & 0o077:
        return None
    return f"key-exposed: {key} has mode {mode:04o}; others than its owner may read it."
