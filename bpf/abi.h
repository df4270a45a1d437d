/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/*
 * What the kernel program and user space share. kernel/abi.py mirrors it with
 * ctypes; `make check` compares each size and offset by clang's record
 * layouts and `make test` by the BTF of the loaded program.
 *
 * Local and remote are the two ends as this host sees them: on egress the
 * source is local, on ingress the destination is. Addresses and ports are in
 * wire order (_be); everything else is in host order.
 */
#ifndef SHP_ABI_H
#define SHP_ABI_H

/* Of the maps' layout: one more with each change that an older writer would break. */
#define SHP_ABI_VERSION 2

/* Slots of the map again: programs that begin anew after a pull. */
#define SHP_AGAIN_EGRESS 0
#define SHP_AGAIN_INGRESS 1
#define SHP_AGAIN_EXPLAIN_OUT 2
#define SHP_AGAIN_EXPLAIN_IN 3
#define SHP_AGAIN_SLOTS 4

#define SHP_EGRESS 0
#define SHP_INGRESS 1

#define SHP_MAX_CLASSES 16
#define SHP_MAX_RULES 4096	/* 12 bits of a flow word; rule 0 = no rule */
#define SHP_MAX_MARKS 8		/* mark rules, walked one by one */
#define SHP_FIELD_SLOTS 512	/* 0..255 IP protocol, 256..319 DSCP */
#define SHP_FIELD_DSCP 256
#define SHP_NET_LENGTHS 4	/* prefix lengths of a family that hashes take */
#define SHP_NO_LENGTH 255	/* in shp_net_length: none from here on */
#define SHP_NO_CLASS 255	/* in shp_host: not listed in this role */
#define SHP_NO_DSCP 255		/* in shp_class: DSCP is not rewritten */

/*
 * The control word (map ctl, slot 0) and the flow word share their upper
 * half, so that one XOR tells whether a cached decision is current:
 *
 *	 63     44 43       30 29       20 19          0
 *	+---------+-----------+-----------+-------------+
 *	|  epoch  | lists     | rules     | flags       |  control word
 *	+---------+-----------+-----------+-------------+
 *	|  epoch  | lists     | rules     | ref|how|cls |  flow word: 12 + 4 + 4
 *	+---------+-----------+-----------+-------------+
 *
 * Rules and lists have generations of their own, so that a changed whitelist
 * never asks the rules again about a running flow; the epoch changes with
 * each single exact host or pair. An update is one aligned u64.
 */
#define SHP_DECISION_BITS 20		/* the lower part, which differs */
#define SHP_RULES_SHIFT 20
#define SHP_RULES_BITS 10
#define SHP_LISTS_SHIFT 30
#define SHP_LISTS_BITS 14
#define SHP_EPOCH_SHIFT 44
#define SHP_EPOCH_BITS 20

#define SHP_F_ACTIVE (1 << 0)		/* which half of the lists is in force */
#define SHP_F_SHADOW (1 << 1)		/* classify and count, change nothing */
#define SHP_F_PAIR4 (1 << 2)
#define SHP_F_PAIR6 (1 << 3)
#define SHP_F_HOST4_LOCAL (1 << 4)	/* a list has entries of this kind */
#define SHP_F_HOST4_REMOTE (1 << 5)
#define SHP_F_HOST6_LOCAL (1 << 6)
#define SHP_F_HOST6_REMOTE (1 << 7)
#define SHP_F_LPM4_LOCAL (1 << 8)
#define SHP_F_LPM4_REMOTE (1 << 9)
#define SHP_F_LPM6_LOCAL (1 << 10)
#define SHP_F_LPM6_REMOTE (1 << 11)
#define SHP_F_RULE_MARK (1 << 12)
#define SHP_F_RULE_CGROUP (1 << 13)
#define SHP_F_RULE_DSCP (1 << 14)
#define SHP_F_DGRAM_LOOK (1 << 15)	/* datagrams are not cached */
#define SHP_F_ACTIVE_RULES_SHIFT 16	/* which half of the rules is in force */
#define SHP_F_NET4 (1 << 17)		/* prefixes lie in nets4, not in lpm4 */
#define SHP_F_NET6 (1 << 18)

