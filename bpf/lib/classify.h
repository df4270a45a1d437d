/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * From a parsed packet to a class. The program that explains shares every
 * step but neither caches, counts nor spends (pkt->explaining).
 *
 * The cache says which questions are still open (pkt->ask), and each is
 * asked in one place and one order: rules, exact hosts and pairs, prefixes,
 * the manual map, the default class.
 */
#ifndef SHP_CLASSIFY_H
#define SHP_CLASSIFY_H

#define CLASSIFY_RULES (1 << 0)
#define CLASSIFY_EXACT (1 << 1)
#define CLASSIFY_PREFIX (1 << 2)
#define CLASSIFY_MANUAL (1 << 3)
#define CLASSIFY_KEEP (1 << 4)		/* no answer: what is cached stays */
#define CLASSIFY_LISTS (CLASSIFY_EXACT | CLASSIFY_PREFIX | CLASSIFY_MANUAL)
#define CLASSIFY_ALL (CLASSIFY_RULES | CLASSIFY_LISTS)

static __always_inline void classify_default(const struct shp_config *cfg,
					     struct shp_verdict *v)
{
	whitelist_set(v, cfg->default_class, SHP_V_DEFAULT, 0, 0);
}

/* Control, mark, cgroup, DSCP, ports, protocol (design 4). */
static __always_inline int classify_by_rules(struct __sk_buff *skb,
					     struct shp_packet *pkt,
					     const struct shp_config *cfg,
					     __u32 dir, struct shp_verdict *v)
{
	__u32 found, slot;
	struct shp_rule *rule;

	if (rules_is_control(pkt))
		return whitelist_set(v, cfg->control_class, SHP_V_CONTROL, 0, 0);
	found = rules_find(skb, pkt, cfg, dir);
	if (found == RULES_NONE)
		return 0;
	slot = rules_half(pkt) * SHP_MAX_RULES + found;
	rule = rules.lookup(&slot);
	if (!rule)
		return 0;
	return whitelist_set(v, rule->class_id, rule->code, found, 0);
}

/* Ask what is open, first answer wins. */
static __always_inline void classify_ask(struct __sk_buff *skb,
					 struct shp_packet *pkt,
					 const struct shp_config *cfg,
					 __u32 dir, struct shp_verdict *v)
{
	if ((pkt->ask & CLASSIFY_RULES) &&
	    classify_by_rules(skb, pkt, cfg, dir, v))
		return;
	packet_forget();
	if ((pkt->ask & CLASSIFY_EXACT) && whitelist_exact(pkt, v))
		return;
	packet_forget();
	if ((pkt->ask & CLASSIFY_PREFIX) && whitelist_prefix(pkt, v))
		return;
	packet_forget();
	if ((pkt->ask & CLASSIFY_MANUAL) && whitelist_manual(pkt, cfg, v))
		return;
	packet_forget();
	if (!(pkt->ask & CLASSIFY_KEEP))
		classify_default(cfg, v);
}

/* Whether a generation in the upper half of two words differs. */
static __always_inline int classify_differs(__u64 stale, __u32 shift,
					    __u32 bits)
{
	return (stale >> shift & ((1ULL << bits) - 1)) != 0;
}

/*
 * What a cached decision leaves open; `stale` is the XOR of its word and the
 * control word. Nobody tells us when an operator fills the manual map, so it
 * is read again once per jiffy: a miss costs 24 ns, a jiffy is at most 10 ms.
 */
static __always_inline __u32 classify_open(struct shp_packet *pkt,
					   const struct shp_flow *flow,
					   __u32 code, __u64 stale)
{
	int epoch = classify_differs(stale, SHP_EPOCH_SHIFT, SHP_EPOCH_BITS);

	if (classify_differs(stale, SHP_RULES_SHIFT, SHP_RULES_BITS))
		return CLASSIFY_ALL;
	if (code < SHP_V_PAIR && code != SHP_V_DEFAULT)
		return 0;		/* lists do not touch what rules decide */
	if (classify_differs(stale, SHP_LISTS_SHIFT, SHP_LISTS_BITS))
		return CLASSIFY_LISTS;
	if (code == SHP_V_DEFAULT || code == SHP_V_MANUAL) {
		if (epoch)
			return CLASSIFY_EXACT | CLASSIFY_MANUAL;
		return flow->expires_jiffies == pkt->now ? 0 : CLASSIFY_MANUAL;
	}
	if (!whitelist_is_live(pkt, flow->expires_jiffies))
		return CLASSIFY_LISTS;
	if (!epoch)
		return 0;
	return code == SHP_V_PREFIX ? CLASSIFY_EXACT | CLASSIFY_KEEP :
				      CLASSIFY_LISTS;
}

/*
 * Make a stale entry current ahead of the answer, which is mostly the same:
 * then no second look-up is needed (24 ns). Until the answer is there, another
 * CPU may send a packet of this flow by the old decision. An entry with an
 * expiry is left, since word and expiry must change together.
 */
