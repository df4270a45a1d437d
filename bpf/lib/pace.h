/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Departure times (profile edt): the qdisc below is fq, which sends a packet
 * when its time stamp says so. One clock per class, for the whole device: the
 * next departure, which no packet may undercut, so stamps only grow within a
 * class and no flow is reordered, also when its ceiling rises.
 *
 * Where the link is slower than the device, a second clock tells when the
 * link is free. Every packet moves it on, only paced classes wait for it: they
 * yield what the others send, however little or much that is. What the others
 * send beyond the link less the paced classes' guarantee does not count, or
 * paced classes would starve.
 */
#ifndef SHP_PACE_H
#define SHP_PACE_H

#define PACE_HARD_SHIFT 2	/* spared packets too are dropped at 4 times the limit */
#define PACE_HORIZON_NS 10000000000ULL	/* fq's; policy/plan.py gives it to fq */

/*
 * Take the next departure, not before `from`; moves the clock on by cost_ns.
 * Who loses the race adds to a clock that the winner has just set: no loop.
 */
static __always_inline __u64 pace_take(__u64 *clock, __u64 from, __u64 cost_ns)
{
	__u64 seen = *clock;
	__u64 base = seen > from ? seen : from;

	if (__sync_val_compare_and_swap(clock, seen, base + cost_ns) == seen)
		return base;
	seen = __sync_fetch_and_add(clock, cost_ns);
	return seen > from ? seen : from;
}

/*
 * A TCP flow whose last packet was dropped here keeps this one, and so does
 * one with nothing in flight: no ACK would tell it, only a timer of 200 ms.
 * After HBM (linux samples/bpf/hbm_edt_kern.c), which spares packets_out <= 1.
 * Datagrams are never spared.
 */
static __always_inline int pace_spares(struct __sk_buff *skb,
				       struct shp_packet *pkt)
{
	struct bpf_sock *sk = skb->sk;
	__u32 flow;
	__u8 dropped = 1;

	if (pkt->parsed)
		return 0;
	if (pkt->protocol != IPPROTO_TCP)
		return 0;
	if (sk) {
		sk = bpf_sk_fullsock(sk);
		if (sk) {
			struct bpf_tcp_sock *tcp = bpf_tcp_sock(sk);

			if (tcp && tcp->packets_out <= 1)
				return 1;
		}
	}
	flow = bpf_get_hash_recalc(skb);
	if (spared.lookup(&flow)) {
		spared.delete(&flow);
		return 1;
	}
	spared.update(&flow, &dropped);
	return 0;
}

/* Fq orders a flow by its stamps; one that the sender asked for and is later stays. */
static __always_inline void pace_stamp(struct __sk_buff *skb, __u64 departure,
				       __u64 now)
{
	if (departure > now && departure > skb->tstamp)
		skb->tstamp = departure;
}

/*
 * A stamp beyond fq's horizon was read from another clock, as a forwarded
 * packet's time of arrival is, and fq would hold the packet for all of it.
 * Source: siderolabs/talos issue 13745.
 */
static __always_inline void pace_distrust(struct __sk_buff *skb, __u64 now)
{
	if (skb->tstamp > now + PACE_HORIZON_NS)
		skb->tstamp = 0;
}

/* Whether the link's clock counts a packet that nobody paced. */
static __always_inline int pace_counts(struct shp_meter *link,
				       const struct shp_config *cfg, __u64 now,
				       __u32 bytes)
{
	return meter_spend(&link->rest_tat_ns, now,
			   meter_cost_ns(cfg->link_rest_cost, bytes),
			   cfg->link_burst_ns);
}

/*
 * Queue a packet of a paced class in time, from when the link is free:
 * METER_CE beyond ce_ns of queue, METER_DROP beyond drop_ns.
 */
static __always_inline int pace_queue(struct __sk_buff *skb,
				      struct shp_packet *pkt, __u64 *clock,
				      __u64 now, __u64 from, __u64 cost_ns,
				      __u64 ce_ns, __u64 drop_ns)
{
	__u64 next = *clock;
	__u64 queue = (next > from ? next : from) - now;

	if (queue > drop_ns) {
		if (queue > drop_ns << PACE_HARD_SHIFT)
			return METER_DROP;
		if (!pace_spares(skb, pkt))
			return METER_DROP;
	}
	pace_stamp(skb, pace_take(clock, from, cost_ns), now);
	return queue > ce_ns ? METER_CE : METER_PASS;
}

#endif
