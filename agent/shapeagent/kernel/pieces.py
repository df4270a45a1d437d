# SPDX-License-Identifier: Apache-2.0
"""Whether the kernel has the pieces that an attach adds to a device, before anything is added."""

from __future__ import annotations

import os

from shapeagent.kernel import filters, link
from shapeagent.kernel.netns import run_in_new_netns
from shapeagent.kernel.probe import LOOPBACK_INDEX
from shapeagent.kernel.rtnl import Rtnl
from shapeagent.model.errors import UnsupportedError
from shapeagent.model.types import Direction


def require_pieces(*, ifb: bool) -> None:
    """Return when the kernel takes clsact, a bpf filter and, if asked, an IFB with its redirect.

    Each is made in a private namespace that ends with the call; the kernel may load a module.

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

    run_in_new_netns(build)


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
