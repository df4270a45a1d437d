# SPDX-License-Identifier: Apache-2.0
"""The policy that comes with shapectl."""

from __future__ import annotations

from importlib.resources import files

BUILTIN_SOURCE = "built-in"


def default_policy_text() -> str:
    """Return the TOML text of the built-in policy, which is also the example."""
    return files("shapeagent.policy").joinpath("default.toml").read_text(encoding="utf-8")
