/* SPDX-License-Identifier: GPL-2.0-only */
/* Counters, per CPU: one entry per class, one per reason. */
#ifndef SHP_COUNT_H
#define SHP_COUNT_H

static __always_inline void count_code(__u32 dir, __u32 code)
{
	__u32 slot = dir * SHP_CODE_SLOTS + (code & (SHP_CODE_SLOTS - 1));
	__u64 *packets = reasons.lookup(&slot);

	if (packets)
		*packets += 1;
}

/* virtio-net and tap leave gso_segs 0 and give only the size (SKB_GSO_DODGY). */
static __always_inline __u32 count_segments(struct __sk_buff *skb,
					    struct shp_packet *pkt)
{
	__u32 size = skb->gso_size;

	if (skb->gso_segs)
		return skb->gso_segs;
	if (!size || skb->len <= pkt->header_bytes)
		return 1;
	return (skb->len - pkt->header_bytes + size - 1) / size;
}

/*
 * Bytes on the wire, with what the NIC adds to each frame. On egress the
 * kernel has counted the headers of every segment in wire_len; on ingress a
 * merged packet carries one header for all, so the others are added.
 */
static __always_inline __u32 count_wire_bytes(struct __sk_buff *skb,
					      struct shp_packet *pkt,
					      __u32 dir)
{
	__u32 segments = count_segments(skb, pkt);
	__u32 bytes = dir == SHP_EGRESS ?
			      skb->wire_len :
			      skb->len + (segments - 1) * pkt->header_bytes;

	return bytes + segments * SHP_WIRE_OVERHEAD;
}

static __always_inline void count_packet(struct __sk_buff *skb,
					 struct shp_packet *pkt,
					 const struct shp_config *cfg,
					 __u32 dir, __u32 class, __u32 bytes,
					 int metered)
{
	__u32 slot = dir * SHP_MAX_CLASSES + (class & (SHP_MAX_CLASSES - 1));
	struct shp_count *c = counts.lookup(&slot);

	if (!c)
		return;
	if (metered == METER_DROP) {
		c->drops++;
		c->drop_wire_bytes += bytes;
		return;
	}
	c->packets++;
	c->wire_bytes += bytes;
	if (metered == METER_CE)
		c->ce_marks++;
	if (dir != SHP_EGRESS)
		return;
	if (!skb->sk)
		c->no_socket++;
	if (cfg->segment_limit_bytes &&
	    skb->len - pkt->l3_offset > cfg->segment_limit_bytes)
		c->over_segment++;
}

#endif
