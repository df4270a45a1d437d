/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Whitelists: pairs and exact hosts in hashes, prefixes in tries or, where a
 * family has many of few lengths, in a hash, all inside arrays of maps, so
 * that one write of the control word switches every list at once. Of the
 * tries, local is slot half 0, remote half 1.
 */
#ifndef SHP_WHITELIST_H
#define SHP_WHITELIST_H

#define WHITELIST_RETRIES 3	/* expired prefixes that hide a shorter one */

static __always_inline int whitelist_is_live(struct shp_packet *pkt,
					     __u64 expires)
{
	return !expires || pkt->now < expires;
}

static __always_inline int whitelist_set(struct shp_verdict *v, __u32 class,
					 __u32 code, __u32 ref, __u64 expires)
{
	v->class = class & (SHP_MAX_CLASSES - 1);
	v->code = code;
	v->ref = ref;
	v->expires_jiffies = expires;
	return 1;
}

static __always_inline int whitelist_pair(struct shp_packet *pkt, void *list,
					  void *key, struct shp_verdict *v)
{
	struct shp_listed *e = bpf_map_lookup_elem(list, key);

	if (!e || !whitelist_is_live(pkt, e->expires_jiffies))
		return 0;
	return whitelist_set(v, e->class_id, SHP_V_PAIR, 0, e->expires_jiffies);
}

/* One end in a list of hosts or of nets. */
static __always_inline int whitelist_end(struct shp_packet *pkt, void *list,
					 void *key, __u32 is_remote, __u32 code,
					 __u32 ref, struct shp_verdict *v)
{
	struct shp_host *e = bpf_map_lookup_elem(list, key);
	__u32 class;
	__u64 expires;

	if (!e)
		return 0;
	class = is_remote ? e->remote_class : e->local_class;
	expires = is_remote ? e->remote_expires_jiffies :
			      e->local_expires_jiffies;
	if (class >= SHP_MAX_CLASSES || !whitelist_is_live(pkt, expires))
		return 0;
	return whitelist_set(v, class, code, ref, expires);
}

static __always_inline int whitelist_host(struct shp_packet *pkt, void *list,
					  void *key, __u32 is_remote,
					  struct shp_verdict *v)
{
	return whitelist_end(pkt, list, key, is_remote, SHP_V_HOST, is_remote, v);
}

static __always_inline int whitelist_exact4(struct shp_packet *pkt,
					    struct shp_verdict *v)
{
	__u32 active = packet_ctl(pkt) & SHP_F_ACTIVE;
	void *list;

	if (packet_ctl(pkt) & SHP_F_PAIR4) {
		list = pairs4.lookup(&active);
		if (list && whitelist_pair(pkt, list, &pkt->v4, v))
			return 1;
	}
	if (!(packet_ctl(pkt) & (SHP_F_HOST4_LOCAL | SHP_F_HOST4_REMOTE)))
		return 0;
	list = hosts4.lookup(&active);
	if (!list)
		return 0;
	if ((packet_ctl(pkt) & SHP_F_HOST4_REMOTE) &&
	    whitelist_host(pkt, list, &pkt->v4.remote_be, 1, v))
		return 1;
	return (packet_ctl(pkt) & SHP_F_HOST4_LOCAL) &&
	       whitelist_host(pkt, list, &pkt->v4.local_be, 0, v);
}

static __always_inline int whitelist_exact6(struct shp_packet *pkt,
					    struct shp_verdict *v)
{
	__u32 active = packet_ctl(pkt) & SHP_F_ACTIVE;
	void *list;

	if (packet_ctl(pkt) & SHP_F_PAIR6) {
		list = pairs6.lookup(&active);
		if (list && whitelist_pair(pkt, list, &pkt->v6, v))
			return 1;
	}
	if (!(packet_ctl(pkt) & (SHP_F_HOST6_LOCAL | SHP_F_HOST6_REMOTE)))
		return 0;
	list = hosts6.lookup(&active);
	if (!list)
		return 0;
	if ((packet_ctl(pkt) & SHP_F_HOST6_REMOTE) &&
	    whitelist_host(pkt, list, pkt->v6.remote_be, 1, v))
		return 1;
	return (packet_ctl(pkt) & SHP_F_HOST6_LOCAL) &&
	       whitelist_host(pkt, list, pkt->v6.local_be, 0, v);
}

