// SPDX-License-Identifier: GPL-2.0-only
/*
 * Programs that change something before each packet of a test run and then
 * jump into the classifier, or into the empty program. The difference of the
 * two is the classifier's cost under that change.
 */
#include <uapi/linux/bpf.h>
#include <uapi/linux/pkt_cls.h>

#define WRAP_IP_SOURCE 26	/* Ethernet 14, IPv4 source at 12 */
#define WRAP_PORTS 34

struct wrap_range {		/* addresses: base + ((index * step) & mask) << shift */
	__u32 base;
	__u32 count;
	__u32 step;
	__u32 mask;
	__u32 shift;
	__u32 local;		/* 1: the local address is random too */
};

BPF_TABLE("array", __u32, __u64, ctl, 1);
BPF_TABLE("array", __u32, struct wrap_range, range, 1);
BPF_TABLE("prog", __u32, __u32, jump, 1);

/* A replaced whitelist before each packet: what lists decided is stale. */
int perf_stale(struct __sk_buff *skb)
{
	__u32 zero = 0;
	__u64 *word = ctl.lookup(&zero);

	if (word)
		*word += 1ULL << 30;	/* SHP_LISTS_SHIFT */
	jump.call(skb, 0);
	return TC_ACT_SHOT;
}

/* A flow that was never seen: remote address from the range, local port random. */
int perf_random(struct __sk_buff *skb)
{
	__u32 zero = 0;
	struct wrap_range *r = range.lookup(&zero);
	__u32 address[2];
	__u16 port;

	if (!r || !r->count)
		return TC_ACT_SHOT;
	address[1] = bpf_get_prandom_u32();
	address[0] = r->local ? address[1] * 2654435761U : bpf_htonl(0xc0000201);
	address[1] = r->base +
		     (((address[1] % r->count * r->step) & r->mask) << r->shift);
	address[1] = bpf_htonl(address[1]);
	port = bpf_get_prandom_u32() | 0x8080;
	bpf_skb_store_bytes(skb, WRAP_IP_SOURCE, address, 8, 0);
	bpf_skb_store_bytes(skb, WRAP_PORTS, &port, 2, 0);
	jump.call(skb, 0);
	return TC_ACT_SHOT;
}

/* One of 1,024 flows, by its local port. */
int perf_flows(struct __sk_buff *skb)
{
	__u16 port = bpf_htons(0x8000 | (bpf_get_prandom_u32() & 1023));

	bpf_skb_store_bytes(skb, WRAP_PORTS, &port, 2, 0);
	jump.call(skb, 0);
	return TC_ACT_SHOT;
}
