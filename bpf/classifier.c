// SPDX-License-Identifier: GPL-2.0-only
/*
 * shapectl's classifier: one program per direction at clsact, and one per
 * direction that explains. Compiled by BCC from this file and its headers,
 * flattened into one text (BCC rewrites map calls only in the main file).
 *
 * Sizes of maps are given by user space (kernel/maps.py), which makes and
 * pins them; the ones here only have to satisfy the compiler.
 */
#include <uapi/linux/bpf.h>
#include <uapi/linux/pkt_cls.h>
#include <uapi/linux/if_ether.h>
#include <uapi/linux/in.h>
#include <uapi/linux/in6.h>
#include <uapi/linux/ip.h>
#include <uapi/linux/ipv6.h>
#include <uapi/linux/icmpv6.h>

#include "abi.h"
#include "codes.h"
#include "lib/packet.h"

BPF_TABLE("array", __u32, __u64, ctl, 1);
BPF_TABLE("array", __u32, struct shp_config, config, 1);
BPF_TABLE("array", __u32, struct shp_class, classes, 2 * SHP_MAX_CLASSES);
BPF_TABLE("array", __u32, struct shp_meter, meters, SHP_METER_SLOTS);
BPF_TABLE("array", __u32, struct shp_rule, rules, 2 * SHP_MAX_RULES);
BPF_TABLE("array", __u32, struct shp_port_rules, ports, 4 * 65536);
BPF_TABLE("array", __u32, __u32, fields, 4 * SHP_FIELD_SLOTS);
BPF_TABLE("array", __u32, struct shp_mark_rule, marks, 2 * SHP_MAX_MARKS);
BPF_TABLE("hash", struct shp_cgroup_key, struct shp_cgroup_rule, cgroups, 1);
BPF_TABLE("lru_hash", struct shp_flow4_key, struct shp_flow, flows4, 16);
BPF_TABLE("lru_hash", struct shp_flow6_key, struct shp_flow, flows6, 16);
BPF_TABLE("lru_hash", struct shp_flow4_key, struct shp_moved, moved4, 16);
BPF_TABLE("lru_hash", struct shp_flow6_key, struct shp_moved, moved6, 16);
BPF_TABLE("lru_hash", struct shp_frag_key, struct shp_flow, frags, 16);
BPF_TABLE("lru_hash", struct shp_source, struct shp_budget, budgets, 16);
BPF_TABLE("lru_hash", __u32, __u8, spared, 16);
BPF_TABLE("hash", struct shp_manual_key, struct shp_manual, manual, 1);
BPF_TABLE("array", __u32, struct shp_net_length, net_lengths,
	  4 * SHP_NET_LENGTHS);
BPF_TABLE("percpu_array", __u32, struct shp_count, counts, 2 * SHP_MAX_CLASSES);
BPF_TABLE("percpu_array", __u32, __u64, reasons, 2 * SHP_CODE_SLOTS);
BPF_TABLE("percpu_array", __u32, struct shp_inserts, inserts, 1);
BPF_TABLE("percpu_array", __u32, struct shp_scratch, scratch, 2);

/*
 * Begin anew after a pull, by a tail call: parsing in a loop of two would
 * cost every packet 10 ns and double what the verifier walks. The second
 * time nothing is left to pull, so there is no third.
 */
BPF_PROG_ARRAY(again, SHP_AGAIN_SLOTS);

/* Templates: the kernel checks a new inner map against them. */
BPF_F_TABLE("hash", struct shp_host4, struct shp_host, host4_inner, 1,
	    BPF_F_NO_PREALLOC);
BPF_F_TABLE("hash", struct shp_host6, struct shp_host, host6_inner, 1,
	    BPF_F_NO_PREALLOC);
BPF_F_TABLE("hash", struct shp_pair4, struct shp_listed, pair4_inner, 1,
	    BPF_F_NO_PREALLOC);
BPF_F_TABLE("hash", struct shp_pair6, struct shp_listed, pair6_inner, 1,
	    BPF_F_NO_PREALLOC);
BPF_F_TABLE("hash", struct shp_lpm4, struct shp_host, net4_inner, 1,
	    BPF_F_NO_PREALLOC);
BPF_F_TABLE("hash", struct shp_lpm6, struct shp_host, net6_inner, 1,
	    BPF_F_NO_PREALLOC);
