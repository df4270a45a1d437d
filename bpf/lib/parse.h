/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * From bytes to a flow key. A parser never drops and never decides a class:
 * it fills struct shp_packet and returns 0, or the code that ends
 * classification.
 */
#ifndef SHP_PARSE_H
#define SHP_PARSE_H

#define PARSE_VLAN_DEPTH 2	/* QinQ; metadata counts as one tag */
#define PARSE_EXT_DEPTH 6	/* RFC 8200 lists six; more is not real traffic */
#define PARSE_OFFSET_MASK 0x3fff	/* tags + IPv6 + six longest headers < 16 KiB */
#define PARSE_PULL_BYTES 256U	/* tags + IPv6 + six usual extension headers + L4 */

#define PARSE_ETH_P_8021Q 0x8100
#define PARSE_ETH_P_8021AD 0x88a8
#define PARSE_ETH_P_QINQ1 0x9100	/* pre-standard outer tag, still sold */

/* Non-IP protocols that keep a network alive; all others are SHP_V_NOT_IP. */
static __always_inline int parse_is_l2_control(__u16 proto)
{
	switch (proto) {
	case 0x0806:	/* ARP */
	case 0x8035:	/* RARP */
	case 0x8809:	/* LACP and other slow protocols */
	case 0x888e:	/* 802.1X */
	case 0x88cc:	/* LLDP */
	case 0x88f7:	/* PTP */
	case 0x8902:	/* CFM */
		return 1;
	}
	return proto < 0x0600;	/* 802.3 length: LLC, so STP and IS-IS */
}

static __always_inline int parse_encap_of_ethertype(__u16 proto)
{
	if (proto == 0x8863 || proto == 0x8864)
		return SHP_N_ENCAP_PPPOE;
	if (proto == 0x8847 || proto == 0x8848)
		return SHP_N_ENCAP_MPLS;
	return 0;
}

static __always_inline int parse_encap_of_protocol(__u8 protocol)
{
	if (protocol == IPPROTO_IPIP || protocol == IPPROTO_IPV6 ||
	    protocol == IPPROTO_GRE)
		return SHP_N_ENCAP_IP;
	return 0;
}

/*
 * Walk the VLAN tags in the bytes. Returns the inner ethertype in host order
 * and moves *offset behind the tags, or a negative code.
 */
static __always_inline int parse_link(struct __sk_buff *skb, void *data,
				      void *end, __u32 *offset)
{
	__u32 tags = skb->vlan_present ? 1 : 0;
	struct ethhdr *eth = data;
	__u16 proto;

	if ((void *)(eth + 1) > end)
		return -SHP_V_TRUNCATED;
	proto = bpf_ntohs(eth->h_proto);
	*offset = sizeof(*eth);

#pragma unroll
	for (int i = 0; i <= PARSE_VLAN_DEPTH; i++) {
		__be16 *tag = data + *offset;

		if (proto != PARSE_ETH_P_8021Q && proto != PARSE_ETH_P_8021AD &&
		    proto != PARSE_ETH_P_QINQ1)
			return proto;
		if (++tags > PARSE_VLAN_DEPTH)
			return -SHP_V_VLAN_DEPTH;
		if ((void *)(tag + 2) > end)
			return -SHP_V_TRUNCATED;
		proto = bpf_ntohs(tag[1]);
		*offset += 4;
	}
	return -SHP_V_VLAN_DEPTH;
}

static __always_inline void parse_set_ports(struct shp_packet *pkt, __u32 dir,
					    __u16 src_be, __u16 dst_be)
{
	__u16 local = dir == SHP_EGRESS ? src_be : dst_be;
	__u16 remote = dir == SHP_EGRESS ? dst_be : src_be;

	if (pkt->is_v6) {
		pkt->v6.local_port_be = local;
		pkt->v6.remote_port_be = remote;
	} else {
		pkt->v4.local_port_be = local;
		pkt->v4.remote_port_be = remote;
	}
}

/* RFC 7348 and RFC 8926: the outer ports that say what is inside. */
static __always_inline int parse_encap_of_udp(__u16 dst_be)
{
	if (dst_be == bpf_htons(4789))
		return SHP_N_ENCAP_VXLAN;
	if (dst_be == bpf_htons(6081))
		return SHP_N_ENCAP_GENEVE;
	return 0;
}

/*
 * Ports, flags and ICMP type. pkt->l4_room keeps Ethernet padding from being
 * taken for L4. Offsets come back from the scratch map, so that all paths
 * through the headers before look the same to the verifier.
 */