struct shp_flow4_key {			/* maps flows4, moved4 */
	__u32 local_be;
	__u32 remote_be;
	__u16 local_port_be;
	__u16 remote_port_be;
	__u8 protocol;
	__u8 direction;
	__u16 pad;
};

struct shp_flow6_key {			/* maps flows6, moved6 */
	__u32 local_be[4];
	__u32 remote_be[4];
	__u16 local_port_be;
	__u16 remote_port_be;
	__u8 protocol;
	__u8 direction;
	__u16 pad;
};

struct shp_flow {			/* maps flows4, flows6, frags */
	__u64 word;
	/*
	 * Of a whitelist entry, 0 = never; of a fragment's entry. Default and
	 * manual: when the manual map was last read.
	 */
	__u64 expires_jiffies;
};

struct shp_moved {			/* maps moved4, moved6 */
	__u64 until_jiffies;
	__u64 tat_ns;			/* the flow's own budget while it is away */
	__u32 class_id;			/* where it is at home */
	__u32 pad;
};

struct shp_frag_key {			/* map frags; IPv4 as ::ffff:a.b.c.d */
	__u32 local_be[4];
	__u32 remote_be[4];
	__u32 id_be;
	__u8 protocol;
	__u8 direction;
	__u16 pad;
};

#define SHP_SOURCE_LINK 1		/* all that is not IP, together */
#define SHP_SOURCE_ADDRESS 2
#define SHP_SOURCE_CGROUP 3

struct shp_source {			/* map budgets: who spends */
	__u32 id[4];			/* address or cgroup id */
	__u32 kind;
	__u32 class_id;
};

struct shp_budget {			/* map budgets: GCRA state */
	__u64 tat_ns;			/* theoretical arrival time */
};

struct shp_port_rules {			/* map ports: rule numbers, 0 = none */
	__u16 tcp_local;
	__u16 tcp_remote;
	__u16 udp_local;
	__u16 udp_remote;
};

struct shp_rule {			/* map rules; a lower number wins */
	__u8 class_id;
	__u8 code;			/* SHP_V_* */
	__u16 pad;
	__u32 pad2;
};

struct shp_mark_rule {			/* map marks */
	__u32 value;
	__u32 mask;			/* 0 = slot not used */
	__u32 rule;
	__u32 directions;		/* bit 0 egress, bit 1 ingress */
};

struct shp_cgroup_key {			/* map cgroups */
	__u64 id;
	__u32 active;
	__u32 pad;
};

struct shp_cgroup_rule {
	__u32 rule;
	__u32 directions;		/* bit 0 egress, bit 1 ingress */
};

struct shp_host4 { __u32 addr_be; };	/* inner maps of hosts4 */
struct shp_host6 { __u32 addr_be[4]; };	/* inner maps of hosts6 */
struct shp_pair4 {			/* inner maps of pairs4 */
	__u32 local_be;
	__u32 remote_be;
};
struct shp_pair6 {			/* inner maps of pairs6 */
	__u32 local_be[4];
	__u32 remote_be[4];
};
struct shp_lpm4 {			/* inner maps of lpm4 and nets4 */
	__u32 prefix_bits;
	__u32 addr_be;
};
struct shp_lpm6 {			/* inner maps of lpm6 and nets6 */
	__u32 prefix_bits;
	__u32 addr_be[4];
};

/*
 * One length in use (map net_lengths): IPv4 at active * 8, IPv6 at
 * active * 8 + 4, four slots each, the longest first.
 */
struct shp_net_length {
	__u32 prefix_bits;		/* SHP_NO_LENGTH = the end */
	__u32 mask_be[4];		/* IPv4: the first word */
};

struct shp_host {			/* value of hosts and nets */
	__u8 local_class;		/* SHP_NO_CLASS = not listed */
	__u8 remote_class;
	__u16 pad;
	__u32 pad2;
	__u64 local_expires_jiffies;	/* 0 = never */
	__u64 remote_expires_jiffies;
};

struct shp_listed {			/* value of pairs and tries */
	__u64 expires_jiffies;		/* 0 = never */
	__u32 class_id;
	__u32 prefix_bits;		/* of this entry; pairs: 0 */
};

struct shp_manual_key {			/* map manual, for bpftool */
	__u8 remote[16];		/* wire order; IPv4 as ::ffff:a.b.c.d */
};