BPF_F_TABLE("lpm_trie", struct shp_lpm4, struct shp_listed, lpm4_inner, 1,
	    BPF_F_NO_PREALLOC);
BPF_F_TABLE("lpm_trie", struct shp_lpm6, struct shp_listed, lpm6_inner, 1,
	    BPF_F_NO_PREALLOC);
BPF_ARRAY_OF_MAPS(hosts4, "host4_inner", 2);	/* slot: active */
BPF_ARRAY_OF_MAPS(hosts6, "host6_inner", 2);
BPF_ARRAY_OF_MAPS(pairs4, "pair4_inner", 2);
BPF_ARRAY_OF_MAPS(pairs6, "pair6_inner", 2);
BPF_ARRAY_OF_MAPS(nets4, "net4_inner", 2);
BPF_ARRAY_OF_MAPS(nets6, "net6_inner", 2);
BPF_ARRAY_OF_MAPS(lpm4, "lpm4_inner", 4);	/* slot: 2 * end + active */
BPF_ARRAY_OF_MAPS(lpm6, "lpm6_inner", 4);

#include "lib/parse.h"
#include "lib/rules.h"
#include "lib/whitelist.h"
#include "lib/flow.h"
#include "lib/classify.h"
#include "lib/meter.h"
#include "lib/pace.h"
#include "lib/budget.h"
#include "lib/act.h"
#include "lib/count.h"

/*
 * This CPU's scratch slot, with control word and clock: slot 0 for packets,
 * 1 for explain, which live traffic may interrupt. The parsed packet lies in
 * a map and not on the stack so that the verifier forgets which path parsed
 * it: 550,000 verified instructions became 15,000.
 */
static __always_inline struct shp_packet *packet_begin(__u32 slot)
{
	struct shp_packet *pkt = (struct shp_packet *)scratch.lookup(&slot);
	__u32 zero = 0;
	__u64 *word = ctl.lookup(&zero);

	if (!pkt)
		return NULL;
	if (!word)
		return NULL;
	pkt->ctl_word = *word;
	pkt->now = bpf_jiffies64();
	return pkt;
}

static __always_inline struct shp_config *config_read(void)
{
	__u32 zero = 0;

	return config.lookup(&zero);
}

static __always_inline struct shp_class *class_at(__u32 dir, __u32 class)
{
	__u32 slot = dir * SHP_MAX_CLASSES + (class & (SHP_MAX_CLASSES - 1));

	return classes.lookup(&slot);
}

/* Profile edt: departure times for paced classes, a bucket for the others. */
static __always_inline int enforce_by_time(struct __sk_buff *skb,
					   struct shp_packet *pkt,
					   const struct shp_config *cfg,
					   const struct shp_class *c,
					   struct shp_meter *m, __u64 cost,
					   int expired, __u32 bytes)
{
	struct shp_meter *link = NULL;
	__u32 slot = SHP_METER_LINK;
	__u64 ce_ns = expired ? c->safe_ce_ns : c->live_ce_ns;
	__u64 drop_ns = expired ? c->safe_drop_ns : c->live_drop_ns;
	__u64 cost_ns = meter_cost_ns(cost, bytes);
	__u64 now, from;
	int counted = 1;

	if (cfg->link_cost)
		link = meters.lookup(&slot);
	else if (!cost && !m->tat_ns)
		return METER_PASS;	/* no ceiling, and never had one */
	now = bpf_ktime_get_ns();
	pace_distrust(skb, now);
	from = now;
	if (link && link->tat_ns > now)
		from = link->tat_ns;
	pkt->metered = METER_PASS;
	if (c->flags & SHP_C_PACE && cost) {
		pkt->metered = pace_queue(skb, pkt, &m->tat_ns, now, from,
					  cost_ns, ce_ns, drop_ns);
	} else {
		if (c->flags & SHP_C_PACE)	/* no ceiling any more */
			pace_stamp(skb, m->tat_ns, now);
		else if (c->flags & (expired ? SHP_C_METER_SAFE : SHP_C_METER_LIVE))
			pkt->metered = meter_ceiling(&m->tat_ns, now, cost_ns,
						     ce_ns, drop_ns);
		if (link)
			counted = pace_counts(link, cfg, now, bytes);
	}
	packet_forget();
	if (link && counted && pkt->metered != METER_DROP)
		pace_take(&link->tat_ns, now, meter_cost_ns(cfg->link_cost, bytes));
	return pkt->metered;
}