/* Pairs and exact hosts: looked up again after each single change. */
static __always_inline int whitelist_exact(struct shp_packet *pkt,
					   struct shp_verdict *v)
{
	if (pkt->is_v6)
		return whitelist_exact6(pkt, v);
	return whitelist_exact4(pkt, v);
}

/*
 * Many prefixes of few lengths: one hash look-up per length and end, the longest first, where
 * a trie among 100,000 prefixes walks some 17 nodes, mostly cache misses.
 */
static __always_inline int whitelist_nets4(struct shp_packet *pkt, __u32 active,
					   struct shp_verdict *v)
{
	__u32 slot = active * 2 * SHP_NET_LENGTHS;
	void *list = nets4.lookup(&active);

	if (!list)
		return 0;
#pragma clang loop unroll(disable)
	for (int i = 0; i < SHP_NET_LENGTHS; i++, slot++) {
		struct shp_net_length *length = net_lengths.lookup(&slot);
		struct shp_lpm4 key;
		__u32 bits, mask_be;

		if (!length)
			return 0;
		bits = length->prefix_bits;
		mask_be = length->mask_be[0];
		if (bits == SHP_NO_LENGTH)
			return 0;
		key.prefix_bits = bits;
		key.addr_be = pkt->v4.remote_be & mask_be;
		if ((packet_ctl(pkt) & SHP_F_LPM4_REMOTE) &&
		    whitelist_end(pkt, list, &key, 1, SHP_V_PREFIX, bits, v))
			return 1;
		key.addr_be = pkt->v4.local_be & mask_be;
		if ((packet_ctl(pkt) & SHP_F_LPM4_LOCAL) &&
		    whitelist_end(pkt, list, &key, 0, SHP_V_PREFIX, bits, v))
			return 1;
	}
	return 0;
}

static __always_inline void whitelist_mask6(struct shp_lpm6 *key,
					    const __u32 *addr_be,
					    const struct shp_net_length *length)
{
	for (int i = 0; i < 4; i++)
		key->addr_be[i] = addr_be[i] & length->mask_be[i];
}

static __always_inline int whitelist_nets6(struct shp_packet *pkt, __u32 active,
					   struct shp_verdict *v)
{
	__u32 slot = active * 2 * SHP_NET_LENGTHS + SHP_NET_LENGTHS;
	void *list = nets6.lookup(&active);

	if (!list)
		return 0;
#pragma clang loop unroll(disable)
	for (int i = 0; i < SHP_NET_LENGTHS; i++, slot++) {
		struct shp_net_length *length = net_lengths.lookup(&slot);
		struct shp_lpm6 key;
		__u32 bits;

		if (!length)
			return 0;
		bits = length->prefix_bits;
		if (bits == SHP_NO_LENGTH)
			return 0;
		key.prefix_bits = bits;
		whitelist_mask6(&key, pkt->v6.remote_be, length);
		if ((packet_ctl(pkt) & SHP_F_LPM6_REMOTE) &&
		    whitelist_end(pkt, list, &key, 1, SHP_V_PREFIX, bits, v))
			return 1;
		whitelist_mask6(&key, pkt->v6.local_be, length);
		if ((packet_ctl(pkt) & SHP_F_LPM6_LOCAL) &&
		    whitelist_end(pkt, list, &key, 0, SHP_V_PREFIX, bits, v))
			return 1;
	}
	return 0;
}

/*
 * The longest live prefix of one end. An expired entry must not hide a
 * shorter one, so look again below its length.
 */
