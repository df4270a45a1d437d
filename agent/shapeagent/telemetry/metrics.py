# SPDX-License-Identifier: Apache-2.0
"""The agent's own numbers, and the page on which a scrape finds them beside the interfaces'.

One process, one registry of its own: nothing is left on the page by a worker
that died (case C98), and a second agent in one process duplicates nothing
(case C99).
"""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from shapeagent.model.errors import ShapeError
from shapeagent.model.reports import InterfaceStatus
from shapeagent.telemetry.exposition import Family, render
from shapeagent.telemetry.tables import interface_families

_OTHER = "other"  # for a label value that nobody announced: the sender could invent any number
# Scrapers that come together share a look. Older than that would falsify rates: a page of 1 s ago
# made rate(…[10s]) of a scrape each second 11 % too high (tests/netns/test_prometheus.py).
_FRESH_S = 0.25

# From one map write to a replacement of 1,000,000 entries.
_UPDATE_BUCKETS_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_CALL_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)

UPDATE_KINDS = ("single", "batch", "replace")
RELOAD_RESULTS = ("accepted", "refused")


class StatusSource(Protocol):
    """Who knows the interfaces: an engine, or the agent's writer in front of one."""

    def status(self) -> tuple[InterfaceStatus, ...]:
        """Return every attached interface. Raises: ShapeError."""


@dataclass(frozen=True, slots=True)
class AgentFacts:
    """What does not come from an interface and is not counted. Asked at each scrape."""

    version: str
    source_digest: str  # of the classifier that this version attaches
    kernel_release: str
    whitelist_capacity_entries: int
    #: "server", "ca", … → when it expires, in seconds since 1970
    certificate_expiry_unix_s: Mapping[str, float] = field(default_factory=dict)


class AgentMetrics:
    """Counts what the agent does. Every method may be called from any thread.

    Args:
        grpc_methods: the full names of the methods that the agent serves.
        reconcile_actions: what its reconciler may do, by name.
        conflict_kinds: what somebody else may keep changing, by name.

    What has another name is counted as `other`: a caller chooses the name of
    the method that it calls, and must not choose how many series there are.
    """

    def __init__(
        self,
        *,
        grpc_methods: Collection[str] = (),
        reconcile_actions: Collection[str] = (),
        conflict_kinds: Collection[str] = (),
    ) -> None:
        # a second series for each, which nobody asks for
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._methods = frozenset(grpc_methods)
        self._actions = frozenset(reconcile_actions)
        self._conflict_kinds = frozenset(conflict_kinds)
        self._calls = Counter(
            "shapectl_grpc_calls",
            "Calls that ended, by method and status code.",
            ("method", "code"),
            registry=self.registry,
        )
        self._call_seconds = Histogram(
            "shapectl_grpc_call_seconds",
            "How long calls took, streams from their begin to their end.",
            ("method",),
            buckets=_CALL_BUCKETS_S,
            registry=self.registry,
        )
        self._update_seconds = Histogram(
            "shapectl_whitelist_update_seconds",
            "From a whitelist change to its effect in the kernel.",
            ("kind",),
            buckets=_UPDATE_BUCKETS_S,
            registry=self.registry,
        )
        self._reconciled = Counter(
            "shapectl_reconcile_actions",
            "What the reconciler did because the kernel was not as wanted.",
            ("action",),
            registry=self.registry,
        )
        self._conflicts = Counter(
            "shapectl_reconcile_conflicts",
            "Times at which the reconciler gave way to somebody else.",
            ("kind",),
            registry=self.registry,
        )
        self._reloads = Counter(
            "shapectl_config_reloads",
            "Readings of the agent's configuration, policy or certificates.",
            ("result",),
            registry=self.registry,
        )
        # each from 0: the first event would else be no increase
        for method in self._methods:
            self._call_seconds.labels(method)
            for code in ("OK", *_FAULTS):
                self._calls.labels(method, code)
        for kind in UPDATE_KINDS:
            self._update_seconds.labels(kind)
        for action in self._actions:
            self._reconciled.labels(action)
        for kind in self._conflict_kinds:
            self._conflicts.labels(kind)
        for result in RELOAD_RESULTS:
            self._reloads.labels(result)

    def grpc_call(self, method: str, code: str, seconds: float) -> None:
        """Count a call that ended.

        Args:
            method: as in the request, "/shapectl.v1.Shaper/Attach".
            code: the name of its status, "OK" or "PERMISSION_DENIED".
        """
        method = _known(method, self._methods)
        self._calls.labels(method, _known(code, _STATUS_CODES)).inc()
        self._call_seconds.labels(method).observe(seconds)

    def whitelist_update(self, kind: str, seconds: float) -> None:
        """Count a whitelist change of one of UPDATE_KINDS, from the call to the kernel."""
        self._update_seconds.labels(_known(kind, UPDATE_KINDS)).observe(seconds)

    def reconcile_action(self, action: str) -> None:
        """Count something that the reconciler put right."""
        self._reconciled.labels(_known(action, self._actions)).inc()

    def conflict(self, kind: str) -> None:
        """Count a time at which the reconciler gave way."""
        self._conflicts.labels(_known(kind, self._conflict_kinds)).inc()

    def config_reload(self, *, accepted: bool) -> None:
        """Count a configuration, policy or certificate that was read again."""
        self._reloads.labels(RELOAD_RESULTS[0] if accepted else RELOAD_RESULTS[1]).inc()