/* The ceiling in force: live under a lease or without one, else safe. */
static __always_inline int enforce_ceiling(struct __sk_buff *skb,
					   struct shp_packet *pkt,
					   const struct shp_config *cfg,
					   const struct shp_class *c, __u32 dir,
					   __u32 class, int expired, __u32 bytes)
{
	__u32 slot = dir * SHP_MAX_CLASSES + (class & (SHP_MAX_CLASSES - 1));
	__u8 wanted = expired ? SHP_C_METER_SAFE : SHP_C_METER_LIVE;
	__u64 cost = expired ? c->safe_cost : c->live_cost;
	struct shp_meter *m;

	if (dir == SHP_EGRESS)
		wanted |= SHP_C_PACE | SHP_C_LINK;
	if (!(c->flags & wanted))
		return METER_PASS;
	m = meters.lookup(&slot);
	if (!m)
		return METER_PASS;
	if (dir == SHP_EGRESS && c->flags & (SHP_C_PACE | SHP_C_LINK)) {
		return enforce_by_time(skb, pkt, cfg, c, m, cost, expired,
				       bytes);
	}
	return meter_ceiling(&m->tat_ns, bpf_ktime_get_ns(),
			     meter_cost_ns(cost, bytes),
			     expired ? c->safe_ce_ns : c->live_ce_ns,
			     expired ? c->safe_drop_ns : c->live_drop_ns);
}

static __always_inline __u32 priority_of(const struct shp_class *c, int expired)
{
	if (expired && (c->flags & SHP_C_TWIN_SAFE))
		return c->safe_priority;
	return c->live_priority;
}

static __always_inline int lease_is_over(const struct shp_class *c, __u64 now)
{
	return c->deadline_jiffies && now >= c->deadline_jiffies;
}

/*
 * To the IFB only under a fresh lease and with a link-layer header. We say so
 * in cb[0], and our second filter redirects by mirred: on 6.1 bpf_redirect()
 * leaves skb->redirected unset, and an IFB drops every such packet (seen here;
 * on 6.12 none).
 */
static __always_inline int ifb_is_fresh(const struct shp_config *cfg, __u64 now)
{
	return cfg->ingress_mode == SHP_INGRESS_IFB && !cfg->l3_device &&
	       now < cfg->ifb_lease_jiffies;
}

static __always_inline void write_packet(struct __sk_buff *skb,
					 struct shp_packet *pkt,
					 const struct shp_config *cfg,
					 const struct shp_class *c, __u32 dir,
					 __u32 priority, int is_ip)
{
	if (dir == SHP_INGRESS) {
		act_mark(skb, cfg->ingress_mark_mask, c->mark);
		return;
	}
	if (cfg->write_priority)
		skb->priority = priority;
	act_mark(skb, cfg->egress_mark_mask, c->mark);
	if (is_ip)
		act_dscp(skb, pkt, c->dscp);
}

