#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# All checks that run nothing of the product: `make check`. Each one runs, also after a failure.
set -u
cd "$(dirname "$0")/.." || exit 1
bin=.venv/bin
failed=

step() {
	name=$1
	shift
	if output=$("$@" 2>&1); then
		printf 'ok    %s\n' "$name"
	else
		printf 'FAIL  %s: %s\n%s\n' "$name" "$*" "$output"
		failed="$failed $name;"
	fi
}

step 'format' $bin/ruff format --check --quiet --diff .
step 'lint' $bin/ruff check --quiet .
step 'types' $bin/mypy --no-error-summary
step 'rooms' $bin/lint-imports --no-logo
step 'C warnings' $bin/python -m tests.check.check_c
step 'ABI layout' $bin/python -m tests.check.check_abi
step 'generated files' $bin/python -m shapectl.docs --check
step 'API code' $bin/python -m shapeagent.proto.generate --check
step 'performance page' $bin/python -m shapeagent.lab.bench.document --check

if [ -n "$failed" ]; then
	printf 'make check failed:%s\n' "$failed" >&2
	exit 1
fi
printf 'make check: all clean\n'
