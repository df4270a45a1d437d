#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs what `make test-vm` and `make bench` need beside `make setup`: QEMU and a few tools by
# apt, virtme-ng into .venv, and Debian's kernels 6.1 and 6.12. The kernels are unpacked into
# /var/lib/shapectl/kernels and not installed, since the host would boot the newest one next.
# Safe to run again: what is there is left alone. Undo: rm -r /var/lib/shapectl/kernels.
# With WITH_ETCD=1 also etcd, by setup-programs.sh.
#   setup-vm.sh [SERIES…]
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
as_user=packaging/as-user.sh
python=.venv/bin/python
kernels=/var/lib/shapectl/kernels
log=build/setup-vm.log
[ $# -gt 0 ] || set -- 6.1 6.12
script=setup-vm
. packaging/quietly.sh

have_kernel() {
	$python -c 'import sys; from shapeagent.lab.vm import find_kernel; find_kernel(sys.argv[1])' \
		"$1" >>"$log" 2>&1
}

updated=
update_lists() {
	[ -z "$updated" ] || return 0
	say "apt-get update"
	quietly apt-get update -q
	updated=yes
}

need_free_mb() {
	free_mb=$(df -Pm "$1" | awk 'NR == 2 { print $4 }')
	[ "$free_mb" -ge "$2" ] || die "no-disk-space: $1 has $free_mb MB free, $2 MB are needed"
}

# The plain amd64 images of a series that apt can fetch, newest first.
images_of() {
	apt-cache pkgnames "linux-image-$1." |
		grep -E "^linux-image-$(printf '%s' "$1" | sed 's/\./\\./')\.[0-9][0-9a-z.+~-]*-amd64\$" |
		grep -Ev -- '-(cloud|rt)-' | sort -rV
}

# Unpacks the newest image of a series whose package is really there.
fetch_kernel() {
	series=$1
	update_lists
	mkdir -p "$kernels"
	need_free_mb "$kernels" 1200
	work=$(mktemp -d "$kernels/.new-XXXXXX")
	# shellcheck disable=SC2064 # now, not later
	trap "rm -rf '$work'" EXIT
	for package in $(images_of "$series"); do
		release=${package#linux-image-}
		say "unpack $package into $kernels/$release"
		(cd "$work" && apt-get download -q -o APT::Sandbox::User=root "$package") >>"$log" 2>&1 || continue
		quietly dpkg-deb -x "$work"/linux-image-*.deb "$work/root"
		rm -f "$work"/linux-image-*.deb
		quietly depmod -b "$work/root" "$release"
		rm -rf "${kernels:?}/$release"
		mv "$work/root" "$kernels/$release"
		chmod 0755 "$kernels/$release"
		rm -rf "$work"
		trap - EXIT
		return 0
	done
	die "kernel-image-missing: apt can fetch no linux-image-$series.*-amd64 (Debian 12 has them)"
}

[ "$(id -u)" -eq 0 ] || die "need-root. Run: sudo make setup-vm"
[ "$(dpkg --print-architecture)" = amd64 ] || die "the virtual machines need an amd64 host"
"$as_user" mkdir -p build
: | "$as_user" tee "$log" >/dev/null

missing=
for package in qemu-system-x86 busybox-static kmod udev zstd; do
	is_installed "$package" || missing="$missing $package"
done
if [ -n "$missing" ]; then
	update_lists
	need_free_mb / 1500
	say "apt-get install$missing"
	# shellcheck disable=SC2086 # a list of names
	quietly env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends \
		-o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0 $missing
fi

if ! $python -c 'import sys, importlib.metadata as m
sys.exit(not m.version("virtme-ng").startswith("1.42"))' 2>>"$log"; then
	say "virtme-ng into .venv"
	quietly "$as_user" $python -m pip install --disable-pip-version-check -q -e '.[vm]'
fi

for series in "$@"; do
	have_kernel "$series" || fetch_kernel "$series"
	have_kernel "$series" || die "kernel-image-missing: $series (see $log)"
done
[ -z "${WITH_ETCD:-}" ] || packaging/setup-programs.sh etcd

packaging/as-user.sh --give-back
say "done"
