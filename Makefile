# SPDX-License-Identifier: Apache-2.0
# Targets that need root say so. Under sudo, what is built belongs to the user who typed sudo.
.DEFAULT_GOAL := help
.PHONY: help setup demo check test test-unit test-bpf test-netns test-vm setup-vm test-vagrant bench bench-full perf clean need-root
MAKEFLAGS += --no-print-directory

PY := .venv/bin/python
AS_USER := packaging/as-user.sh
# Runs $(1), then hands what it wrote to the user behind sudo, and keeps its exit status.
run = rc=0; $(1) || rc=$$?; $(AS_USER) --give-back; exit $$rc
PYTEST := $(PY) -m pytest $(PYTEST_ARGS)

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup:  ## install what is missing (packages, .venv, kernel headers); as root the first time
	@packaging/setup.sh

demo: need-root setup  ## [root] a heartbeat beside bulk, without and with shapectl, in namespaces
	@$(call run,.venv/bin/shapectl demo $(DEMO_ARGS))

check: setup  ## format, lint, types, rooms, C warnings, ABI layout, generated files
	@$(AS_USER) packaging/check.sh

test: need-root setup  ## [root] all tests: unit, bpf and netns
	@$(call run,$(PYTEST) tests/unit tests/bpf tests/netns)

test-unit: setup  ## tests that need no privilege
	@$(AS_USER) $(PYTEST) tests/unit

test-bpf: need-root setup  ## [root] packets through the loaded program
	@$(call run,$(PYTEST) tests/bpf)

test-netns: need-root setup  ## [root] real traffic in network namespaces
	@$(call run,$(PYTEST) tests/netns)

setup-vm: need-root setup  ## [root] QEMU, virtme-ng, and Debian's kernels 6.1 and 6.12 beside the host's
	@packaging/setup-vm.sh $(KERNEL)

test-vm: setup-vm  ## [root] bpf, netns and vm tests under each kernel; KERNEL=6.12 TESTS=smoke|PATH|EXPR
	@$(call run,$(if $(filter-out smoke,$(TESTS)),true,$(PYTEST) tests/vm -p no:cacheprovider \
		-m "$(if $(TESTS),not slow,not perf)") && $(PY) -m tests.vm.run $(addprefix --kernel ,$(KERNEL)) \
		$(if $(TESTS),--tests "$(TESTS)") $(VM_ARGS))

test-vagrant: need-root setup  ## [root] vagrant up, attach, demo, netns suite, destroy (TCG); TESTS=…
	@packaging/setup-vagrant.sh
	@$(call run,$(PY) tests/vagrant/run.py $(if $(TESTS),--tests "$(TESTS)"))

bench: need-root setup  ## [root] the headline: each queue in virtual time; under 40 minutes
	@packaging/setup-vm.sh 6.12
	@$(call run,.venv/bin/shapectl bench run --set headline $(BENCH_ARGS))

bench-full: need-root setup  ## [root] every scenario, hours; goes on where it was stopped
	@WITH_ETCD=1 packaging/setup-vm.sh 6.12
	@$(call run,PATH=$$PATH:/var/lib/shapectl/programs/usr/bin .venv/bin/shapectl bench run --set all --resume $(BENCH_ARGS))

perf: need-root setup  ## [root] the benchmark table, also in build/perf.json
	@$(call run,$(PY) tests/perf/run.py $(PERF_ARGS))

clean:  ## remove build products; the host and .venv are left alone
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find agent ctl tests -name __pycache__ -type d -prune -exec rm -rf {} +

need-root:
	@[ "$$(id -u)" -eq 0 ] || { \
		echo "This needs root (BPF, network namespaces). Run: sudo make $(MAKECMDGOALS)" >&2; exit 1; }
