/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * From a parsed packet to a class. `learn` is a constant: 0 compiles the
 * program that explains, which shares every step but neither caches, counts
 * nor spends.
 */
#ifndef SHP_CLASSIFY_H
#define SHP_CLASSIFY_H

static __always_inline void classify_default(const struct shp_config *cfg,
					     struct shp_verdict *v)
{
	whitelist_set(v, cfg->default_class, SHP_V_DEFAULT, 0, 0);
}

/* Design 4: control, mark, cgroup, DSCP, ports, whitelist, default. */
static __always_inline void classify_slow(struct __sk_buff *skb,
					  struct shp_packet *pkt,
					  const struct shp_config *cfg,
					  __u32 dir,
					  struct shp_verdict *v)
{
	__u32 found, slot;
	struct shp_rule *rule;

	if (rules_is_control(pkt)) {
		whitelist_set(v, cfg->control_class, SHP_V_CONTROL, 0, 0);
		return;
	}
	found = rules_find(skb, pkt, cfg, dir);
	slot = rules_half(pkt) * SHP_MAX_RULES + found;
	rule = found == RULES_NONE ? NULL : rules.lookup(&slot);
	if (rule) {
		whitelist_set(v, rule->class_id, rule->code, found, 0);
		return;
	}
	if (whitelist_exact(pkt, v) ||
	    whitelist_prefix(pkt, v) ||
	    whitelist_manual(pkt, v))
		return;
	classify_default(cfg, v);
}

/* A single host or pair came or went: look again, keep the rest. */
static __always_inline void classify_new_epoch(struct shp_packet *pkt,
					       struct shp_verdict *v, __u32 code)
{
	pkt->learn = 1;
	if (!whitelist_exact(pkt, v) &&
	    (code == SHP_V_PAIR || code == SHP_V_HOST))
		pkt->decided = 0;
}

/*
 * Nothing of ours decided this flow. Nobody tells us when an operator fills
 * the manual map, so it is read again once per jiffy: a lookup that misses
 * costs 24 ns, a jiffy is at most 10 ms.
 */
static __always_inline void classify_undecided(struct shp_packet *pkt,
					       const struct shp_config *cfg,
					       struct shp_flow *flow,
					       struct shp_verdict *v,
					       __u32 code, int stale)
{
	if (stale && whitelist_exact(pkt, v)) {
		pkt->learn = 1;
		return;
	}
	if (!stale && flow->expires_jiffies == pkt->now)
		return;
	if (!whitelist_manual(pkt, v))
		classify_default(cfg, v);
	if (stale || v->code != code)
		pkt->learn = 1;
	else if (pkt->may_write)
		flow->expires_jiffies = pkt->now;
}

/*
 * Use a cached decision if it still holds: sets pkt->decided, and pkt->learn
 * when *v differs from what is cached. Rules do not age with the epoch.
 */
static __always_inline void classify_cached(struct shp_packet *pkt,
					    const struct shp_config *cfg,
					    struct shp_flow *flow,
					    struct shp_verdict *v)
{
	__u64 stale = (flow->word ^ packet_ctl(pkt)) >> SHP_GEN_SHIFT;
	__u32 code;

	pkt->cached = 1;
	flow_unpack(flow->word, v);
	code = v->code;
	if (stale & ((1ULL << SHP_GEN_BITS) - 1))
		return;
	pkt->decided = 1;
	if ((code < SHP_V_PAIR && code != SHP_V_DEFAULT) ||
	    code == SHP_V_MOVED)
		return;
	if (code == SHP_V_DEFAULT || code == SHP_V_MANUAL) {
		classify_undecided(pkt, cfg, flow, v, code, stale != 0);
		return;
	}
	if (!whitelist_is_live(pkt, flow->expires_jiffies)) {
		pkt->decided = 0;
		return;
	}
	v->expires_jiffies = flow->expires_jiffies;
	if (stale)
		classify_new_epoch(pkt, v, code);
}

/*
 * A flow that was moved stays moved until its hold is over. Returns 1 when
 * *v is the overflow class of the class in which the flow is at home.
 */
static __always_inline int classify_moved(struct shp_packet *pkt,
					  __u32 dir,
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
	if (pkt->tcp_syn || pkt->first_frag)
		return 0;
	return pkt->protocol == IPPROTO_TCP || !(packet_ctl(pkt) & SHP_F_DGRAM_LOOK);
}

/* Decide by cache, else by the slow path. */
static __always_inline void classify_flow(struct __sk_buff *skb,
					  struct shp_packet *pkt,
					  const struct shp_config *cfg,
					  __u32 dir, struct shp_verdict *v)
{
	struct shp_flow *flow;

	if (classify_may_cache(pkt)) {
		flow = flow_find(pkt);
		if (flow)
			classify_cached(pkt, cfg, flow, v);
	}
	packet_forget();
	if (pkt->decided && v->code == SHP_V_MOVED &&
	    !classify_moved(pkt, dir, v))
		pkt->decided = 0;
	packet_forget();
	if (pkt->decided)
		return;
	classify_slow(skb, pkt, cfg, dir, v);
	pkt->learn = 1;
	packet_forget();
	if (pkt->protocol == IPPROTO_TCP && v->code != SHP_V_CONTROL)
		classify_moved(pkt, dir, v);
}

/* Fill *v. Returns a note code or 0. */
static __always_inline int classify_packet(struct __sk_buff *skb,
					   struct shp_packet *pkt,
					   const struct shp_config *cfg,
					   __u32 dir, int learn,
					   struct shp_verdict *v)
{
	if (pkt->parsed) {
		classify_unparsed(pkt, cfg, v);
		return 0;
	}
	if (pkt->later_frag) {
		flow_follow_first(pkt, cfg, dir, v);
		return 0;
	}
	pkt->may_write = learn;
	classify_flow(skb, pkt, cfg, dir, v);
	packet_forget();
	if (!learn)
		return 0;
	if (pkt->first_frag)
		flow_learn_frag(pkt, dir, v);
	if (!pkt->learn || !classify_may_cache(pkt))
		return 0;
	return flow_learn(pkt, cfg, v);
}

#endif
