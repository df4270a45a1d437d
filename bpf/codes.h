/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/*
 * Why a packet got its class, and what else was noticed about it.
 *
 * Every code is one metric label (model/codes.py holds the names; a test
 * compares both). Codes lie outside the TC_ACT_* range, so that a code which
 * leaks into a return value is seen at once. A code is never renumbered and
 * never used again for something else.
 */
#ifndef SHP_CODES_H
#define SHP_CODES_H

#define SHP_CODE_FIRST 16

/* Decisions that the flow cache can hold: 16..31, stored as code - 16. */
#define SHP_V_DEFAULT 16	/* nothing matched */
#define SHP_V_CONTROL 17	/* network or host control, always protected */
#define SHP_V_MARK 18		/* rule on the socket mark */
#define SHP_V_CGROUP 19		/* rule on a cgroup v2 path or its ancestor */
#define SHP_V_DSCP 20		/* rule on the DSCP */
#define SHP_V_PORT 21		/* rule on ports */
#define SHP_V_PROTO 22		/* rule on the IP protocol */
#define SHP_V_PAIR 23		/* whitelist: pair of exact addresses */
#define SHP_V_HOST 24		/* whitelist: exact address */
#define SHP_V_PREFIX 25		/* whitelist: prefix */
#define SHP_V_MANUAL 26		/* the map that bpftool fills */
#define SHP_V_MOVED 27		/* flow moved: it was over its budget */

/* Decisions that are not cached. */
#define SHP_V_FRAGMENT 32	/* later fragment, follows the first */
#define SHP_V_FRAG_UNSEEN 33	/* later fragment, first not seen: default */
#define SHP_V_NOT_IP 34		/* no IP and no known control protocol */
#define SHP_V_MALFORMED 35	/* header fields that contradict each other */
#define SHP_V_TRUNCATED 36	/* header ends before it should */
#define SHP_V_VLAN_DEPTH 37	/* more than two VLAN tags */
#define SHP_V_EXT_DEPTH 38	/* more than six IPv6 extension headers */
#define SHP_V_OVERFLOW 39	/* datagram over the budget of its class */

/* Notes: counted beside the decision. */
#define SHP_N_MOVE 48		/* a flow was moved to the overflow class */
#define SHP_N_CE 49		/* CE mark at a ceiling */
#define SHP_D_CEILING 50	/* drop at a ceiling */
#define SHP_N_LEASE 51		/* the lease is over, safe ceiling in force */
#define SHP_N_INSERT_LIMIT 52	/* flow not cached: too many new flows */
#define SHP_N_INSERT_FAIL 53	/* flow not cached: the map refused it */
#define SHP_N_IFB_STALE 54	/* IFB lease over: policed, not redirected */
#define SHP_N_ENCAP_VXLAN 55	/* outer header only: VXLAN */
#define SHP_N_ENCAP_GENEVE 56	/* outer header only: Geneve */
#define SHP_N_ENCAP_PPPOE 57	/* PPPoE session, not looked into */
#define SHP_N_ENCAP_MPLS 58	/* MPLS, not looked into */
#define SHP_N_ENCAP_IP 59	/* IPIP, 6in4, GRE: outer header only */

#define SHP_CODE_SLOTS 64	/* one past the last code, a power of two */

#endif
