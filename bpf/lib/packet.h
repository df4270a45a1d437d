/* SPDX-License-Identifier: GPL-2.0-only */
/* A packet once parsed: what every later step works on. */
#ifndef SHP_PACKET_H
#define SHP_PACKET_H

/*
 * Make the compiler read the scratch map again: a value that comes back from
 * memory is unknown to the verifier, so paths that differ only in what they
 * know about it become one.
 */
#define packet_forget() asm volatile("" ::: "memory")

struct shp_verdict {
	__u32 class;
	__u32 code;
	__u32 ref;		/* rule number, or prefix length */
	__u32 pad;
	__u64 expires_jiffies;
};

struct shp_packet {
	__u64 ctl_word;		/* read once per packet; see packet_ctl() */
	__u64 now;		/* jiffies: no clock call on the common path */
	struct shp_flow4_key v4;
	struct shp_flow6_key v6;
	struct shp_verdict verdict;
	__u32 l3_offset;
	__u32 l4_offset;
	__u32 l4_room;		/* bytes that the IP header says follow */
	__u32 header_bytes;	/* link layer to end of L4, for GSO on ingress */
	__u32 frag_id_be;
	__u32 ask;		/* CLASSIFY_*: what the cache leaves open */
	__u32 found;		/* rule found so far */
	__u32 cached_low;	/* decision of a stale entry made current, or ~0 */
	__u32 parsed;		/* 0, or the code that ends classification */
	__u32 metered;		/* METER_* of a departure time */
	__u8 is_v6;
	__u8 protocol;
	__u8 traffic_class;	/* DSCP and ECN */
	__u8 tcp_edge;		/* SYN or RST: says nothing lasting of its flow */
	__u8 icmp_type;
	__u8 first_frag;
	__u8 later_frag;
	__u8 encap_note;	/* SHP_N_ENCAP_* or 0 */
	__u8 explaining;	/* answer only: write nothing */
	__u8 cached;		/* the flow cache has an entry */
	__u8 learn;		/* the decision may not be what the cache says */
	__u8 control;		/* control protocol known by L2 or L3 alone */
};

_Static_assert(sizeof(struct shp_packet) <= sizeof(struct shp_scratch),
	       "the parsed packet fits the scratch slot");

/*
 * The control word of this packet. Read from memory at each use, since the
 * verifier remembers each bit tested in a register and would walk every
 * combination of flags.
 */
static __always_inline __u64 packet_ctl(const struct shp_packet *pkt)
{
	return *(const volatile __u64 *)&pkt->ctl_word;
}

#endif
