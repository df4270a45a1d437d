# SPDX-License-Identifier: Apache-2.0
"""A gRPC channel to an agent: credentials, keep-alive, and retries that are safe.

Only calls of one request are retried, by gRPC itself, and only where the agent
was not reached or has said that it has begun nothing. Changes among them carry
a request id, so that the second try cannot change anything twice.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from shapeagent.client.address import AgentAddress, TlsFiles
from shapeagent.model.errors import InputError, PrivilegeError

MAX_RECEIVE_BYTES = 16 << 20  # as the agent may send
_RETRIED = {
    "ShaperService": (
        "PlanAttach", "Attach", "Detach", "Confirm", "GetStatus", "Explain", "SetClass",
    ),
    "PolicyService": ("GetPolicy", "SetPolicy"),
    "WhitelistService": ("UpdateWhitelist", "ListWhitelist"),
}  # fmt: skip
_SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [
                {"service": f"shapectl.v1.{service}", "method": method}
                for service, methods in _RETRIED.items()
                for method in methods
            ],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}
OPTIONS: Sequence[tuple[str, Any]] = (
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.enable_http_proxy", 0),  # an agent is reached directly, whatever the environment says
    # connections are not shared between channels: each stands for its own certificates
    ("grpc.use_local_subchannel_pool", 1),
)


def open_channel(address: AgentAddress, tls: TlsFiles | None = None) -> Any:
    """Return a `grpc.Channel` to an agent; close it.

    Args: tls: for TCP; a Unix socket needs none.
    Raises: InputError agent-certificates; PrivilegeError file-forbidden.
    """
    if address.is_unix:
        # the name that would else stand in :authority is the socket's path, escaped
        options = (*OPTIONS, ("grpc.default_authority", "localhost"))
        return grpc.insecure_channel(address.target, options=options)
    if tls is None:
        raise InputError(
            "agent-certificates",
            f"The agent at {address} wants a certificate of who calls.",
            hint="--agent-cert FILE; NAME-key.pem and ca.pem are looked for beside it",
        )
    credentials = grpc.ssl_channel_credentials(
        root_certificates=_read(tls.ca),
        private_key=_read(tls.key),
        certificate_chain=_read(tls.certificate),
    )
    return grpc.secure_channel(address.target, credentials, options=OPTIONS)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except PermissionError as error:
        raise PrivilegeError("file-forbidden", f"{path}: {error.strerror}.") from error
    except OSError as error:
        raise InputError(
            "agent-certificates",
            f"Cannot read {path}: {error.strerror}.",
            hint="--agent-cert FILE; NAME-key.pem and ca.pem are looked for beside it",
        ) from error
