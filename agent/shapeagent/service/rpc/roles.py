# SPDX-License-Identifier: Apache-2.0
"""Which role each method needs. What is not here is denied, and does not start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shapeagent.service.rpc.contracts import Role

_V1 = "/shapectl.v1."

#: Method → the least role. tests/unit/test_rpc_roles.py compares it with every descriptor.
LEAST_ROLE: Mapping[str, Role] = {
    f"{_V1}ShaperService/PlanAttach": Role.OPERATOR,
    f"{_V1}ShaperService/Attach": Role.ADMIN,
    f"{_V1}ShaperService/Detach": Role.ADMIN,
    f"{_V1}ShaperService/Confirm": Role.ADMIN,
    f"{_V1}ShaperService/GetStatus": Role.OBSERVER,
    f"{_V1}ShaperService/Explain": Role.OBSERVER,
    f"{_V1}ShaperService/ExplainCapture": Role.OPERATOR,  # a second of the writer's time
    f"{_V1}ShaperService/SetClass": Role.OPERATOR,
    f"{_V1}ShaperService/GetResidue": Role.OPERATOR,
    f"{_V1}PolicyService/GetPolicy": Role.OBSERVER,
    f"{_V1}PolicyService/SetPolicy": Role.ADMIN,
    f"{_V1}WhitelistService/UpdateWhitelist": Role.OPERATOR,
    f"{_V1}WhitelistService/StreamWhitelist": Role.OPERATOR,
    f"{_V1}WhitelistService/ListWhitelist": Role.OBSERVER,
    f"{_V1}WhitelistService/WatchWhitelist": Role.OBSERVER,
    f"{_V1}EventService/WatchEvents": Role.OBSERVER,
    "/grpc.health.v1.Health/Check": Role.OBSERVER,
    "/grpc.health.v1.Health/List": Role.OBSERVER,
    "/grpc.health.v1.Health/Watch": Role.OBSERVER,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Role.OBSERVER,
}


def check_complete(methods: Iterable[str]) -> None:
    """Raise RuntimeError where a method that is served has no entry: nobody may call it."""
    missing = sorted(set(methods) - LEAST_ROLE.keys())
    if missing:
        raise RuntimeError(f"methods without a role: {', '.join(missing)}")
