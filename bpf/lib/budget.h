/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * A fast class is no free ride: each source may send so much in it. On
 * ingress a source is the remote address (IPv6: its /64), on egress the
 * cgroup of the socket, else the local address: a key of ports would give a
 * sender one budget per port. A TCP flow over the budget moves to the
 * overflow class once and stays there until it has kept to the budget for the
 * hold time; everything else overflows packet by packet. Nothing is dropped.
 */
#ifndef SHP_BUDGET_H
#define SHP_BUDGET_H

static __always_inline void budget_of_address(struct shp_packet *pkt, __u32 dir,
					      struct shp_source *source)
{
	source->kind = SHP_SOURCE_ADDRESS;
	if (!pkt->is_v6) {
		source->id[3] = dir == SHP_INGRESS ? pkt->v4.remote_be :
						     pkt->v4.local_be;
	} else if (dir == SHP_INGRESS) {
		/* a remote host has its whole /64 to send from (RFC 4291) */
		source->id[0] = pkt->v6.remote_be[0];
		source->id[1] = pkt->v6.remote_be[1];
	} else {
		__builtin_memcpy(source->id, pkt->v6.local_be, 16);
	}
}

static __always_inline void budget_source(struct __sk_buff *skb,
					  struct shp_packet *pkt,
					  __u32 dir, __u32 class,
					  struct shp_source *source)
{
	__u64 cgroup;

	__builtin_memset(source, 0, sizeof(*source));
	source->class_id = class;
	if (pkt->parsed) {
		source->kind = SHP_SOURCE_LINK;
		return;
	}
	cgroup = dir == SHP_EGRESS ? bpf_skb_cgroup_id(skb) : 0;
	if (cgroup > 1) {		/* 0 no socket, 1 the root cgroup */
		source->kind = SHP_SOURCE_CGROUP;
		source->id[0] = cgroup;
		source->id[1] = cgroup >> 32;
		return;
	}
	budget_of_address(pkt, dir, source);
}

/* Jiffies, not ktime: 30 ns cheaper, and a budget's burst spans ticks. */
static __always_inline int budget_spend(struct shp_packet *pkt,
					const struct shp_config *cfg,
					const struct shp_class *c, __u64 *tat_ns,
					__u32 bytes)
{
	return meter_spend(tat_ns, pkt->now * cfg->tick_ns,
			   meter_cost_ns(c->budget_cost, bytes),
			   c->budget_burst_ns);
}

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
	return !budget || budget_spend(pkt, cfg, c, &budget->tat_ns, bytes);
}

/* Remember that the flow left class `home`, in the cache too. */
static __always_inline void budget_move(struct shp_packet *pkt,
					const struct shp_config *cfg, __u32 home,
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

/*
 * A moved flow keeps being measured, by a bucket of its own so that it spends
 * nothing of its neighbours' any more; each excess renews its hold.
 */
static __always_inline void budget_renew(struct shp_packet *pkt,
					 const struct shp_config *cfg, __u32 dir,
					 __u32 bytes, const struct shp_verdict *v)
{
	__u32 slot = dir * SHP_MAX_CLASSES + (v->ref & (SHP_MAX_CLASSES - 1));
	struct shp_class *home = classes.lookup(&slot);
	struct shp_moved *moved;

	if (!home || !home->budget_cost)
		return;
	moved = flow_find_moved(pkt);
	if (moved && !budget_spend(pkt, cfg, home, &moved->tat_ns, bytes))
		moved->until_jiffies = pkt->now + cfg->hold_jiffies;
}

/*
 * Charge the packet to its source; move or overflow what is over. Control is
 * charged too: its protocols and ports are open to any sender. Changes *v and
 * returns a note code or 0.
 */
static __always_inline int budget_apply(struct __sk_buff *skb,
					struct shp_packet *pkt,
					const struct shp_config *cfg,
					const struct shp_class *c, __u32 dir,
					__u32 bytes, struct shp_verdict *v)
{
	__u32 home = v->class;

	if (budget_conforms(skb, pkt, cfg, c, home, dir, bytes))
		return 0;
	v->class = c->overflow_class & (SHP_MAX_CLASSES - 1);
	if (pkt->protocol != IPPROTO_TCP || pkt->parsed || pkt->later_frag) {
		v->code = SHP_V_OVERFLOW;
		return 0;
	}
	v->code = SHP_V_MOVED;
	v->ref = home;
	budget_move(pkt, cfg, home, v);
	return SHP_N_MOVE;
}

#endif
