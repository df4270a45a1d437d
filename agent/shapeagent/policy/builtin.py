# SPDX-License-Identifier: Apache-2.0
"""The policy that comes with shapectl."""

from __future__ import annotations

import pkgutil

BUILTIN_SOURCE = "built-in"


def default_policy_text() -> str:
    """Return the TOML text of the built-in policy, which is also the example."""
    data = pkgutil.get_data("shapeagent.policy", "default.toml")
    assert data is not None  # it is part of the package
    return data.decode()