static __always_inline int parse_l4(struct shp_packet *pkt, void *data,
				    void *end, __u32 dir)
{
	__u32 offset = pkt->l4_offset & PARSE_OFFSET_MASK;
	__u32 room = pkt->l4_room;
	__be16 *port = data + offset;
	__u8 *bytes = data + offset;

	pkt->header_bytes = offset;
	if (pkt->protocol == IPPROTO_TCP) {
		if (room < 4 || (void *)(port + 2) > end)
			return SHP_V_TRUNCATED;
		parse_set_ports(pkt, dir, port[0], port[1]);
		if (room < 20 || (void *)(bytes + 20) > end)
			/* a first fragment may end here, a whole segment not */
			return pkt->first_frag ? 0 : SHP_V_TRUNCATED;
		/* SYN: no socket yet; RST: no flow any more (RFC 9293) */
		pkt->tcp_edge = (bytes[13] & 0x06) != 0;
		pkt->header_bytes = offset + (bytes[12] >> 4) * 4;
		return 0;
	}
	if (pkt->protocol == IPPROTO_UDP || pkt->protocol == IPPROTO_UDPLITE) {
		if (room < 8 || (void *)(bytes + 8) > end)
			return SHP_V_TRUNCATED;
		parse_set_ports(pkt, dir, port[0], port[1]);
		pkt->encap_note = parse_encap_of_udp(port[1]);
		pkt->header_bytes = offset + 8;
		return 0;
	}
	if (pkt->protocol == IPPROTO_ICMP || pkt->protocol == IPPROTO_ICMPV6) {
		if (room < 1 || (void *)(bytes + 1) > end)
			return SHP_V_TRUNCATED;
		pkt->icmp_type = bytes[0];
		/* in the flow key: an error and an echo are not one flow */
		parse_set_ports(pkt, dir, bytes[0], bytes[0]);
		return 0;
	}
	pkt->encap_note = parse_encap_of_protocol(pkt->protocol);
	return 0;
}

static __always_inline int parse_v4(struct shp_packet *pkt, void *data,
				    void *end, __u32 offset, __u32 dir)
{
	struct iphdr *ip = data + offset;
	__u32 header, total, frag;

	if ((void *)(ip + 1) > end)
		return SHP_V_TRUNCATED;
	header = (*(__u8 *)ip & 0x0f) * 4;
	if (*(__u8 *)ip >> 4 != 4 || header < sizeof(*ip))
		return SHP_V_MALFORMED;
	if (data + offset + header > end)
		return SHP_V_TRUNCATED;
	total = bpf_ntohs(ip->tot_len);
	if (!total)		/* TSO and BIG TCP write no length */
		total = 0xffff;
	else if (total < header)
		return SHP_V_MALFORMED;

	pkt->protocol = ip->protocol;
	pkt->traffic_class = ip->tos;
	pkt->v4.local_be = dir == SHP_EGRESS ? ip->saddr : ip->daddr;
	pkt->v4.remote_be = dir == SHP_EGRESS ? ip->daddr : ip->saddr;
	pkt->v4.protocol = ip->protocol;
	frag = bpf_ntohs(ip->frag_off);
	if (frag & 0x3fff) {
		pkt->frag_id_be = ip->id;
		pkt->later_frag = (frag & 0x1fff) != 0;
		pkt->first_frag = !pkt->later_frag;
	}
	pkt->l4_offset = offset + header;
	pkt->l4_room = total - header;
	return 0;
}

/*
 * Walk extension headers from pkt->l4_offset on. Only those whose length is
 * known are walked; anything else is the upper protocol. Returns 0 or a code.
 */
static __always_inline int parse_v6_extensions(struct shp_packet *pkt,
					       void *data, void *end)
{
#pragma unroll
	for (int i = 0; i <= PARSE_EXT_DEPTH; i++) {
		__u8 *ext = data + (pkt->l4_offset & PARSE_OFFSET_MASK);
		__u8 kind = pkt->protocol;
		__u32 length;

		if (kind != IPPROTO_HOPOPTS && kind != IPPROTO_ROUTING &&
		    kind != IPPROTO_FRAGMENT && kind != IPPROTO_DSTOPTS &&
		    kind != IPPROTO_AH)
			return 0;
		if (i == PARSE_EXT_DEPTH)
			return SHP_V_EXT_DEPTH;
		if ((void *)(ext + 8) > end)
			return SHP_V_TRUNCATED;
		length = (ext[1] + 1) * 8;
		if (kind == IPPROTO_AH)		/* RFC 4302 2.2: 4-byte units */
			length = (ext[1] + 2) * 4;
		if (kind == IPPROTO_FRAGMENT) {
			__u32 frag = ext[2] << 8 | ext[3];

			length = 8;
			if (frag & 0xfff9) {	/* not an atomic fragment */
				pkt->frag_id_be = *(__be32 *)(ext + 4);
				pkt->later_frag = (frag & 0xfff8) != 0;
				pkt->first_frag = !pkt->later_frag;
			}
		}
		pkt->protocol = ext[0];
		pkt->l4_offset += length;
		packet_forget();
		if (pkt->later_frag)
			return 0;
	}
	return SHP_V_EXT_DEPTH;
}

