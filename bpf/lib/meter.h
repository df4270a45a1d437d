/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Rates in BPF: the generic cell rate algorithm (ITU-T I.371), one u64 per
 * meter, no lock. The theoretical arrival time runs ahead of the clock by
 * what is queued or spent.
 */
#ifndef SHP_METER_H
#define SHP_METER_H

#define METER_TRIES 3	/* races with other CPUs before the slow way */

static __always_inline __u64 meter_cost_ns(__u64 cost, __u32 bytes)
{
	return (cost * bytes) >> SHP_COST_SHIFT;
}

/*
 * Spend cost_ns if the source is not more than burst_ns ahead. Never spends
 * more than allowed: three lost races count as excess.
 */
static __always_inline int meter_spend(__u64 *tat, __u64 now, __u64 cost_ns,
				       __u64 burst_ns)
{
#pragma unroll
	for (int i = 0; i < METER_TRIES; i++) {
		__u64 seen = *tat;
		__u64 base = seen > now ? seen : now;

		if (base - now > burst_ns)
			return 0;
		if (__sync_val_compare_and_swap(tat, seen, base + cost_ns) == seen)
			return 1;
	}
	return 0;
}

#define METER_PASS 0
#define METER_CE 1
#define METER_DROP 2

/*
 * Meter a class at a ceiling. The virtual queue is how far the meter is
 * ahead; above ce_ns packets are marked, above drop_ns dropped. A packet
 * that loses every race is charged all the same, so the rate holds.
 */
static __always_inline int meter_ceiling(__u64 *tat, __u64 now, __u64 cost_ns,
					 __u64 ce_ns, __u64 drop_ns)
{
	__u64 queue = 0;
	int done = 0;

#pragma unroll
	for (int i = 0; i < METER_TRIES; i++) {
		__u64 seen = *tat;
		__u64 base = seen > now ? seen : now;

		queue = base - now;
		if (queue > drop_ns)
			return METER_DROP;
		if (__sync_val_compare_and_swap(tat, seen, base + cost_ns) == seen) {
			done = 1;
			break;
		}
	}
	if (!done)
		__sync_fetch_and_add(tat, cost_ns);
	return queue > ce_ns ? METER_CE : METER_PASS;
}

#endif
