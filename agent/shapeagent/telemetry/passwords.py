# SPDX-License-Identifier: Apache-2.0
"""Passwords of scrapers: kept as scrypt hashes, compared in constant time."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from shapeagent.model.errors import InputError

# OWASP's password storage cheat sheet: N = 2^14, r = 8 needs p = 5; 16 MiB for its moment.
_N, _R, _P = 1 << 14, 8, 5
_MAX_MEMORY_BYTES = 1 << 27
_HASH = re.compile(
    r"scrypt\$(\d{1,7})\$(\d{1,2})\$(\d{1,2})\$([\w+/=]{8,})\$([\w+/=]{8,})", re.ASCII
)
_REMEMBERED = 64
_FAILURE_PAUSE_S = 0.5
_MAX_PASSWORD_BYTES = 1024


def hash_password(password: str) -> str:
    """Return a password as the configuration holds it: scrypt$N$r$p$salt$hash.

    Raises: InputError bad-password where it is empty or longer than 1024 bytes.
    """
    if not 0 < len(password.encode()) <= _MAX_PASSWORD_BYTES:
        raise InputError(
            "bad-password",
            f"A password has 1 to {_MAX_PASSWORD_BYTES} bytes.",
            hint="openssl rand -base64 24 makes a good one",
        )
    salt = secrets.token_bytes(16)
    return _Hash(_N, _R, _P, salt, _scrypt(password.encode(), salt, _N, _R, _P)).text


@dataclass(frozen=True, slots=True)
class _Hash:
    n: int
    r: int
    p: int
    salt: bytes
    key: bytes

    @property
    def text(self) -> str:
        salt, key = (base64.b64encode(one).decode() for one in (self.salt, self.key))
        return f"scrypt${self.n}${self.r}${self.p}${salt}${key}"

    def fits(self, password: bytes) -> bool:
        found = _scrypt(password, self.salt, self.n, self.r, self.p)
        return hmac.compare_digest(found, self.key)


def _parse(user: str, text: str) -> _Hash:
    found = _HASH.fullmatch(text)
    try:
        if found is None:
            raise ValueError("it is not scrypt$N$r$p$salt$hash")
        n, r, p = (int(found[place]) for place in (1, 2, 3))
        salt, key = (base64.b64decode(found[place], validate=True) for place in (4, 5))
        if len(key) != 32:
            raise ValueError("its hash has not 32 bytes")
        _scrypt(b"", salt, n, r, p)  # the numbers are usable, and not larger than allowed
    except (ValueError, binascii.Error) as error:
        raise InputError(
            "bad-password-hash",
            f"The password hash of {user!r} cannot be used: {error}.",
            hint="write what shapeagent.telemetry.passwords.hash_password makes of the password",
        ) from error
    return _Hash(n, r, p, salt, key)


def _scrypt(password: bytes, salt: bytes, n: int, r: int, p: int) -> bytes:
    return hashlib.scrypt(password, salt=salt, n=n, r=r, p=p, maxmem=_MAX_MEMORY_BYTES, dklen=32)


class PasswordTable:
    """Who may scrape. A hash takes 0.1 s, so one that fitted is remembered under a fresh key.

    Args:
        users: name → hash, as `hash_password` writes it.
    Raises: InputError bad-password-hash.
    """

    def __init__(self, users: Mapping[str, str]) -> None:
        self._hashes = {name: _parse(name, text) for name, text in users.items()}
        salt = secrets.token_bytes(16)
        self._nobody = _Hash(_N, _R, _P, salt, secrets.token_bytes(32))
        self._key = secrets.token_bytes(32)
        self._fitted: set[bytes] = set()
        # one hash at a time, and a pause after a wrong one: guesses cannot take the CPU
        self._hashing = threading.Lock()
        self._pause = threading.Event()

    def accepts(self, header: str | None) -> bool:
        """Return whether an Authorization header names a user and the password that fits."""
        words = (header or "").split()
        if len(words) != 2 or words[0].lower() != "basic":
            return False
        try:
            user, colon, password = base64.b64decode(words[1], validate=True).partition(b":")
            name = user.decode()
        except (binascii.Error, ValueError):
            return False
        if not colon or len(password) > _MAX_PASSWORD_BYTES:
            return False
        mark = hmac.digest(self._key, len(user).to_bytes(4, "big") + user + password, "sha256")
        if mark in self._fitted:
            return True
        with self._hashing:
            # an unknown user costs the same time as a known one
            fits = self._hashes.get(name, self._nobody).fits(password)
            if not fits:
                self._pause.wait(_FAILURE_PAUSE_S)
                return False
        if len(self._fitted) >= _REMEMBERED:
            self._fitted.clear()
        self._fitted.add(mark)
        return True
