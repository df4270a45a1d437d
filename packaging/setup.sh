#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs what shapectl needs to run from this checkout: Debian packages, .venv, and a merged
# kernel header tree. Safe to run again: what is there is left alone. Only apt and the header
# tree need root; the rest runs as the user who typed sudo.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
as_user=packaging/as-user.sh
python=/usr/bin/python3
log=build/setup.log
stamp=.venv/.shapectl-stamp
release=$(uname -r)
script=setup
. packaging/quietly.sh

have_headers() {
	[ -d "/lib/modules/$release/build" ] && return 0
	for file in /usr/src/linux-headers-*/include/generated/autoconf.h; do
		[ -f "$file" ] && return 0
	done
	return 1
}

missing_packages() {
	for package in ca-certificates python3 python3-venv python3-bpfcc libbpf1 bpftool iproute2; do
		is_installed "$package" || printf '%s ' "$package"
	done
	command -v clang-14 >/dev/null || command -v clang >/dev/null || printf 'clang '
	have_headers || printf 'headers '
}

# The first of the named packages that apt knows.
first_known() {
	for package in "$@"; do
		if apt-cache show "$package" >/dev/null 2>&1; then
			printf '%s' "$package"
			return 0
		fi
	done
	return 1
}

install_packages() {
	say "apt-get update"
	quietly apt-get update -q
	wanted=
	for name in $1; do
		case $name in
		clang) name=$(first_known clang-14 clang) ;;
		headers)
			arch=$(dpkg --print-architecture)
			name=$(first_known "linux-headers-$release" "linux-headers-$arch") ||
				die "apt knows no kernel headers for $release or $arch"
			;;
		esac
		wanted="$wanted $name"
	done
	say "apt-get install$wanted"
	# shellcheck disable=SC2086 # a list of names
	quietly env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends \
		-o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0 $wanted
}

# What decides whether .venv is up to date.
fingerprint() {
	{
		printf '%s\n' "$root"
		"$python" -V
		cat pyproject.toml packaging/setup.sh packaging/shapectl-panic-off
	} | sha256sum
}

build_venv() {
	"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
		die "$("$python" -V) is too old: shapectl needs Python 3.11 (Debian 12)"
	fresh=
	if ! .venv/bin/python -c '' 2>/dev/null ||
		[ "$(.venv/bin/python -V)" != "$("$python" -V)" ]; then
		fresh=--clear
	fi
	say "Python packages into .venv (one to two minutes)"
	if [ -n "$fresh" ]; then
		quietly "$as_user" "$python" -m venv --system-site-packages --clear .venv
	fi
	quietly "$as_user" .venv/bin/python -m pip install --disable-pip-version-check -q -e '.[dev]'
	fingerprint | "$as_user" tee "$stamp" >/dev/null
}

am_root=no
[ "$(id -u)" -ne 0 ] || am_root=yes
packaging/as-user.sh --give-back # what an earlier plain root run may have left
"$as_user" mkdir -p build
: | "$as_user" tee "$log" >/dev/null

missing=$(missing_packages)
if [ -n "$missing" ]; then
	[ "$am_root" = yes ] || die "missing: ${missing% }. Run: sudo make setup"
	install_packages "$missing"
fi

if [ ! -x .venv/bin/shapectl ] || [ ! -x .venv/bin/pytest ] || [ ! -f "$stamp" ] ||
	[ "$(cat "$stamp")" != "$(fingerprint)" ]; then
	build_venv
fi

.venv/bin/python -c 'import bcc; bcc.BPF' 2>>"$log" || die "the module bcc that .venv sees is not \
Debian's python3-bpfcc. Run: .venv/bin/pip uninstall bcc; sudo apt-get install python3-bpfcc"

if [ "$am_root" = yes ]; then
	headers=$(.venv/bin/python -B -m shapeagent.kernel.headers) || exit
	packaging/as-user.sh --give-back
	say "done (kernel headers: $headers)"
else
	say "done"
fi
