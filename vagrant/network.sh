#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The guest's three NICs, at every boot (shapectl-vm-network.service), before the network starts:
#   mgmt0  SSH and the way out; DHCP
#   eth0   the data NIC, 10.77.0.1/24: attach shapectl to this one
#   peer0  the other end of eth0's cable, 10.77.0.2/24, in the namespace `peer`
# NICs are known by MAC: which one the kernel finds first differs between providers.
# usage: network.sh            name and set up the NICs
#        network.sh --install  [ROOT] make it the guest's set-up
set -eu
mgmt_mac=52:54:00:5a:be:01
data_mac=52:54:00:5a:be:02
peer_mac=52:54:00:5a:be:03
# What an emulated NIC carries also without KVM; a virtio NIC has no speed of its own.
speed_mbit=100

find_nic() {
	for folder in /sys/class/net/*; do
		if [ "$(cat "$folder/address" 2>/dev/null)" = "$1" ]; then
			basename "$folder"
			return 0
		fi
	done
	return 1
}

wait_for_nic() {
	tries=300
	until find_nic "$1" >/dev/null; do
		tries=$((tries - 1))
		if [ "$tries" -eq 0 ]; then
			echo "no-such-nic: no NIC has the MAC $1; see the Vagrantfile" >&2
			exit 1
		fi
		sleep 0.1
	done
}

set_up() {
	ip netns list | grep -qw peer || ip netns add peer
	ip -n peer link set lo up
	wait_for_nic "$mgmt_mac"
	wait_for_nic "$data_mac"
	if ! ip -n peer link show peer0 >/dev/null 2>&1; then
		wait_for_nic "$peer_mac"
		nic=$(find_nic "$peer_mac")
		ip link set "$nic" down
		[ "$nic" = peer0 ] || ip link set "$nic" name peer0
		ip link set peer0 netns peer
	fi
	# eth0 may be another's name until now: two steps.
	for one in "$mgmt_mac:mgmt0" "$data_mac:eth0"; do
		nic=$(find_nic "${one%:*}")
		[ "$nic" = "${one##*:}" ] && continue
		ip link set "$nic" down
		ip link set "$nic" name "was-${one##*:}"
	done
	for name in mgmt0 eth0; do
		[ ! -e "/sys/class/net/was-$name" ] || ip link set "was-$name" name "$name"
	done
	ethtool -s eth0 speed "$speed_mbit" duplex full
	ip -n peer address replace 10.77.0.2/24 dev peer0
	ip -n peer address replace fd77::2/64 dev peer0 nodad
	ip address replace 10.77.0.1/24 dev eth0
	ip address replace fd77::1/64 dev eth0 nodad
	ip -n peer link set peer0 up
	ip link set eth0 up
}

install_here() {
	root=$1
	install -D -m 755 "$0" "$root/usr/local/sbin/shapectl-vm-network"
	cat >"$root/etc/systemd/system/shapectl-vm-network.service" <<-UNIT
		[Unit]
		Description=NICs of the shapectl VM: mgmt0, eth0, and peer0 in namespace peer
		Wants=network-pre.target
		Before=network-pre.target systemd-networkd.service
		After=systemd-udev-trigger.service

		[Service]
		Type=oneshot
		RemainAfterExit=yes
		ExecStart=/usr/local/sbin/shapectl-vm-network

		[Install]
		WantedBy=multi-user.target
	UNIT
	# The only .network file: the data NIC and the tests' devices stay unmanaged.
	install -d "$root/etc/systemd/network"
	cat >"$root/etc/systemd/network/10-mgmt0.network" <<-NETWORK
		[Match]
		MACAddress=$mgmt_mac

		[Network]
		DHCP=ipv4
		LinkLocalAddressing=no
		IPv6AcceptRA=no

		[DHCPv4]
		ClientIdentifier=mac
	NETWORK
	systemctl --root="${root:-/}" enable shapectl-vm-network.service systemd-networkd.service \
		systemd-resolved.service
	systemctl --root="${root:-/}" mask systemd-networkd-wait-online.service
	if [ -f "$root/etc/network/interfaces" ]; then
		printf 'auto lo\niface lo inet loopback\n' >"$root/etc/network/interfaces"
	fi
}

if [ "${1:-}" = --install ]; then
	install_here "${2:-}"
else
	set_up
fi