_FAULTS = ("INTERNAL", "UNKNOWN")  # of ours: an alert asks for them

#: grpc.StatusCode's names; written out, since grpc takes 60 MB to import.
_STATUS_CODES = frozenset(
    (
        "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND",
        "ALREADY_EXISTS", "PERMISSION_DENIED", "UNAUTHENTICATED", "RESOURCE_EXHAUSTED",
        "FAILED_PRECONDITION", "ABORTED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE",
        "DATA_LOSS", "OUT_OF_RANGE",
    )
)  # fmt: skip


def _known(name: str, names: Collection[str]) -> str:
    return name if name in names else _OTHER


class MetricsPage:
    """The text that a scrape gets.

    Statuses are read at most four times a second, however many ask. Where they
    cannot be read the page says so (`shapectl_status_up 0`) and has no
    interface on it: old values would look like a standstill.

    Args:
        warn: what an administrator must hear of.
    """

    def __init__(
        self,
        source: StatusSource,
        facts: Callable[[], AgentFacts],
        metrics: AgentMetrics,
        *,
        warn: Callable[[str], None] = lambda _: None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._warn = warn
        self._clock_s = clock_s
        self._reading = threading.Lock()
        self._read_at_s: float | None = None
        self._families: list[Family] = []
        self._texts: dict[bool, str] = {}
        self._facts = _FactsCollector(facts)
        self._registry = metrics.registry
        self._last_warning = ""
        self._registry.register(self._facts)
        self._process = ProcessCollector(registry=self._registry)

    def close(self) -> None:
        """Take this page's collectors out of the registry, so that another may be made."""
        self._registry.unregister(self._facts)
        self._registry.unregister(self._process)

    def render(self, accept: str = "") -> tuple[str, bytes]:
        """Return (content type, body) in the format that an Accept header asks for."""
        encoder, content_type = choose_encoder(accept)
        openmetrics = content_type.startswith("application/openmetrics-text")
        with self._reading:
            now_s = self._clock_s()
            if self._read_at_s is None or now_s - self._read_at_s >= _FRESH_S:
                self._read()
                self._read_at_s = self._clock_s()
            if openmetrics not in self._texts:
                self._texts[openmetrics] = render(self._families, openmetrics=openmetrics)
            text = self._texts[openmetrics]
        # the library's part last: in OpenMetrics it ends with "# EOF"
        return content_type, text.encode() + encoder(self._registry)

    @property
    def is_readable(self) -> bool:
        """Whether the interfaces could be read, or nobody has asked yet."""
        return self._facts.status_up is not False

    def _read(self) -> None:
        begin_s = time.perf_counter()
        self._texts.clear()
        try:
            self._families = interface_families(self._source.status())
            self._facts.status_up, problem = True, ""
        except Exception as error:  # whatever it is, the agent's own numbers must still be seen
            self._families = []
            known = isinstance(error, ShapeError)
            problem = str(error) if known else f"{type(error).__name__}: {error}"
            self._facts.status_up = False
        self._facts.status_seconds = time.perf_counter() - begin_s
        if problem and problem != self._last_warning:  # once, not at each scrape
            self._warn(f"metrics: the interfaces cannot be read: {problem}")
        self._last_warning = problem


class _FactsCollector(Collector):
    """The facts as families, made anew at each scrape."""

    def __init__(self, facts: Callable[[], AgentFacts]) -> None:
        self._facts = facts
        self.status_up: bool | None = None
        self.status_seconds = 0.0

    def describe(self) -> Iterable[Metric]:
        """Return nothing: else the registry would collect to learn the names."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Return what is so now."""
        facts = self._facts()
        build = InfoMetricFamily("shapectl_build", "What runs.")
        build.add_metric(
            (),
            {
                "version": facts.version,
                "python": platform.python_version(),
                "source_digest": facts.source_digest[:12],
            },
        )
        kernel = InfoMetricFamily("shapectl_kernel", "What it runs on.")
        kernel.add_metric((), {"release": facts.kernel_release})
        capacity = GaugeMetricFamily(
            "shapectl_whitelist_capacity_entries",
            "Entries that a whitelist can hold at most.",
            value=facts.whitelist_capacity_entries,
        )
        expiry = GaugeMetricFamily(
            "shapectl_certificate_expiry_timestamp_seconds",
            "When a certificate of the agent expires, in seconds since 1970.",
            labels=("certificate",),
        )
        for role, unix_s in sorted(facts.certificate_expiry_unix_s.items()):
            expiry.add_metric((role,), unix_s)
        status = GaugeMetricFamily(
            "shapectl_status_up",
            "1 where the interfaces could be read for this page, 0 where not.",
            value=self.status_up is True,
        )
        took = GaugeMetricFamily(
            "shapectl_status_read_seconds",
            "How long reading the interfaces took.",
            value=self.status_seconds,
        )
        return (build, kernel, capacity, expiry, status, took)
