/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/*
 * What BCC gives a program before its first line, as far as ours uses it, so
 * that a plain clang can check types and warn. It fakes a host for a check,
 * hence its place in tests/. Maps are structs of function pointers, as in
 * BCC's own helpers.h: a wrong key or value type is a type error here, while
 * BCC itself rewrites the call and says nothing.
 */
#ifndef BCC_SHIM_H
#define BCC_SHIM_H

#include <linux/types.h>
#include <linux/bpf.h>

#ifndef __always_inline
#define __always_inline inline __attribute__((always_inline))
#endif
#ifndef NULL
#define NULL ((void *)0)
#endif
#define offsetof(type, member) __builtin_offsetof(type, member)
#define BPF_SHIM_HELPER extern

typedef __u8 u8;
typedef __u16 u16;
typedef __u32 u32;
typedef __u64 u64;
typedef __s32 s32;
typedef __s64 s64;
typedef _Bool bool;

#define bpf_htons(x) ((__be16)__builtin_bswap16((__u16)(x)))
#define bpf_ntohs(x) ((__u16)__builtin_bswap16((__u16)(x)))
#define bpf_htonl(x) ((__be32)__builtin_bswap32((__u32)(x)))
#define bpf_ntohl(x) ((__u32)__builtin_bswap32((__u32)(x)))

#define BPF_F_TABLE(_type, _key, _leaf, _name, _max_entries, _flags)	\
	struct _name##_table_t {					\
		_key key;						\
		_leaf leaf;						\
		_leaf *(*lookup)(_key *);				\
		_leaf *(*lookup_or_try_init)(_key *, _leaf *);		\
		int (*update)(_key *, _leaf *);				\
		int (*insert)(_key *, _leaf *);				\
		int (*delete)(_key *);					\
		void (*call)(void *, int);				\
		__u32 max_entries;					\
		int flags;						\
	};								\
	struct _name##_table_t _name						\
		__attribute__((section("maps/" _type), used)) = {	\
			.max_entries = (_max_entries),			\
			.flags = (_flags),				\
	}

#define BPF_TABLE(_type, _key, _leaf, _name, _max_entries)		\
	BPF_F_TABLE(_type, _key, _leaf, _name, _max_entries, 0)
#define BPF_SHIM_PINNED7(_type, _key, _leaf, _name, _max, _path, _flags)	\
	BPF_F_TABLE(_type ":" _path, _key, _leaf, _name, _max, _flags)
#define BPF_SHIM_PINNED6(_type, _key, _leaf, _name, _max, _path)	\
	BPF_F_TABLE(_type ":" _path, _key, _leaf, _name, _max, 0)
#define BPF_SHIM_PICK7(_1, _2, _3, _4, _5, _6, _7, _name, ...) _name
#define BPF_TABLE_PINNED(...)						\
	BPF_SHIM_PICK7(__VA_ARGS__, BPF_SHIM_PINNED7, BPF_SHIM_PINNED6)(__VA_ARGS__)

#define BPF_ARRAY(_name, _leaf, _size)					\
	BPF_TABLE("array", int, _leaf, _name, _size)
#define BPF_PERCPU_ARRAY(_name, _leaf, _size)				\
	BPF_TABLE("percpu_array", int, _leaf, _name, _size)
#define BPF_HASH(_name, _key, _leaf, _size)				\
	BPF_TABLE("hash", _key, _leaf, _name, _size)
#define BPF_LPM_TRIE(_name, _key, _leaf, _size)				\
	BPF_F_TABLE("lpm_trie", _key, _leaf, _name, _size, BPF_F_NO_PREALLOC)
#define BPF_PROG_ARRAY(_name, _size)					\
	BPF_TABLE("prog", __u32, __u32, _name, _size)
#define BPF_ARRAY_OF_MAPS(_name, _inner, _size)				\
	BPF_TABLE("array_of_maps$" _inner, int, int, _name, _size)

/* Prototypes as in BCC 0.26's helpers.h. */
BPF_SHIM_HELPER void *bpf_map_lookup_elem(void *map, void *key);
BPF_SHIM_HELPER u64 bpf_ktime_get_ns(void);
BPF_SHIM_HELPER u64 bpf_ktime_get_boot_ns(void);
BPF_SHIM_HELPER u64 bpf_jiffies64(void);
BPF_SHIM_HELPER u32 bpf_get_prandom_u32(void);
BPF_SHIM_HELPER u64 bpf_get_smp_processor_id(void);
BPF_SHIM_HELPER int bpf_skb_load_bytes(void *ctx, int offset, void *to, u32 len);
BPF_SHIM_HELPER int bpf_skb_store_bytes(void *ctx, u32 offset, const void *from,
					u32 len, u64 flags);
BPF_SHIM_HELPER int bpf_skb_pull_data(void *ctx, u32 len);
BPF_SHIM_HELPER int bpf_skb_change_tail(void *ctx, u32 new_len, u64 flags);
BPF_SHIM_HELPER u64 bpf_skb_vlan_push(void *ctx, u16 proto, u16 vlan_tci);
BPF_SHIM_HELPER int bpf_l3_csum_replace(void *ctx, int off, int from, int to,
					u64 flags);
BPF_SHIM_HELPER int bpf_l4_csum_replace(void *ctx, int off, int from, int to,
					u64 flags);
BPF_SHIM_HELPER int bpf_skb_ecn_set_ce(void *ctx);
BPF_SHIM_HELPER u64 bpf_skb_cgroup_id(void *skb);
BPF_SHIM_HELPER u64 bpf_skb_ancestor_cgroup_id(void *skb, int ancestor_level);
BPF_SHIM_HELPER u64 bpf_get_socket_cookie(void *ctx);
BPF_SHIM_HELPER struct bpf_sock *bpf_sk_fullsock(struct bpf_sock *sk);
BPF_SHIM_HELPER struct bpf_tcp_sock *bpf_tcp_sock(struct bpf_sock *sk);
BPF_SHIM_HELPER u32 bpf_get_hash_recalc(void *ctx);
BPF_SHIM_HELPER int bpf_redirect(int ifindex, u32 flags);

#endif
