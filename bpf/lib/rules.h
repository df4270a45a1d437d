/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What the policy's rules say. Each lookup ends in a scalar at once: clang
 * merges tests on two map pointers into pointer arithmetic, which the
 * verifier refuses (bpf-facts 2.8).
 */
#ifndef SHP_RULES_H
#define SHP_RULES_H

#define RULES_NONE 0

static __always_inline __u32 rules_half(struct shp_packet *pkt)
{
	return packet_ctl(pkt) >> SHP_F_ACTIVE_RULES_SHIFT & 1;
}

/* Type numbers: RFC 792, RFC 4443, RFC 4861, RFC 3810. */
static __always_inline int rules_icmp_is_control(struct shp_packet *pkt)
{
	__u8 type = pkt->icmp_type;

	if (pkt->protocol == IPPROTO_ICMP)	/* unreachable, exceeded, problem */
		return !pkt->is_v6 && (type == 3 || type == 11 || type == 12);
	if (pkt->protocol != IPPROTO_ICMPV6 || !pkt->is_v6)
		return 0;
	return (type >= 1 && type <= 4) || (type >= 130 && type <= 137) ||
	       type == 143;
}

/* Network control that IP alone shows: IGMP, OSPF, PIM, VRRP, and ICMP's. */
static __always_inline int rules_is_control(struct shp_packet *pkt)
{
	switch (pkt->protocol) {
	case IPPROTO_IGMP:
	case 89:	/* OSPF */
	case IPPROTO_PIM:
	case 112:	/* VRRP */
		return 1;
	}
	return rules_icmp_is_control(pkt);
}

static __always_inline __u32 rules_lower(__u32 a, __u32 b)
{
	if (a == RULES_NONE)
		return b;
	if (b == RULES_NONE)
		return a;
	return a < b ? a : b;
}

/* The rule of one end's port, or RULES_NONE. */
static __always_inline __u32 rules_of_port(struct shp_packet *pkt, __u32 dir,
					   __u16 port_be, __u32 is_udp,
					   __u32 is_remote)
{
	__u32 slot = (rules_half(pkt) * 2 + dir) << 16 |
		     bpf_ntohs(port_be);
	struct shp_port_rules *r = ports.lookup(&slot);

	if (!r)
		return RULES_NONE;
	if (is_udp)
		return is_remote ? r->udp_remote : r->udp_local;
	return is_remote ? r->tcp_remote : r->tcp_local;
}

static __always_inline __u32 rules_of_ports(struct shp_packet *pkt,
					    __u32 dir)
{
	__u16 local_be = pkt->is_v6 ? pkt->v6.local_port_be :
				      pkt->v4.local_port_be;
	__u16 remote_be = pkt->is_v6 ? pkt->v6.remote_port_be :
				       pkt->v4.remote_port_be;
	__u32 is_udp = pkt->protocol == IPPROTO_UDP;
	__u32 local, remote;

	if (!is_udp && pkt->protocol != IPPROTO_TCP)
		return RULES_NONE;
	local = rules_of_port(pkt, dir, local_be, is_udp, 0);
	remote = rules_of_port(pkt, dir, remote_be, is_udp, 1);
	return rules_lower(local, remote);
}

static __always_inline __u32 rules_of_field(struct shp_packet *pkt, __u32 dir,
					    __u32 slot)
{
	__u32 key = (rules_half(pkt) * 2 + dir) * SHP_FIELD_SLOTS +
		    slot;
	__u32 *rule = fields.lookup(&key);

	return rule ? *rule : RULES_NONE;
}

static __always_inline __u32 rules_of_mark(struct shp_packet *pkt,
					   __u32 dir, __u32 mark)
{
	pkt->found = RULES_NONE;
#pragma unroll
	for (int i = 0; i < SHP_MAX_MARKS; i++) {
		__u32 slot = rules_half(pkt) * SHP_MAX_MARKS + i;
		struct shp_mark_rule *m = marks.lookup(&slot);
		__u32 rule = RULES_NONE;

		if (m && m->mask && (mark & m->mask) == m->value &&
		    (m->directions & (1 << dir)))
			rule = m->rule;
		pkt->found = rules_lower(pkt->found, rule);
		packet_forget();
	}
	return pkt->found;
}

static __always_inline __u32 rules_of_cgroup_id(struct shp_packet *pkt,
						__u32 dir, __u64 id)
{
	struct shp_cgroup_key key = {
		.id = id,
		.active = rules_half(pkt),
	};
	struct shp_cgroup_rule *r = cgroups.lookup(&key);

	if (r && (r->directions & (1 << dir)))
		return r->rule;
	return RULES_NONE;
}

/*
 * The rule of the deepest cgroup on the way up from the socket's. cgroup_levels
 * has a bit for each depth at which a rule names a cgroup. Egress only: on
 * ingress no socket is known yet.
 */
static __always_inline __u32 rules_of_cgroup(struct __sk_buff *skb,
					     struct shp_packet *pkt,
					     const struct shp_config *cfg,
					     __u32 dir)
{
	/* a test run's socket is that of who asks, not the packet's */
	if (dir != SHP_EGRESS || pkt->explaining)
		return RULES_NONE;
	pkt->found = RULES_NONE;
#pragma unroll
	for (int level = 15; level > 0; level--) {
		__u64 id;

		if (!(*(const volatile __u32 *)&cfg->cgroup_levels &
		      (1 << level)))
			continue;
		id = bpf_skb_ancestor_cgroup_id(skb, level);
		if (id)
			pkt->found = rules_of_cgroup_id(pkt, dir, id);
		packet_forget();
		if (pkt->found != RULES_NONE)
			break;
	}
	return pkt->found;
}

/*
 * The rule that decides, or RULES_NONE: protected ports, then mark, cgroup,
 * DSCP, then ports, then protocol.
 */
static __always_inline __u32 rules_find(struct __sk_buff *skb,
					struct shp_packet *pkt,
					const struct shp_config *cfg,
					__u32 dir)
{
	__u32 by_port = rules_of_ports(pkt, dir);
	__u32 found = RULES_NONE;

	if (by_port != RULES_NONE) {
		__u32 slot = rules_half(pkt) * SHP_MAX_RULES + by_port;
		struct shp_rule *rule = rules.lookup(&slot);

		if (rule && rule->code == SHP_V_CONTROL)
			return by_port;
	}
	if (packet_ctl(pkt) & SHP_F_RULE_MARK)
		found = rules_of_mark(pkt, dir, skb->mark);
	if (found == RULES_NONE && (packet_ctl(pkt) & SHP_F_RULE_CGROUP))
		found = rules_of_cgroup(skb, pkt, cfg, dir);
	if (found == RULES_NONE && (packet_ctl(pkt) & SHP_F_RULE_DSCP))
		found = rules_of_field(pkt, dir,
				       SHP_FIELD_DSCP + (pkt->traffic_class >> 2));
	if (found == RULES_NONE)
		found = by_port;
	if (found == RULES_NONE)
		found = rules_of_field(pkt, dir, pkt->protocol);
	pkt->found = found;
	packet_forget();
	return pkt->found;
}

#endif
