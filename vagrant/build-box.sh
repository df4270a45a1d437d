#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Builds build/vagrant/shapectl.box: Debian 12 with kernel 6.12, for vagrant-libvirt. Root; about two
# minutes; nothing but Debian's archive and the Python index is asked. A box that is up to date is
# left alone.
# usage: build-box.sh [--print-digest]
set -euo pipefail
trap 'echo "error: box-build-failed (build-box.sh, line $LINENO)" >&2' ERR
checkout=$(cd "$(dirname "$0")/.." && pwd)
out=$checkout/build/vagrant
kernel_package=linux-image-6.12-cloud-amd64
suite=bookworm
disk_gb=6
need_mb=4000

die() {
	printf 'error: %s\n%s\nhint: %s\n' "$1" "$2" "$3" >&2
	exit "${4:-1}"
}

# Everything that the box is made of; what `vagrant up` copies in is not.
digest() {
	(cd "$checkout" && cat vagrant/build-box.sh vagrant/customize.sh vagrant/network.sh \
		vagrant/packages.txt vagrant/Vagrantfile.box pyproject.toml packaging/setup.sh) |
		sha256sum | cut -c 1-12
}

case ${1:-} in
--print-digest)
	digest
	exit
	;;
'') ;;
*) die bad-argument "build-box.sh does not know \"$1\"." "build-box.sh [--print-digest]" 2 ;;
esac

if [ -f "$out/shapectl.box" ] && [ "$(cat "$out/shapectl.box.digest" 2>/dev/null)" = "$(digest)" ]; then
	echo "box: up to date ($out/shapectl.box)"
	exit
fi

[ "$(id -u)" -eq 0 ] || die missing-privilege "Building a box needs root." "sudo vagrant/build-box.sh" 3
[ "$(dpkg --print-architecture 2>/dev/null)" = amd64 ] ||
	die unsupported-host "The box is built from Debian packages for amd64, on Debian or Ubuntu." \
		"use VirtualBox or a public box: vagrant/README.md" 4
public_key=$(find /usr/share/rubygems-integration /opt/vagrant -path '*/keys/vagrant.pub' 2>/dev/null | head -n 1 || true)
for tool in mmdebstrap qemu-img mkfs.ext4; do
	command -v "$tool" >/dev/null || die missing-tool "$tool is not installed." \
		"sudo packaging/setup-vagrant.sh" 4
done
[ -n "$public_key" ] || die missing-tool "vagrant is not installed." "sudo packaging/setup-vagrant.sh" 4
"$checkout/packaging/as-user.sh" mkdir -p "$out"
free_mb=$(df -m --output=avail "$out" | tail -n 1)
[ "$free_mb" -ge "$need_mb" ] || die no-disk-space \
	"Building the box needs $need_mb MB in $out, and $((free_mb)) MB are free." "make room and run it again"

work=$(mktemp -d "$out/work.XXXXXX")
chmod 755 "$work"
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
log=$out/build-box.log
: >"$log"
step() {
	echo "box: $1 ($(($(date +%s) - started)) s)"
	shift
	if ! "$@" >>"$log" 2>&1 </dev/null; then
		tail -n 30 "$log" >&2
		die box-build-failed "Failed: $1." "all of it: $log"
	fi
}
started=$(date +%s)

mirror=http://deb.debian.org/debian
security=http://deb.debian.org/debian-security
if grep -q '^ID=debian' /etc/os-release; then # the archive that this host uses
	found=$(sed -nE 's/^(URIs:|deb) *(https?:[^ ]*[^ \/])\/? *.*$/\2/p' /etc/apt/sources.list \
		/etc/apt/sources.list.d/*.sources /etc/apt/sources.list.d/*.list 2>/dev/null || true)
	mirror=$(grep -m 1 '/debian$' <<<"$found" || echo "$mirror")
	security=$(grep -m 1 '/debian-security$' <<<"$found" || echo "$security")
fi

# The guest's Python packages, as wheels for its Python: pip runs on the host, with its settings.
fetch_wheels() {
	python3 -m venv "$work/venv"
	python3 - "$checkout/pyproject.toml" >"$work/requirements.txt" <<-'PYTHON'
		import sys, tomllib
		project = tomllib.load(open(sys.argv[1], "rb"))["project"]
		print("\n".join([*project["dependencies"], *project["optional-dependencies"]["dev"]]))
	PYTHON
	"$work/venv/bin/pip" download -q --disable-pip-version-check --only-binary=:all: \
		--python-version 3.11 --implementation cp --abi cp311 --abi abi3 --abi none \
		--platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
		--platform manylinux2014_x86_64 --platform manylinux1_x86_64 --platform any \
		-d "$work/wheels" -r "$work/requirements.txt" editables
}

make_root() {
	local packages
	packages=$(grep -v '^#' "$checkout/vagrant/packages.txt" | paste -sd,)
	# shellcheck disable=SC2016 # $1 is the hook's own
	mmdebstrap --variant=minbase --mode=root --format=directory --quiet \
		--aptopt='APT::Install-Recommends "false"' --aptopt='Acquire::Languages "none"' \
		--dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
		--dpkgopt='path-exclude=/usr/share/locale/*' \
		--include="systemd-sysv,initramfs-tools,zstd,$kernel_package,$packages" \
		--essential-hook='mkdir -p "$1/etc/initramfs-tools/conf.d"
			echo MODULES=list >"$1/etc/initramfs-tools/conf.d/list.conf"
			printf "%s\n" virtio_pci virtio_blk virtio_net ext4 crc32c_generic >"$1/etc/initramfs-tools/modules"' \
		--customize-hook="'$checkout/vagrant/customize.sh' \"\$1\" '$checkout' '$work/wheels' '$public_key'" \
		"$suite" "$work/root" "deb $mirror $suite main" "deb $mirror $suite-updates main" \
		"deb $security $suite-security main"
}

make_image() {
	truncate -s "${disk_gb}G" "$work/root.raw"
	mkfs.ext4 -q -F -L shapectl -O ^metadata_csum -E lazy_itable_init=1 -d "$work/root" "$work/root.raw"
	qemu-img convert -O qcow2 -c -o compression_type=zstd "$work/root.raw" "$work/box.img"
	cp -L "$work"/root/boot/vmlinuz-6.* "$work/vmlinuz"
	cp -L "$work"/root/boot/initrd.img-6.* "$work/initrd.img"
	chmod 644 "$work/vmlinuz" "$work/initrd.img"
	cp "$checkout/vagrant/Vagrantfile.box" "$work/Vagrantfile"
	printf '{"provider": "libvirt", "format": "qcow2", "virtual_size": %d}\n' "$disk_gb" >"$work/metadata.json"
	tar -C "$work" -cf "$work/shapectl.box" metadata.json Vagrantfile box.img vmlinuz initrd.img
}

step "Python wheels" fetch_wheels
step "Debian root, $kernel_package, make setup" make_root
step "disk image" make_image
chmod 644 "$work/shapectl.box"
rm -f "$out/shapectl.box.digest"
mv "$work/shapectl.box" "$out/shapectl.box"
digest >"$out/shapectl.box.digest"
"$checkout/packaging/as-user.sh" --give-back
echo "box: $out/shapectl.box, $(du -m "$out/shapectl.box" | cut -f 1) MB, $(($(date +%s) - started)) s"
