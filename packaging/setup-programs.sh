#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Unpacks programs that tests and benchmarks compare with, and does not install them: Debian's
# packages would start them as services of this host.
# Safe to run again: what is there is left alone. Undo: rm -r /var/lib/shapectl/programs.
#   setup-programs.sh etcd|prometheus…
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
as_user=packaging/as-user.sh
programs=/var/lib/shapectl/programs
log=build/setup-programs.log
script=setup-programs
. packaging/quietly.sh

updated=
fetch() {
	package=$1
	if [ -z "$updated" ]; then
		say "apt-get update"
		quietly apt-get update -q
		updated=yes
	fi
	mkdir -p "$programs"
	free_mb=$(df -Pm "$programs" | awk 'NR == 2 { print $4 }')
	[ "$free_mb" -ge 300 ] || die "no-disk-space: $programs has $free_mb MB free, 300 MB are needed"
	work=$(mktemp -d "$programs/.new-XXXXXX")
	# shellcheck disable=SC2064 # now, not later
	trap "rm -rf '$work'" EXIT
	say "unpack $package into $programs"
	(cd "$work" && apt-get download -q -o APT::Sandbox::User=root "$package") >>"$log" 2>&1 ||
		die "apt can fetch no $package (see $log)"
	quietly dpkg-deb -x "$work/$package"_*.deb "$programs"
	rm -rf "$work"
	trap - EXIT
}

[ "$(id -u)" -eq 0 ] || die "need-root. Run: sudo packaging/setup-programs.sh $*"
[ $# -gt 0 ] || die "which: etcd, prometheus"
"$as_user" mkdir -p build
: | "$as_user" tee "$log" >/dev/null
for name in "$@"; do
	case $name in
	etcd) package=etcd-server program=etcd ;;
	prometheus) package=prometheus program=promtool ;;
	*) die "unknown: $name (etcd or prometheus)" ;;
	esac
	PATH=$PATH:$programs/usr/bin command -v "$program" >/dev/null || fetch "$package"
done
packaging/as-user.sh --give-back
say "done"
