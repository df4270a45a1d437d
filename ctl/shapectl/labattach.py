# SPDX-License-Identifier: Apache-2.0
"""Attaches shapectl inside a lab's namespace, for `demo` and `bench`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shapeagent.model.errors import ShapeError
from shapeagent.model.reports import AttachRequest
from shapectl.session import missing_package


class LabAttach:
    """Attaches as `shapectl attach` does, with the built-in policy whatever /etc holds."""

    def __init__(self, folder: Path, progress: Callable[[str], None]) -> None:
        self._policy_path = folder / "policy.toml"
        self._progress = progress

    @contextmanager
    def __call__(
        self,
        netns: str,
        device: str,
        link_rate_bits_per_s: int,
        *,
        profile: str | None = None,
        ingress: str = "count",
        hook: str | None = None,
        policy_text: str | None = None,
    ) -> Iterator[int]:
        """Give the ceiling of bulk in wire bits per second; detaches at the end.

        Args: policy_text: another policy; without a class `bulk` the ceiling given is the link's.
        """
        try:
            from shapeagent.service.engine import Engine
        except ModuleNotFoundError as error:
            raise missing_package(error) from error
        from shapeagent.lab.topology import private_dirs
        from shapeagent.service import documents

        documents.write_document(
            self._policy_path,
            documents.example_policy_text() if policy_text is None else policy_text,
        )
        # folders of the lab's own: its clean-up removes them even after kill -9
        places = private_dirs(netns)
        engine = Engine(
            netns=netns,
            progress=self._progress,
            run_dir=places.run_dir,
            bpffs_dir=places.bpffs_dir,
        )
        request = AttachRequest(
            device=device,
            policy_path=str(self._policy_path),
            link_rate_bits_per_s=link_rate_bits_per_s,
            profile=profile,
            ingress=ingress,
            hook=hook,
        )
        attached = False
        try:
            report = engine.attach(request)
            attached = True
            ceilings = {row.name: row.ceiling_bits_per_s for row in report.plan.classes}
            yield ceilings.get("bulk", link_rate_bits_per_s)
        finally:
            try:
                engine.detach(device)
            except ShapeError:
                if attached:  # else what attach raised says more
                    raise
