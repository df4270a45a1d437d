# SPDX-License-Identifier: Apache-2.0
"""Who else stands on the ingress hook of a device: an IFB takes the packets from them."""

from __future__ import annotations

from collections.abc import Collection

from shapeagent.kernel import bpf, filters, nftables
from shapeagent.kernel import netns as namespaces
from shapeagent.kernel.rtnl import Rtnl
from shapeagent.model.errors import ConflictError
from shapeagent.model.types import Direction


def refuse_shared_hook(
    rtnl: Rtnl, netns: str | None, index: int, device: str, our_program_ids: Collection[int] = ()
) -> None:
    """Return when an IFB of ours would share the ingress hook with nobody.

    Raises: ConflictError ifb-hook-shared.
    """
    sharers = list_ingress_sharers(rtnl, netns, index, device, our_program_ids)
    if sharers:
        raise ConflictError(
            "ifb-hook-shared",
            f"Others use the ingress hook of {device}, and an IFB would take the packets from "
            f"them: {', '.join(sharers)}.",
            hint=f"shapectl attach {device} --ingress police",
        )


def list_ingress_sharers(
    rtnl: Rtnl, netns: str | None, index: int, device: str, our_program_ids: Collection[int] = ()
) -> tuple[str, ...]:
    """Return the filters, tcx programs and nftables chains of others on the ingress hook.

    A packet that comes back from an IFB passes none of them (skb_skip_tc_classify
    in __netif_receive_skb_core, net/core/dev.c).
    """
    found = [
        f"filter {info}"
        for info in filters.list_filters(rtnl, index, Direction.INGRESS)
        if not ((info.in_our_slot or info.in_redirect_slot) and info.program_id in our_program_ids)
    ]

    def ask() -> list[str]:
        programs = [f"tcx program {one}" for one in bpf.query_tcx(index, bpf.TCX_INGRESS)]
        return programs + list(nftables.list_ingress_users(device))

    return (*found, *namespaces.run_in_netns(netns, ask))
