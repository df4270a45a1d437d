# SPDX-License-Identifier: Apache-2.0
"""Whether the kernel has the pieces that an attach adds to a device, before anything is added."""

from __future__ import annotations

import os
from pathlib import Path

from shapeagent.kernel import filters, link, prepared
from shapeagent.kernel.netns import run_in_new_netns
from shapeagent.kernel.probe import LOOPBACK_INDEX
from shapeagent.kernel.rtnl import Rtnl
from shapeagent.model.errors import PrivilegeError, UnsupportedError
from shapeagent.model.types import Direction


def require_pieces(*, ifb: bool, kept: Path | None = None) -> None:
    """Return when the kernel takes clsact, a bpf filter and, if asked, an IFB with its redirect.

    Each is made in a private namespace that ends with the call; the kernel may load a module.

    Args:
        kept: as of `probe.read_kernel_facts`; a process that relies on it learns of a missing
            IFB or redirect only when it adds one.
    Raises: UnsupportedError clsact-missing, cls-bpf-missing, ifb-missing,
        mirred-missing, each with the module's name (F38).
    """

    def build() -> None:
        with Rtnl() as rtnl:
            filters.ensure_clsact(rtnl, LOOPBACK_INDEX)
            descriptor = filters.load_redirect()
            try:
                _add_filter(rtnl, descriptor)
                if ifb:
                    index = link.create_ifb(rtnl, "probe").index
                    filters.add_redirect(rtnl, LOOPBACK_INDEX, index, descriptor)
            finally:
                os.close(descriptor)

    try:
        run_in_new_netns(build)
    except PrivilegeError:
        found = prepared.read(kept) if kept is not None else None
        if found is None:
            raise
        if "clsact" not in found.qdiscs:
            raise UnsupportedError(
                "clsact-missing", "The kernel has no clsact.", hint="modprobe sch_ingress"
            ) from None


def _add_filter(rtnl: Rtnl, descriptor: int) -> None:
    try:
        filters.add_filter(
            rtnl, LOOPBACK_INDEX, Direction.EGRESS, descriptor, filters.REDIRECT_NAME
        )
    except UnsupportedError as error:
        raise UnsupportedError(
            "cls-bpf-missing",
            f"The kernel has no bpf classifier for tc: {error.message}",
            hint="Load the module: modprobe cls_bpf",
        ) from error
