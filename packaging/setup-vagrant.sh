#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs what vagrant/ needs with libvirt: Vagrant, QEMU, libvirt, and the tools that build a box.
# Safe to run again: what is there is left alone. Starts no service and changes no network.
set -eu
packages='vagrant vagrant-libvirt libvirt-daemon libvirt-daemon-driver-qemu qemu-system-x86
	qemu-utils rsync openssh-client mmdebstrap e2fsprogs python3-venv'

die() {
	printf 'error: %s\n%s\nhint: %s\n' "$1" "$2" "$3" >&2
	exit "$4"
}

missing=
for package in $packages; do
	[ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] ||
		missing="$missing $package"
done
[ -n "$missing" ] || exit 0
command -v apt-get >/dev/null ||
	die missing-package "There is no apt-get here to install$missing." "see vagrant/README.md" 4
[ "$(id -u)" -eq 0 ] ||
	die missing-privilege "Not installed:$missing." "sudo packaging/setup-vagrant.sh" 3
echo "setup-vagrant: apt-get install$missing"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# shellcheck disable=SC2086 # a list of names
if ! { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y \
	--no-install-recommends -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0 $missing; } \
	>"$log" 2>&1 </dev/null; then
	tail -n 30 "$log" >&2
	die missing-package "apt-get could not install$missing." "see the lines above" 4
fi
