/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The flow cache: one LRU entry per flow and direction, so that a packet of
 * a known flow costs one lookup. IPv4 and IPv6 have maps of their own, since
 * the shorter key is faster. A cached class is valid while generation and
 * epoch of the control word agree (abi.h).
 */
#ifndef SHP_FLOW_H
#define SHP_FLOW_H

/* A reassembly lasts 30 s (net.ipv4.ipfrag_time); the window is a second. */
#define FLOW_FRAG_S 30

static __always_inline __u64 flow_word(struct shp_packet *pkt,
				       const struct shp_verdict *v)
{
	return (packet_ctl(pkt) & ~((1ULL << SHP_DECISION_BITS) - 1)) |
	       (__u64)(v->ref & 0xfff) << 8 |
	       ((v->code - SHP_CODE_FIRST) & 0xf) << 4 | (v->class & 0xf);
}

static __always_inline __u32 flow_low(const struct shp_verdict *v)
{
	return (v->ref & 0xfff) << 8 | ((v->code - SHP_CODE_FIRST) & 0xf) << 4 |
	       (v->class & 0xf);
}

static __always_inline void flow_unpack(__u64 word, struct shp_verdict *v)
{
	v->class = word & 0xf;
	v->code = SHP_CODE_FIRST + ((word >> 4) & 0xf);
	v->ref = (word >> 8) & 0xfff;
}

static __always_inline struct shp_flow *flow_find(struct shp_packet *pkt)
{
	if (pkt->is_v6)
		return flows6.lookup(&pkt->v6);
	return flows4.lookup(&pkt->v4);
}

static __always_inline struct shp_moved *flow_find_moved(struct shp_packet *pkt)
{
	if (pkt->is_v6)
		return moved6.lookup(&pkt->v6);
	return moved4.lookup(&pkt->v4);
}

static __always_inline int flow_put(struct shp_packet *pkt,
				    struct shp_flow *flow)
{
	if (pkt->is_v6)
		return flows6.update(&pkt->v6, flow);
	return flows4.update(&pkt->v4, flow);
}

static __always_inline int flow_put_moved(struct shp_packet *pkt,
					  struct shp_moved *moved)
{
	if (pkt->is_v6)
		return moved6.update(&pkt->v6, moved);
	return moved4.update(&pkt->v4, moved);
}

/* A scan or a SYN flood must not push live flows out: bound new entries. */
static __always_inline int flow_may_insert(struct shp_packet *pkt,
					   const struct shp_config *cfg)
{
	__u32 slot = 0;
	struct shp_inserts *i = inserts.lookup(&slot);

	if (!i)
		return 0;
	if (pkt->now - i->window_jiffies >= cfg->insert_window_jiffies) {
		i->window_jiffies = pkt->now;
		i->inserted = 0;
	}
	return i->inserted++ < cfg->insert_limit;
}

/*
 * Remember a decision. A decision without an expiry refreshes its entry in
 * place, word first: the old expiry under the new word only sends a reader
 * down the slow path. With an expiry both must change together, so the entry
 * is replaced. The entry is looked up again here: a
 * pointer kept across the slow path would make the verifier walk that path
 * once per map. Returns a note code or 0.
 */
static __always_inline int flow_learn(struct shp_packet *pkt,
				      const struct shp_config *cfg,
				      const struct shp_verdict *v)
{
	struct shp_flow flow = {
		.word = flow_word(pkt, v),
		.expires_jiffies = v->expires_jiffies,
	};
	struct shp_flow *known;
	int in_place = !flow.expires_jiffies;

	if (v->code == SHP_V_DEFAULT || v->code == SHP_V_MANUAL) {
		flow.expires_jiffies = pkt->now;
		in_place = 1;
	}
	if (pkt->cached) {
		known = flow_find(pkt);
		if (known && in_place) {
			known->word = flow.word;
			known->expires_jiffies = flow.expires_jiffies;
			return 0;
		}
	} else if (!flow_may_insert(pkt, cfg)) {
		return SHP_N_INSERT_LIMIT;
	}
	if (!flow_put(pkt, &flow))
		return 0;
	known = flow_find(pkt);
	if (known)	/* made current ahead of the answer: not any more */
		known->word = ~packet_ctl(pkt);
	return SHP_N_INSERT_FAIL;
}

static __always_inline void flow_frag_key(struct shp_packet *pkt,
					  __u32 dir, struct shp_frag_key *key)
{
	__builtin_memset(key, 0, sizeof(*key));
	if (pkt->is_v6) {
		__builtin_memcpy(key->local_be, pkt->v6.local_be, 16);
		__builtin_memcpy(key->remote_be, pkt->v6.remote_be, 16);
	} else {
		key->local_be[2] = bpf_htonl(0xffff);
		key->local_be[3] = pkt->v4.local_be;
		key->remote_be[2] = bpf_htonl(0xffff);
		key->remote_be[3] = pkt->v4.remote_be;
	}
	key->id_be = pkt->frag_id_be;
	/* the first fragment's protocol is the same in each header (RFC 791) */
	key->protocol = pkt->is_v6 ? 0 : pkt->protocol;
	key->direction = dir;
}

/* Later fragments have no ports: they follow what their first one got. */
static __always_inline void flow_follow_first(struct shp_packet *pkt,
					      const struct shp_config *cfg,
					      __u32 dir, struct shp_verdict *v)
{
	struct shp_frag_key key;
	struct shp_flow *first;

	flow_frag_key(pkt, dir, &key);
	first = frags.lookup(&key);
	if (first && pkt->now < first->expires_jiffies) {
		v->class = first->word & 0xf;
		v->code = SHP_V_FRAGMENT;
		return;
	}
	v->class = cfg->default_class & (SHP_MAX_CLASSES - 1);
	v->code = SHP_V_FRAG_UNSEEN;
}

static __always_inline void flow_learn_frag(struct shp_packet *pkt,
					    const struct shp_config *cfg,
					    __u32 dir,
					    const struct shp_verdict *v)
{
	struct shp_flow flow = {
		.word = v->class & 0xf,
		.expires_jiffies = pkt->now + FLOW_FRAG_S *
				   cfg->insert_window_jiffies,
	};
	struct shp_frag_key key;

	flow_frag_key(pkt, dir, &key);
	frags.update(&key, &flow);
}

#endif