struct shp_manual {
	__u32 class_id;			/* class number; unknown = ignored */
	__u32 pad;			/* zero */
	__u64 expires_boot_s;		/* CLOCK_BOOTTIME seconds, 0 = never */
};

#define SHP_INGRESS_COUNT 0
#define SHP_INGRESS_POLICE 1
#define SHP_INGRESS_IFB 2
#define SHP_TO_IFB 0x53484946	/* in cb[0]: our second filter redirects */

struct shp_config {			/* map config, slot 0 */
	__u64 tick_ns;			/* one jiffy */
	__u64 hold_jiffies;		/* how long a moved flow stays, at least */
	__u64 insert_window_jiffies;	/* window of the insert limit */
	__u64 ifb_lease_jiffies;	/* redirect while jiffies are below */
	__u64 link_cost;		/* edt holds the link rate; 0 = the device does */
	__u64 link_rest_cost;		/* of the link less the paced classes' guarantee */
	__u64 link_burst_ns;		/* what the others may be ahead of that */
	__u32 insert_limit;		/* new flows per CPU and window */
	__u32 segment_limit_bytes;	/* 0 = none */
	__u32 egress_mark_mask;		/* our bits of skb->mark, 0 = hands off */
	__u32 ingress_mark_mask;
	__u32 cgroup_levels;		/* bit n: a rule names a cgroup at level n */
	__u8 l3_device;			/* 1: no link-layer header */
	__u8 default_class;
	__u8 control_class;
	__u8 ingress_mode;
	__u8 write_priority;		/* 1: our qdisc reads skb->priority */
	__u8 class_count;		/* classes of the policy */
	__u8 pad[6];
};

#define SHP_C_METER_LIVE (1 << 0)	/* the live ceiling is metered here */
#define SHP_C_METER_SAFE (1 << 1)	/* past the lease: metered here */
#define SHP_C_TWIN_SAFE (1 << 2)	/* past the lease: twin leaf */
#define SHP_C_PACE (1 << 3)		/* by departure time; a cost of 0 = no ceiling */
#define SHP_C_LINK (1 << 4)		/* not paced, but moves the link's clock on */

/*
 * One class in one direction (map classes, slot direction * 16 + class).
 * Costs are nanoseconds per byte, shifted left by SHP_COST_SHIFT.
 */
#define SHP_COST_SHIFT 20

struct shp_class {
	__u64 live_cost;
	__u64 live_ce_ns;		/* queue that is marked CE */
	__u64 live_drop_ns;		/* queue that is dropped */
	__u64 safe_cost;
	__u64 safe_ce_ns;
	__u64 safe_drop_ns;
	__u64 deadline_jiffies;		/* of the lease; 0 = no lease */
	__u64 budget_cost;		/* per source; 0 = no budget */
	__u64 budget_burst_ns;
	__u32 live_priority;		/* skb->priority */
	__u32 safe_priority;		/* of the twin leaf */
	__u32 mark;
	__u8 flags;			/* SHP_C_* */
	__u8 dscp;			/* SHP_NO_DSCP = leave */
	__u8 overflow_class;		/* of a source over its budget */
	__u8 pad;
};

/* Slots of the map meters: as in classes, and one for the link. */
#define SHP_METER_LINK 32
#define SHP_METER_SLOTS 33

struct shp_meter {
	__u64 tat_ns;			/* edt: the next departure */
	__u64 rest_tat_ns;		/* link: what is not paced, by link_rest_cost */
	__u64 pad[6];			/* a cache line of its own */
};

struct shp_count {			/* map counts, per CPU, slot as above */
	__u64 packets;
	__u64 wire_bytes;		/* with 24 B per frame of preamble, FCS, gap */
	__u64 drops;
	__u64 drop_wire_bytes;
	__u64 ce_marks;
	__u64 no_socket;
	__u64 over_segment;
	__u64 pad;
};

struct shp_inserts {			/* map inserts, per CPU */
	__u64 window_jiffies;
	__u64 inserted;
};

struct shp_scratch {			/* map scratch, per CPU */
	__u64 words[32];		/* room for the program's struct shp_packet */
};

#define SHP_WIRE_OVERHEAD 24		/* preamble 8, FCS 4, gap 12 (IEEE 802.3) */

#endif
