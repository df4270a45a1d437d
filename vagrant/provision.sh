#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs in the guest, as root, at `vagrant up` and `vagrant provision`. In our own box everything is
# there already and this only checks it; in any other Debian 12 it installs what the box would have.
set -eu
cd /vagrant
if [ ! -f /etc/shapectl-box ]; then
	export DEBIAN_FRONTEND=noninteractive
	apt-get update -q
	# shellcheck disable=SC2046 # a list of names
	apt-get install -q -y --no-install-recommends $(grep -v '^#' vagrant/packages.txt)
	vagrant/network.sh --install
	ln -sf /vagrant/.venv/bin/shapectl /usr/local/bin/shapectl
fi
packaging/setup.sh
shapectl --version
ip -br link