static __always_inline int parse_v6(struct shp_packet *pkt, void *data,
				    void *end, __u32 offset, __u32 dir)
{
	struct ipv6hdr *ip = data + offset;
	__u32 walked, payload;
	int code;

	if ((void *)(ip + 1) > end)
		return SHP_V_TRUNCATED;
	if (*(__u8 *)ip >> 4 != 6)
		return SHP_V_MALFORMED;
	pkt->is_v6 = 1;
	pkt->protocol = ip->nexthdr;
	pkt->traffic_class = (bpf_ntohs(*(__be16 *)ip) >> 4) & 0xff;
	if (dir == SHP_EGRESS) {
		__builtin_memcpy(pkt->v6.local_be, &ip->saddr, 16);
		__builtin_memcpy(pkt->v6.remote_be, &ip->daddr, 16);
	} else {
		__builtin_memcpy(pkt->v6.local_be, &ip->daddr, 16);
		__builtin_memcpy(pkt->v6.remote_be, &ip->saddr, 16);
	}
	payload = bpf_ntohs(ip->payload_len);
	if (!payload)		/* BIG TCP, RFC 2675 jumbograms */
		payload = 0xffff;

	offset += sizeof(*ip);
	pkt->l4_offset = offset;
	code = parse_v6_extensions(pkt, data, end);
	pkt->v6.protocol = pkt->protocol;
	if (code || pkt->later_frag)
		return code;
	walked = pkt->l4_offset - offset;
	if (walked > payload)
		return SHP_V_MALFORMED;
	pkt->l4_room = payload - walked;
	return 0;
}

/* One pass over what is in the linear area. Returns 0 or the deciding code. */
static __always_inline int parse_linear(struct __sk_buff *skb,
					struct shp_packet *pkt, __u32 l3_device,
					__u32 dir)
{
	void *data = (void *)(long)skb->data;
	void *end = (void *)(long)skb->data_end;
	__u32 offset = 0;
	int proto, code;

	__builtin_memset(&pkt->v4, 0,
			 sizeof(*pkt) - offsetof(struct shp_packet, v4));
	pkt->v4.direction = dir;
	pkt->v6.direction = dir;
	if (l3_device)
		proto = bpf_ntohs(skb->protocol);
	else
		proto = parse_link(skb, data, end, &offset);
	if (proto < 0)
		return -proto;
	pkt->l3_offset = offset;
	if (proto == ETH_P_IP) {
		code = parse_v4(pkt, data, end, offset, dir);
	} else if (proto == ETH_P_IPV6) {
		code = parse_v6(pkt, data, end, offset, dir);
	} else {
		pkt->control = parse_is_l2_control(proto);
		pkt->encap_note = parse_encap_of_ethertype(proto);
		return SHP_V_NOT_IP;
	}
	pkt->parsed = code;
	packet_forget();
	if (pkt->parsed || pkt->later_frag)
		return pkt->parsed;
	return parse_l4(pkt, data, end, dir);
}

/*
 * True where a header may lie behind the linear area (header-data split,
 * AF_PACKET rings): not truncated, but to be pulled in first.
 */
static __always_inline int parse_needs_pull(struct __sk_buff *skb,
					    const struct shp_packet *pkt)
{
	__u32 linear = skb->data_end - skb->data;

	return pkt->parsed == SHP_V_TRUNCATED && linear < skb->len &&
	       linear < PARSE_PULL_BYTES;
}

/* The length is explicit: bpf_skb_pull_data(skb, 0) pulls nothing new. */
static __always_inline int parse_pull(struct __sk_buff *skb)
{
	return bpf_skb_pull_data(skb, skb->len < PARSE_PULL_BYTES ?
					      skb->len : PARSE_PULL_BYTES);
}

#endif
