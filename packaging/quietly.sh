# SPDX-License-Identifier: Apache-2.0
# For the set-up scripts, which source it with `script` and `log` set: what they say, and how they
# run what is noisy.

say() { printf '%s: %s\n' "$script" "$*"; }
die() {
	say "$@" >&2
	exit 1
}

# Runs "$@" quietly; on failure shows the end of what it said.
quietly() {
	if ! "$@" >>"$log" 2>&1 </dev/null; then
		tail -n 30 "$log" >&2
		die "failed: $* (all of it: $log)"
	fi
}

is_installed() {
	[ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}
