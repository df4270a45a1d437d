# SPDX-License-Identifier: Apache-2.0
"""A connection to an agent: calls with a deadline, errors by their names, request ids."""

from __future__ import annotations

import uuid
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shapeagent.client.address import AgentAddress, TlsFiles
from shapeagent.client.channel import open_channel
from shapeagent.client.errors import error_of
from shapeagent.model.errors import ConflictError, FailedError, ShapeError

TIMEOUT_S = 30.0
LONG_TIMEOUT_S = 120.0  # an attach compiles, on an emulated CPU for half a minute
HELLO_TIMEOUT_S = 2.0


class Connection:
    """A channel to one agent; any thread may call."""

    def __init__(
        self, address: AgentAddress, tls: TlsFiles | None, timeout_s: float | None
    ) -> None:
        """Open it; nothing is sent yet. Raises: as `open_channel`."""
        self.address = address
        self.channel = open_channel(address, tls)
        self._timeout_s = timeout_s

    def close(self) -> None:
        """Close it; calls that run are cut off."""
        self.channel.close()

    def hello(self, timeout_s: float = HELLO_TIMEOUT_S) -> None:
        """Return where the agent answers that it serves.

        Raises:
            ConflictError: "agent-hung", of an agent on this host, with its pid.
            FailedError: agent-unreachable; PrivilegeError denied.
        """
        stub = health_pb2_grpc.HealthStub(self.channel)
        request = health_pb2.HealthCheckRequest(service="shapectl.v1.ShaperService")
        try:
            answer = stub.Check(request, timeout=timeout_s, wait_for_ready=True)
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE):
                raise self._silent(f"within {timeout_s:g} s") from error
            raise error_of(error, str(self.address)) from error
        if answer.status != health_pb2.HealthCheckResponse.SERVING:
            raise self._silent("that it serves")

    def _silent(self, what: str) -> ShapeError:
        pid = self.address.pid
        if pid is None:
            return FailedError(
                "agent-unreachable",
                f"The agent at {self.address} does not answer {what}.",
                hint="is it running, and are address and certificates right?",
            )
        return ConflictError(
            "agent-hung",
            f"The agent (pid {pid}) holds the lock and does not answer {what}.",
            hint=f"look at it: ps -fp {pid}; systemctl restart shapectl-agent",
        )

    def time_s(self, *, long: bool = False) -> float:
        """Return how long a call may take."""
        return self._timeout_s or (LONG_TIMEOUT_S if long else TIMEOUT_S)

    def call(self, method: Any, request: Any, *, long: bool = False) -> Any:
        """Return the answer of a method of one request. Raises: ShapeError, as the agent did."""
        with self.named_errors():
            return method(request, timeout=self.time_s(long=long))

    def named_errors(self) -> NamedErrors:
        """Return a context in which an error of gRPC becomes a named one."""
        return NamedErrors(str(self.address))


class NamedErrors:
    """Makes a named error of gRPC's; a class, since `yield` stands in some bodies."""

    def __init__(self, address: str) -> None:
        self._address = address

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, grpc.RpcError):
            raise error_of(error, self._address) from error


def fresh_id() -> str:
    """Return a request id that nobody has used."""
    return str(uuid.uuid4())
