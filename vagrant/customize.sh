#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# What makes a Debian root a Vagrant guest with shapectl's set-up done; run by build-box.sh.
# usage: customize.sh ROOT CHECKOUT WHEELS PUBLIC_KEY
set -euo pipefail
root=$1 checkout=$2 wheels=$3 public_key=$4

chroot "$root" useradd -m -s /bin/bash vagrant
echo 'vagrant ALL=(ALL) NOPASSWD:ALL' >"$root/etc/sudoers.d/vagrant"
chmod 440 "$root/etc/sudoers.d/vagrant"
# Vagrant logs in once by its well-known key and puts one of its own in place.
install -d -m 700 "$root/home/vagrant/.ssh"
install -m 600 "$public_key" "$root/home/vagrant/.ssh/authorized_keys"
chroot "$root" chown -R vagrant:vagrant /home/vagrant/.ssh
printf 'UseDNS no\nGSSAPIAuthentication no\nPasswordAuthentication no\n' \
	>"$root/etc/ssh/sshd_config.d/vagrant.conf"

echo shapectl >"$root/etc/hostname"
printf '127.0.0.1 localhost\n127.0.1.1 shapectl\n' >"$root/etc/hosts"
echo '/dev/vda / ext4 defaults,noatime 0 1' >"$root/etc/fstab"
: >"$root/etc/machine-id"

"$checkout/vagrant/network.sh" --install "$root"
chroot "$root" systemctl -q enable ssh serial-getty@ttyS0.service
# A VM of an hour needs none of these, and they would run beside measurements.
chroot "$root" systemctl -q mask apt-daily.timer apt-daily-upgrade.timer e2scrub_all.timer \
	fstrim.timer dpkg-db-backup.timer

# BCC wants headers, not the gcc that their package depends on: unpack only.
release=$(find "$root/lib/modules" -mindepth 1 -maxdepth 1 -printf '%f\n' | sort -V | tail -n 1)
common=$(chroot "$root" apt-cache show "linux-headers-$release" |
	sed -n 's/^Depends: .*\(linux-headers-[^ ]*-common\).*/\1/p' | head -n 1)
# systemd-resolved made it a link that leads nowhere yet.
rm -f "$root/etc/resolv.conf"
cp -L /etc/resolv.conf "$root/etc/resolv.conf"
chroot "$root" sh -c "cd /tmp && apt-get -qq download linux-headers-$release $common"
for package in "$root"/tmp/linux-headers-*.deb; do
	dpkg-deb --fsys-tarfile "$package" | tar -x --keep-directory-symlink -C "$root"
	rm "$package"
done

# `make setup`, done here by the native CPU and from wheels: `vagrant up` needs no index then.
install -d -o 1000 -g 1000 "$root/vagrant" "$root/tmp/wheels"
tar -C "$checkout" -c --exclude=./.git --exclude=./.venv --exclude=./build --exclude=./dist \
	--exclude=./vagrant/.vagrant --exclude=__pycache__ . | tar -x --no-same-owner -C "$root/vagrant"
cp "$wheels"/*.whl "$root/tmp/wheels/"
chroot "$root" chown -R vagrant:vagrant /vagrant
chroot "$root" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 SUDO_UID=1000 SUDO_GID=1000 \
	PIP_NO_INDEX=1 PIP_FIND_LINKS=/tmp/wheels PIP_NO_CACHE_DIR=1 /vagrant/packaging/setup.sh
# The first attach takes the compiled program from here while the sources are the same.
chroot "$root" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 /vagrant/.venv/bin/python -B \
	-c 'from shapeagent.kernel.compile import find_image; find_image()' ||
	echo "customize: this host's kernel could not load the program; the guest will compile it" >&2
find "$root/vagrant" -mindepth 1 -maxdepth 1 ! -name .venv -exec rm -rf {} +
ln -s /vagrant/.venv/bin/shapectl "$root/usr/local/bin/shapectl"

rm -f "$root"/etc/ssh/ssh_host_*
chroot "$root" ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/ssh_host_ed25519_key
rm -f "$root/etc/resolv.conf"
ln -s ../run/systemd/resolve/resolv.conf "$root/etc/resolv.conf"
rm -rf "$root"/tmp/wheels "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
date -u +%FT%TZ >"$root/etc/shapectl-box"
