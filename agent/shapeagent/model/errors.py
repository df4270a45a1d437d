# SPDX-License-Identifier: Apache-2.0
"""Errors that a person can act on.

Every failure that leaves shapectl is a `ShapeError`: a kebab-case reference
that programs match on, what failed (with the kernel's words where it spoke),
and the next command to type. The class decides the exit code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class ShapeError(Exception):
    """A named failure. `reference` never changes its meaning between versions."""

    exit_code: ClassVar[int] = 1

    def __init__(
        self,
        reference: str,
        message: str,
        *,
        hint: str | None = None,
        details: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.reference = reference
        self.message = message
        self.hint = hint
        self.details = tuple(details)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.reference, self.message, self.hint, self.details))

    def as_dict(self) -> dict[str, object]:
        """Return the error as `--json` prints it."""
        return {
            "error": self.reference,
            "message": self.message,
            "hint": self.hint,
            "details": list(self.details),
            "exit_code": self.exit_code,
        }


def _rebuild(
    cls: type[ShapeError], reference: str, message: str, hint: str | None, details: Sequence[str]
) -> ShapeError:
    return cls(reference, message, hint=hint, details=details)


class FailedError(ShapeError):
    """The kernel or the host refused something that should have worked (exit 1)."""


class InputError(ShapeError):
    """Usage, input or policy is invalid; nothing was changed (exit 2)."""

    exit_code = 2


class PrivilegeError(ShapeError):
    """A privilege is missing (exit 3)."""

    exit_code = 3


class UnsupportedError(ShapeError):
    """The kernel, headers, compiler or a package lacks something needed (exit 4)."""

    exit_code = 4


class ConflictError(ShapeError):
    """Existing state, or another owner, is in the way (exit 5)."""

    exit_code = 5


class PartialError(ShapeError):
    """Some of it was done, some could not be (exit 6)."""

    exit_code = 6
