#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs a command as the user who typed sudo, so that what it writes is theirs.
# Without sudo, or where that user cannot write the checkout, runs it as is.
#   as-user.sh COMMAND [ARG…]   run it
#   as-user.sh --give-back      hand the build products to that user
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
uid=${SUDO_UID:-0}
gid=${SUDO_GID:-0}

as_user() {
	home=$(getent passwd "$uid" | cut -d: -f6)
	setpriv --reuid "$uid" --regid "$gid" --init-groups \
		env HOME="${home:-/}" USER="$(id -nu "$uid")" LOGNAME="$(id -nu "$uid")" "$@"
}

drop=no
if [ "$(id -u)" -eq 0 ] && [ "$uid" -ne 0 ] && as_user test -w "$root"; then
	drop=yes
fi

if [ "${1:-}" = --give-back ]; then
	[ "$drop" = yes ] || exit 0
	cd "$root"
	# -h and the default -P: links are changed, never followed.
	for path in build dist .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache; do
		[ ! -e "$path" ] || chown -hR "$uid:$gid" "$path"
	done
	find agent ctl tests -name __pycache__ -user 0 -exec chown -hR "$uid:$gid" {} +
	exit 0
fi

if [ "$drop" = yes ]; then
	as_user "$@"
else
	exec "$@"
fi