static __always_inline void classify_refresh(struct shp_packet *pkt,
					     struct shp_flow *flow,
					     const struct shp_verdict *v)
{
	int read_at = v->code == SHP_V_DEFAULT || v->code == SHP_V_MANUAL;

	if (flow->expires_jiffies && !read_at)
		return;
	pkt->cached_low = flow->word & ((1 << SHP_DECISION_BITS) - 1);
	flow->word = (packet_ctl(pkt) & ~((1ULL << SHP_DECISION_BITS) - 1)) |
		     pkt->cached_low;
	if (read_at)
		flow->expires_jiffies = pkt->now;
}

/* Take *v from the cache, with what is still to be asked in pkt->ask. */
static __always_inline void classify_cached(struct shp_packet *pkt,
					    struct shp_flow *flow,
					    struct shp_verdict *v)
{
	__u64 stale = (flow->word ^ packet_ctl(pkt)) >> SHP_DECISION_BITS
						     << SHP_DECISION_BITS;

	pkt->cached = 1;
	flow_unpack(flow->word, v);
	v->expires_jiffies = flow->expires_jiffies;
	pkt->ask = classify_open(pkt, flow, v->code, stale);
	if (stale && pkt->ask && !pkt->explaining)
		classify_refresh(pkt, flow, v);
}

/*
 * A flow that was moved stays moved until its hold is over. Returns 1 when
 * *v is the overflow class of the class in which the flow is at home.
 */
static __always_inline int classify_moved(struct shp_packet *pkt, __u32 dir,
					  struct shp_verdict *v)
{
	struct shp_moved *moved = flow_find_moved(pkt);
	struct shp_class *home;
	__u32 slot, class;

	if (!moved || pkt->now >= moved->until_jiffies)
		return 0;
	class = moved->class_id & (SHP_MAX_CLASSES - 1);
	slot = dir * SHP_MAX_CLASSES + class;
	home = classes.lookup(&slot);
	if (!home)
		return 0;
	return whitelist_set(v, home->overflow_class, SHP_V_MOVED, class, 0);
}

/* Not IP, or no further: the deciding code, and control kept safe. */
static __always_inline void classify_unparsed(struct shp_packet *pkt,
					      const struct shp_config *cfg,
					      struct shp_verdict *v)
{
	classify_default(cfg, v);
	v->code = pkt->parsed;
	if (pkt->parsed == SHP_V_NOT_IP && pkt->control)
		whitelist_set(v, cfg->control_class, SHP_V_CONTROL, 0, 0);
}

static __always_inline int classify_may_cache(struct shp_packet *pkt)
{
	if (pkt->tcp_edge || pkt->first_frag)
		return 0;
	return pkt->protocol == IPPROTO_TCP ||
	       !(packet_ctl(pkt) & SHP_F_DGRAM_LOOK);
}

/* Only a flow whose home class has a budget can have been moved. */
static __always_inline int classify_may_be_moved(struct shp_packet *pkt, __u32 dir,
						 const struct shp_verdict *v)
{
	__u32 slot = dir * SHP_MAX_CLASSES + (v->class & (SHP_MAX_CLASSES - 1));
	struct shp_class *home;

	if (pkt->cached || pkt->protocol != IPPROTO_TCP ||
	    v->code == SHP_V_CONTROL)
		return 0;
	home = classes.lookup(&slot);
	return home && home->budget_cost;
}

/* Decide by cache, else by asking. */
static __always_inline void classify_flow(struct __sk_buff *skb,
					  struct shp_packet *pkt,
					  const struct shp_config *cfg,
					  __u32 dir, struct shp_verdict *v)
{
	struct shp_flow *flow;

	pkt->cached_low = ~0U;
	pkt->ask = CLASSIFY_ALL;
	if (classify_may_cache(pkt)) {
		flow = flow_find(pkt);
		if (flow)
			classify_cached(pkt, flow, v);
	}
	packet_forget();
	if (pkt->cached && v->code == SHP_V_MOVED) {
		if (classify_moved(pkt, dir, v))
			pkt->ask = 0;
		else
			pkt->ask = CLASSIFY_ALL;
		packet_forget();
	}
	if (!pkt->ask) {
		pkt->learn = !pkt->cached;	/* moved, and the cache forgot */
		return;
	}
	classify_ask(skb, pkt, cfg, dir, v);
	pkt->learn = 1;
	packet_forget();
	if (classify_may_be_moved(pkt, dir, v))
		classify_moved(pkt, dir, v);
}

/* Fill *v. Returns a note code or 0. */
static __always_inline int classify_packet(struct __sk_buff *skb,
					   struct shp_packet *pkt,
					   const struct shp_config *cfg,
					   __u32 dir, struct shp_verdict *v)
{
	if (pkt->parsed) {
		classify_unparsed(pkt, cfg, v);
		return 0;
	}
	if (pkt->later_frag) {
		flow_follow_first(pkt, cfg, dir, v);
		return 0;
	}
	classify_flow(skb, pkt, cfg, dir, v);
	packet_forget();
	if (pkt->explaining)
		return 0;
	if (!pkt->learn || !classify_may_cache(pkt))
		return 0;
	if (pkt->cached_low == flow_low(v) && !v->expires_jiffies)
		return 0;
	return flow_learn(pkt, cfg, v);
}

#endif
