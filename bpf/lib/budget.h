/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * A fast class is no free ride: each source may send so much in it. On
 * ingress a source is the remote address, on egress the cgroup of the
 * socket, else the flow. A TCP flow over the budget moves to the overflow
 * class once and stays there until it has kept to the budget for the hold
 * time; datagrams overflow one by one. Nothing is dropped.
 */
#ifndef SHP_BUDGET_H
#define SHP_BUDGET_H

static __always_inline void budget_of_flow(struct shp_packet *pkt,
					   struct shp_source *source)
{
	source->kind = SHP_SOURCE_FLOW;
	if (!pkt->is_v6) {
		__builtin_memcpy(source->id, &pkt->v4, 16);
		return;
	}
	/* 40 bytes into 16: flows that collide share a budget */
	source->id[0] = pkt->v6.local_be[0] ^ pkt->v6.remote_be[2];
	source->id[1] = pkt->v6.local_be[1] ^ pkt->v6.remote_be[3];
	source->id[2] = pkt->v6.local_be[2] ^ pkt->v6.remote_be[0] ^
			((__u32)pkt->v6.local_port_be << 16 |
			 pkt->v6.remote_port_be);
	source->id[3] = pkt->v6.local_be[3] ^ pkt->v6.remote_be[1];
}

static __always_inline void budget_source(struct __sk_buff *skb,
					  struct shp_packet *pkt,
					  __u32 dir, __u32 class,
					  struct shp_source *source)
{
	__u64 cgroup;

	__builtin_memset(source, 0, sizeof(*source));
	source->class_id = class;
	if (dir == SHP_INGRESS) {
		source->kind = SHP_SOURCE_ADDRESS;
		if (pkt->is_v6)
			__builtin_memcpy(source->id, pkt->v6.remote_be, 16);
		else
			source->id[3] = pkt->v4.remote_be;
		return;
	}
	cgroup = bpf_skb_cgroup_id(skb);
	if (cgroup > 1) {		/* 0 no socket, 1 the root cgroup */
		source->kind = SHP_SOURCE_CGROUP;
		source->id[0] = cgroup;
		source->id[1] = cgroup >> 32;
		return;
	}
	budget_of_flow(pkt, source);
}

/* Jiffies, not ktime: 30 ns cheaper, and a budget's burst spans ticks. */
static __always_inline int budget_conforms(struct __sk_buff *skb,
					   struct shp_packet *pkt,
					   const struct shp_config *cfg,
					   const struct shp_class *c, __u32 class,
					   __u32 dir, __u32 bytes)
{
	struct shp_budget none = {}, *budget;
	struct shp_source source;

	budget_source(skb, pkt, dir, class, &source);
	budget = budgets.lookup_or_try_init(&source, &none);
	if (!budget)
		return 1;
	return meter_spend(&budget->tat_ns, pkt->now * cfg->tick_ns,
			   meter_cost_ns(c->budget_cost, bytes),
			   c->budget_burst_ns);
}

/* Remember that the flow left class `home`, in the cache too. */
static __always_inline void budget_move(struct shp_packet *pkt,
					const struct shp_config *cfg,
					__u32 home,
					struct shp_verdict *v)
{
	struct shp_moved moved = {
		.until_jiffies = pkt->now + cfg->hold_jiffies,
		.class_id = home,
	};
	struct shp_flow *flow;

	if (flow_put_moved(pkt, &moved))
		return;
	flow = flow_find(pkt);
	if (flow)
		flow->word = flow_word(pkt, v);
}

/* Control is never held to a budget, and what was not parsed has no source. */
static __always_inline int budget_applies(const struct shp_packet *pkt,
					  const struct shp_class *c,
					  const struct shp_verdict *v)
{
	if (v->code == SHP_V_MOVED)
		return 1;
	return c->budget_cost && v->code != SHP_V_CONTROL && !pkt->parsed &&
	       !pkt->later_frag;
}

/*
 * Charge the packet to its source in its home class: the class that was
 * decided, or the one that a moved flow has left. What is over moves or
 * overflows; a moved flow keeps being measured, and each excess renews its
 * hold. Changes *v and returns a note code or 0.
 */
static __always_inline int budget_apply(struct __sk_buff *skb,
					struct shp_packet *pkt,
					const struct shp_config *cfg,
					__u32 dir,
					__u32 bytes, struct shp_verdict *v)
{
	__u32 was_moved = v->code == SHP_V_MOVED;
	__u32 home = (was_moved ? v->ref : v->class) & (SHP_MAX_CLASSES - 1);
	__u32 slot = dir * SHP_MAX_CLASSES + home;
	struct shp_class *c = classes.lookup(&slot);
	struct shp_moved *moved;

	if (!c || !c->budget_cost)
		return 0;
	if (budget_conforms(skb, pkt, cfg, c, home, dir, bytes))
		return 0;
	if (was_moved) {
		moved = flow_find_moved(pkt);
		if (moved)
			moved->until_jiffies = pkt->now + cfg->hold_jiffies;
		return 0;
	}
	v->class = c->overflow_class & (SHP_MAX_CLASSES - 1);
	if (pkt->protocol != IPPROTO_TCP) {
		v->code = SHP_V_OVERFLOW;
		return 0;
	}
	v->code = SHP_V_MOVED;
	v->ref = home;
	budget_move(pkt, cfg, home, v);
	return SHP_N_MOVE;
}

#endif
