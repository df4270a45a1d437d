# SPDX-License-Identifier: Apache-2.0
"""The agent: one process that owns the lock, keeps what is wanted, and answers calls.

Threads: the main one waits for signals and speaks to systemd, the writer owns
the engine, the monitor listens to netlink; the servers bring their own. It never
forks: gRPC's threads would not survive that.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn, Protocol

from shapeagent.kernel import prepared
from shapeagent.kernel.monitor import Monitor
from shapeagent.kernel.probe import ensure_bpffs, read_kernel_facts
from shapeagent.model.agentschema import AgentConfig, InterfaceTable, load_agent_config
from shapeagent.model.errors import ShapeError
from shapeagent.model.reports import AttachRequest
from shapeagent.service.commanded import CommandedEngine
from shapeagent.service.documents import read_document
from shapeagent.service.engine import Engine
from shapeagent.service.latecounters import LateCounters
from shapeagent.service.notify import Notifier
from shapeagent.service.reconciler import Reconciler
from shapeagent.service.state import locked
from shapeagent.service.wanted import WantedStore
from shapeagent.service.writer import Writer
from shapeagent.telemetry.events import Event, EventLog

_log = logging.getLogger("shapectl.agent")

HANGS_S = 60.0  # a compile takes 1 s here, 30 s on an emulated CPU
_STOP_S = 30.0
_ADOPT_S = 0.5
_TICK_S = 5.0
_WARNED = frozenset({"failed", "disputed", "yielded", "config-refused", "put-back"})


class Server(Protocol):
    """Something that listens while the agent runs."""

    def start(self) -> None: ...

    def tick(self) -> None: ...

    def reload(self, config: AgentConfig) -> None: ...

    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Parts:
    """What servers are made of."""

    config: AgentConfig
    writer: Writer
    reconciler: Reconciler
    events: EventLog
    counters: LateCounters


def attach_request(table: InterfaceTable) -> AttachRequest:
    """Return what an `[[interface]]` table asks for."""
    return AttachRequest(
        device=table.device,
        policy_path=table.policy,
        profile=table.profile,
        link_rate_bits_per_s=table.link_rate,
        ingress=table.ingress,
        hook=table.hook,
        shadow=table.shadow,
        takeover=table.takeover,
        yes_management=table.yes_management,
    )


def prepare(config: AgentConfig) -> Path:
    """Return the file that holds what the agent, without CAP_SYS_ADMIN, cannot find out itself.

    Raises: PrivilegeError missing-capability; UnsupportedError no-bpffs.
    Effects: mounts bpffs where it is missing; makes the run folder.
    """
    ensure_bpffs()
    folder = Path(config.agent.run_dir)
    folder.mkdir(mode=0o711, parents=True, exist_ok=True)
    path = folder / prepared.NAME
    prepared.write(path, read_kernel_facts())
    return path


def read_config(path: str) -> AgentConfig:
    """Return the configuration in a file. Raises: InputError, PrivilegeError."""
    return load_agent_config(read_document(path), path)


class Agent:
    """One run of the agent."""

    def __init__(
        self,
        config: AgentConfig,
        *,
        config_path: str | None = None,
        netns: str | None = None,
        servers: Callable[[Parts], Sequence[Server]] = lambda _: (),
    ) -> None:
        """Args: servers: makes what listens; called once interfaces were looked at."""
        self._config = config
        self._config_path = config_path
        self._stop = threading.Event()
        self._reload = threading.Event()
        self._wake = threading.Event()
        self._notifier = Notifier()
        self.events = EventLog(_log_event)
        self._counters = LateCounters()
        self._engine = CommandedEngine(
            netns=netns,
            progress=_log.debug,
            warn=_log.warning,
            run_dir=Path(config.agent.run_dir),
            bpffs_dir=Path(config.agent.bpffs_dir),
            holds_lock=True,
            lists_dir=Path(config.agent.state_dir) / "whitelists",
        )
        self._wanted = WantedStore(Path(config.agent.state_dir), _log.warning)
        self._tables = [attach_request(one) for one in config.interface]
        self._reconciler = Reconciler(
            self._engine,
            self._wanted.effective(self._tables),
            self.events,
            self._counters,
            every_s=config.agent.reconcile,
        )
        self._engine.wanting = self._wanting
        self._writer = Writer(self._engine, idle=self._look)
        self._make_servers = servers
        self._servers: list[Server] = []

    def run(self) -> None:
        """Run until SIGTERM or SIGINT.

        Raises:
            ConflictError: "locked", another shapectl holds the lock, with its pid.
            ShapeError: of a server that cannot start.
        Effects: attaches the interfaces of the configuration as they become
            ready; they stay attached at the end unless `on_exit = "rollback"`.
        """
        sockets = Path(self._config.sockets.folder)
        with (
            self._signals(),
            locked(Path(self._config.agent.run_dir), sockets=sockets, netns=self._engine.netns),
            contextlib.ExitStack() as stack,
        ):
            self._writer.start()
            stack.callback(self._end_writer)
            monitor = Monitor(self._engine.netns, self._writer.wake)
            stack.callback(monitor.close)
            monitor.start()
            # adopting takes a tenth of what loading gRPC does; an attach, which compiles, more
            self._first_look(_ADOPT_S)
            parts = Parts(self._config, self._writer, self._reconciler, self.events, self._counters)
            for server in self._make_servers(parts):
                stack.callback(server.stop)
                self._servers.append(server)
            stack.callback(self.events.close)  # first of all: who watches must not be waited for
            for server in self._servers:
                server.start()
            self._first_look(HANGS_S)
            gc.collect()
            gc.freeze()  # what was loaded stays: a full collection would stop calls for 50 ms
            self._say("READY=1")
            self._wait()
            self._say("STOPPING=1")

    def stop(self) -> None:
        """Make `run` return; from any thread or a signal handler."""
        self._stop.set()
        self._wake.set()

    def _look(self) -> float:
        """In the writer's thread, between calls."""
        self._wanted.catch_up()
        return self._reconciler.look()

    @contextlib.contextmanager
    def _wanting(self, device: str, request: AttachRequest | None) -> Iterator[None]:
        """In the writer's thread: a caller wants this interface so, None: left alone."""
        with self._wanted.saying(device, request, self._tables):
            yield
        self._reconciler.set_requests(self._wanted.effective(self._tables))
        if request is not None:
            self._reconciler.begin_anew(device)

    def _first_look(self, most_s: float) -> None:
        """Wait until every wanted interface was looked at once, for so long at most."""
        with contextlib.suppress(ShapeError):
            self._writer.run(lambda _: None, timeout_s=most_s)

    def _wait(self) -> None:
        watchdog_s = self._notifier.watchdog_s
        tick_s = min(_TICK_S, watchdog_s / 3) if watchdog_s else _TICK_S
        while not self._stop.is_set():
            self._wake.wait(tick_s)
            self._wake.clear()
            for server in self._servers:
                _tick(server)
            if self._reload.is_set():
                self._reload.clear()
                self._take_up_config()
            if watchdog_s and self._writer.busy_s < HANGS_S:
                self._say("WATCHDOG=1")

    def _take_up_config(self) -> None:
        """Read the configuration again; one that is wrong changes nothing (F39)."""
        self._say("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            if self._config_path is not None:
                config = read_config(self._config_path)
                for server in self._servers:
                    server.reload(config)
                self._config = config
                self._writer.run(lambda _: self._take_up_tables(config), timeout_s=HANGS_S)
            self._counters.config_reload(accepted=True)
            self.events.add("config-reloaded", "", f"{self._config_path} was taken up")
            self._writer.wake()
        except ShapeError as error:
            words = "; ".join((error.message, *error.details))
            _log.error("%s: what was in force stays: %s", error.reference, words)
            self._counters.config_reload(accepted=False)
            self.events.add("config-refused", "", words, reference=error.reference)
        finally:
            self._say("READY=1")

    def _take_up_tables(self, config: AgentConfig) -> None:
        self._tables = [attach_request(one) for one in config.interface]
        self._reconciler.set_requests(self._wanted.effective(self._tables))

    def _end_writer(self) -> None:
        if self._config.agent.on_exit == "rollback":
            for device in list(self._reconciler.watched):
                try:
                    self._writer.run(partial(_detach, device), timeout_s=_STOP_S)
                except ShapeError as error:
                    if error.reference not in ("no-such-device", "not-attached"):
                        _log.error("%s: %s", error.reference, error.message)
        try:
            self._writer.stop(_STOP_S)
            self._reconciler.close()
            self._engine.close()
        except ShapeError as error:
            _log.error("%s: %s", error.reference, error.message)

    def _say(self, *states: str) -> None:
        self._notifier.send(*states)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Take SIGTERM, SIGINT and SIGHUP while the agent runs, and forbid to fork."""
        with _no_fork():
            if threading.current_thread() is not threading.main_thread():
                yield
                return

            def stop(*_: object) -> None:
                self.stop()

            def reload(*_: object) -> None:
                self._reload.set()
                self._wake.set()

            handlers = {signal.SIGTERM: stop, signal.SIGINT: stop, signal.SIGHUP: reload}
            old = {number: signal.signal(number, one) for number, one in handlers.items()}
            try:
                yield
            finally:
                for number, handler in old.items():
                    signal.signal(number, handler)


def _log_event(event: Event) -> None:
    level = logging.WARNING if event.kind in _WARNED else logging.INFO
    _log.log(level, "%s: %s%s", event.kind, f"{event.device}: " * bool(event.device), event.text)


def _detach(device: str, engine: Engine) -> None:
    assert isinstance(engine, CommandedEngine)
    engine.detach_unasked(device)


def _tick(server: Server) -> None:
    try:
        server.tick()
    except ShapeError as error:
        _log.error("%s: %s", error.reference, error.message)


@contextlib.contextmanager
def _no_fork() -> Iterator[None]:
    """Let nothing in this process fork; starting programs by subprocess execs at once."""

    def refuse() -> NoReturn:
        raise RuntimeError("the agent must not fork: its threads and gRPC's would be lost")

    fork, os.fork = os.fork, refuse
    try:
        yield
    finally:
        os.fork = fork