static __always_inline int shape(struct __sk_buff *skb, __u32 dir)
{
	struct shp_config *cfg;
	struct shp_packet *pkt;
	struct shp_verdict *v;
	struct shp_class *c;
	int note, expired, shadow, metered = METER_PASS;
	int to_ifb = 0;
	__u32 bytes;

	cfg = config_read();
	if (!cfg)
		return TC_ACT_UNSPEC;
	pkt = packet_begin(0);
	if (!pkt)
		return TC_ACT_UNSPEC;
	v = &pkt->verdict;
	pkt->parsed = parse_linear(skb, pkt, cfg->l3_device, dir);
	packet_forget();
	if (parse_needs_pull(skb, pkt) && !parse_pull(skb))
		again.call(skb, SHP_AGAIN_EGRESS + dir);
	note = classify_packet(skb, pkt, cfg, dir, v);
	packet_forget();
	if (note)
		count_code(dir, note);
	if (pkt->encap_note)
		count_code(dir, pkt->encap_note);
	bytes = count_wire_bytes(skb, pkt, dir);

	c = class_at(dir, v->class);
	if (!c)
		return TC_ACT_UNSPEC;
	if (v->code == SHP_V_MOVED) {
		budget_renew(pkt, cfg, dir, bytes, v);
	} else if (c->budget_cost) {
		note = budget_apply(skb, pkt, cfg, c, dir, bytes, v);
		if (note)
			count_code(dir, note);
		packet_forget();
		c = class_at(dir, v->class);
		if (!c)
			return TC_ACT_UNSPEC;
	}

	if (pkt->first_frag)	/* after the budget: all fragments together */
		flow_learn_frag(pkt, cfg, dir, v);

	shadow = packet_ctl(pkt) & SHP_F_SHADOW;
	expired = lease_is_over(c, pkt->now);
	if (expired)
		count_code(dir, SHP_N_LEASE);
	if (dir == SHP_INGRESS && cfg->ingress_mode == SHP_INGRESS_IFB) {
		to_ifb = ifb_is_fresh(cfg, pkt->now);
		skb->cb[0] = 0;
		if (!to_ifb)
			count_code(dir, SHP_N_IFB_STALE);
	}
	/* the IFB's tree holds the live ceiling, not the safe one */
	if (!to_ifb || expired)
		metered = enforce_ceiling(skb, pkt, cfg, c, dir, v->class,
					  expired, bytes);
	if (metered == METER_CE && !(pkt->traffic_class & 3))
		metered = METER_PASS;	/* not ECN-capable: no mark to count */
	if (metered == METER_CE && !shadow)
		bpf_skb_ecn_set_ce(skb);
	count_code(dir, v->code);
	if (metered == METER_CE)
		count_code(dir, SHP_N_CE);
	count_packet(skb, pkt, cfg, dir, v->class, bytes, metered);
	if (metered == METER_DROP) {
		count_code(dir, SHP_D_CEILING);
		return shadow ? TC_ACT_UNSPEC : TC_ACT_SHOT;
	}
	if (shadow)
		return TC_ACT_UNSPEC;
	write_packet(skb, pkt, cfg, c, dir, priority_of(c, expired), !pkt->parsed);
	if (to_ifb) {
		skb->priority = priority_of(c, expired);
		skb->cb[0] = SHP_TO_IFB;
	}
	return TC_ACT_UNSPEC;
}

/*
 * Answer for one packet and leave everything as it was. The answer lies in
 * cb: class, code, rule or prefix length, priority, and mark after writing.
 */
static __always_inline int explain(struct __sk_buff *skb, __u32 dir)
{
	struct shp_config *cfg;
	struct shp_packet *pkt;
	struct shp_verdict *v;
	struct shp_class *c;
	__u32 mask;

	cfg = config_read();
	if (!cfg)
		return TC_ACT_UNSPEC;
	pkt = packet_begin(1);
	if (!pkt)
		return TC_ACT_UNSPEC;
	v = &pkt->verdict;
	/*
	 * The same steps as in shape(): one function for both cost every packet
	 * 2 ns. A test run hands over a link-layer header, whatever the device.
	 */
	pkt->parsed = parse_linear(skb, pkt, 0, dir);
	packet_forget();
	if (parse_needs_pull(skb, pkt) && !parse_pull(skb))
		again.call(skb, SHP_AGAIN_EXPLAIN_OUT + dir);
	pkt->explaining = 1;
	classify_packet(skb, pkt, cfg, dir, v);
	packet_forget();
	c = class_at(dir, v->class);
	if (!c)
		return TC_ACT_UNSPEC;
	mask = dir == SHP_EGRESS ? cfg->egress_mark_mask :
				   cfg->ingress_mark_mask;
	skb->cb[0] = v->class;
	skb->cb[1] = v->code | (__u32)pkt->encap_note << 8;
	skb->cb[2] = v->ref;
	skb->cb[3] = priority_of(c, lease_is_over(c, pkt->now));
	skb->cb[4] = (skb->mark & ~mask) | (c->mark & mask);
	return v->code;
}

int shp_egress(struct __sk_buff *skb)
{
	return shape(skb, SHP_EGRESS);
}

int shp_ingress(struct __sk_buff *skb)
{
	return shape(skb, SHP_INGRESS);
}

int shp_explain_out(struct __sk_buff *skb)
{
	return explain(skb, SHP_EGRESS);
}

int shp_explain_in(struct __sk_buff *skb)
{
	return explain(skb, SHP_INGRESS);
}