static __always_inline int whitelist_trie4(struct shp_packet *pkt, __u32 slot,
					   __u32 addr_be, struct shp_verdict *v)
{
	struct shp_lpm4 key = { .prefix_bits = 32, .addr_be = addr_be };
	void *list = lpm4.lookup(&slot);

	if (!list)
		return 0;
#pragma clang loop unroll(disable)
	for (int i = 0; i < WHITELIST_RETRIES; i++) {
		struct shp_listed *e = bpf_map_lookup_elem(list, &key);

		if (!e)
			return 0;
		if (whitelist_is_live(pkt, e->expires_jiffies))
			return whitelist_set(v, e->class_id, SHP_V_PREFIX,
					     e->prefix_bits, e->expires_jiffies);
		if (!e->prefix_bits)
			return 0;
		key.prefix_bits = e->prefix_bits - 1;
	}
	return 0;
}

static __always_inline int whitelist_trie6(struct shp_packet *pkt, __u32 slot,
					   __u32 *addr_be, struct shp_verdict *v)
{
	struct shp_lpm6 key = { .prefix_bits = 128 };
	void *list = lpm6.lookup(&slot);

	if (!list)
		return 0;
	__builtin_memcpy(key.addr_be, addr_be, 16);
#pragma clang loop unroll(disable)
	for (int i = 0; i < WHITELIST_RETRIES; i++) {
		struct shp_listed *e = bpf_map_lookup_elem(list, &key);

		if (!e)
			return 0;
		if (whitelist_is_live(pkt, e->expires_jiffies))
			return whitelist_set(v, e->class_id, SHP_V_PREFIX,
					     e->prefix_bits, e->expires_jiffies);
		if (!e->prefix_bits)
			return 0;
		key.prefix_bits = e->prefix_bits - 1;
	}
	return 0;
}

/* The longer prefix of the two ends wins; the remote end on a tie. */
static __always_inline int whitelist_prefix(struct shp_packet *pkt,
					    struct shp_verdict *v)
{
	__u32 active = packet_ctl(pkt) & SHP_F_ACTIVE;
	struct shp_verdict local = {};
	int by_remote = 0, by_local = 0;

	if (pkt->is_v6) {
		if (packet_ctl(pkt) & SHP_F_NET6)
			return whitelist_nets6(pkt, active, v);
		if (packet_ctl(pkt) & SHP_F_LPM6_REMOTE)
			by_remote = whitelist_trie6(pkt, 2 + active,
						    pkt->v6.remote_be, v);
		if (packet_ctl(pkt) & SHP_F_LPM6_LOCAL)
			by_local = whitelist_trie6(pkt, active, pkt->v6.local_be,
						   &local);
	} else {
		if (packet_ctl(pkt) & SHP_F_NET4)
			return whitelist_nets4(pkt, active, v);
		if (packet_ctl(pkt) & SHP_F_LPM4_REMOTE)
			by_remote = whitelist_trie4(pkt, 2 + active,
						    pkt->v4.remote_be, v);
		if (packet_ctl(pkt) & SHP_F_LPM4_LOCAL)
			by_local = whitelist_trie4(pkt, active, pkt->v4.local_be,
						   &local);
	}
	if (by_local && (!by_remote || local.ref > v->ref)) {
		*v = local;
		return 1;
	}
	return by_remote;
}

/*
 * The map that operators fill with bpftool: remote address to class. Nobody
 * tells us when they do, so it is read for each packet that nothing else
 * decided. The clock is read only for an entry that can expire.
 */
static __always_inline int whitelist_manual(struct shp_packet *pkt,
					    const struct shp_config *cfg,
					    struct shp_verdict *v)
{
	struct shp_manual_key key = {};
	struct shp_manual *e;
	__u32 *words = (__u32 *)key.remote;
	__u64 expires;
	__u32 class;

	if (pkt->is_v6) {
		__builtin_memcpy(words, pkt->v6.remote_be, 16);
	} else {
		words[2] = bpf_htonl(0xffff);
		words[3] = pkt->v4.remote_be;
	}
	e = manual.lookup(&key);
	if (!e)
		return 0;
	class = e->class_id;
	expires = e->expires_boot_s;
	if (class >= cfg->class_count)
		return 0;
	if (expires && bpf_ktime_get_boot_ns() / 1000000000ULL >= expires)
		return 0;
	return whitelist_set(v, class, SHP_V_MANUAL, 0, 0);
}

#endif
