# make up: set everything up and serve the demo model. make test: set up what the tests need and pass them.
VENV := .venv
PYTHON ?= python3
RUN := $(VENV)/bin/python -m
PIP := $(RUN) pip --disable-pip-version-check -q
# On a terminal pip shows how far a download is.
SHOWN := $(RUN) pip --disable-pip-version-check $(shell test -t 2 || echo -q)
# a test that waits for ever ends the run, which names it (tests/conftest.py has the bound of an async one)
STUCK_S := 300
PYTEST = $(RUN) pytest -q -rfEs -o faulthandler_timeout=$(STUCK_S) -o faulthandler_exit_on_timeout=true --max-worker-restart=0
# Python keeps what it compiled, whatever the shell says: the tests start it hundreds of times.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: up setup test long check tiers unit-long compiled models real avx2 arm properties unit integration e2e fuzz audit simulation chaos-short chaos redis-7 chart clients package hardened containers clean

up: setup
	@exec ./baton up $(ARGS)

setup: $(VENV)/.serving

# torch first, by itself: its build decides what else it brings. TORCH=cpu or cuda chooses one, TORCH_INDEX=ADDRESS says where it is;
# else it is a CPU's where there is no GPU (cli/torch_build.py).
$(VENV)/.serving: constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "baton: needs Python 3.11 or later: make PYTHON=python3.11")'
	@test -x $(VENV)/bin/python || { echo "making $(VENV) …"; $(PYTHON) -m venv $(VENV); }
	@TORCH="$(TORCH)" TORCH_INDEX="$(TORCH_INDEX)" $(RUN) cli.torch_build torch==$$(sed -n 's/^torch==//p' constraints.txt)
	@echo "installing what serving needs (once, 0.1 GB) …" && $(RUN) cli.requirements gateway worker servers ucx otel chat > $@.txt
	@$(SHOWN) install -c constraints.txt -r $@.txt && touch $@

# triton comes with a torch for GPUs; without one, its interpreter alone runs the kernels' tests
$(VENV)/.testing: $(VENV)/.serving
	@echo "installing what the tests need (once) …" && $(RUN) cli.requirements dev > $@.txt
	@$(VENV)/bin/python -c 'import triton' 2>/dev/null || $(PIP) install triton==3.6.0
	@$(PIP) install -c constraints.txt -r $@.txt && touch $@

test: check tiers

# What takes longer than a person waits: more seeds, longer fuzzing. CI's script runs it after `make test`.
# `make compiled` is apart: a change of kernels needs it.
long: chaos-short unit-long models properties simulation fuzz arm

check: $(VENV)/.testing
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy
	$(VENV)/bin/lint-imports

unit integration e2e: $(VENV)/.testing
	$(PYTEST) -n 2 --dist loadfile -m "not long" tests/$@

# One run: no core waits for the other at the end of each tier. A third of the time is spent waiting: four tests share two cores.
# The longest files come first, in the order given: the last ones take some seconds, so that the workers end together.
# Fuzzing is short here, and the simulation has 100 seeds: the last of the kinds of faults asked of them comes at 50.
LONG_UNITS := $(addprefix tests/unit/,engine kernels worker gateway benchmarks services cli deploy telemetry house)
UNITS := $(LONG_UNITS) $(filter-out $(LONG_UNITS),$(patsubst %/,%,$(sort $(wildcard tests/unit/*/))))
tiers: $(VENV)/.testing
	$(PYTEST) -n 4 --dist loadfile --no-loadscope-reorder -m "not long" --deselect $(EMULATED) \
	    tests/simulation tests/fuzz tests/e2e tests/integration $(UNITS)

# The rest that is marked long: `compiled` and `models` run their own.
unit-long: STUCK_S := 900
unit-long: $(VENV)/.testing
	$(PYTEST) -n 2 --dist worksteal -m long tests --ignore=tests/unit/kernels/test_compiled.py --ignore=tests/e2e/test_parity.py

# Every kernel compiled for Hopper, without a card, in 22 parts: the first took 103 s beside other work.
compiled: $(VENV)/.testing
	$(PYTEST) -n 2 --dist worksteal -m long tests/unit/kernels/test_compiled.py

# Every family's answers through separate processes against transformers: some seconds each.
models: $(VENV)/.testing
	$(PYTEST) -n 2 -m "long or not long" tests/e2e/test_parity.py

# Published models, fetched once from the package index (93 and 238 MB), through a prefill and a decode worker: beside llama.cpp on the same
# file, where npm has it (11 MB), and what each format costs: 10 minutes on two busy cores. Without index or npm tests are skipped with a word.
real: $(VENV)/.testing
	@$(RUN) tests.real.packages
	$(PYTEST) -m real tests/real

# What computes, as on a processor without AVX512, VNNI and bfloat16: the limits are those of torch and of oneDNN. Every form of numbers.
NARROW := ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2
NUMBERS := $(addprefix tests/unit/engine/,formats gguf pooling)
avx2: $(VENV)/.testing
	$(NARROW) $(PYTEST) -n 2 --dist worksteal -m "not long" $(addprefix --ignore=,$(NUMBERS)) tests/unit/engine tests/e2e/test_parity.py
	$(NARROW) $(PYTEST) -n 2 --dist worksteal -m "long or not long" $(NUMBERS) $(addprefix tests/unit/kernels/test_,cpu.py int8.py tiles.py)

# The C kernels on an emulated Arm, bit by bit beside this processor's: no part of `make test`. Debian's emulator and compiler are installed where they are
# missing; without root or a mirror the test is skipped with a word.
EMULATED := tests/unit/kernels/test_arm.py::test_an_arm_writes_what_this_processor_writes
arm: $(VENV)/.testing
	@{ command -v qemu-aarch64-static && command -v aarch64-linux-gnu-gcc; } > /dev/null || \
	    apt-get install -q -y qemu-user-static gcc-aarch64-linux-gnu libc6-dev-arm64-cross || true
	$(PYTEST) tests/unit/kernels/test_arm.py

# Property tests with other examples each time, many more of them: what it finds becomes a test of its own.
properties: $(VENV)/.testing
	$(PYTEST) -n 2 --dist worksteal -m hypothesis tests/unit --hypothesis-profile=search

chaos-short: $(VENV)/.testing
	$(PYTEST) -n 2 --dist loadfile -m "not long" tests/chaos

# Ten minutes or more on a quiet machine: every fault under load, a table, benchmarks/results/chaos.{json,md}. Power cuts need root.
chaos: $(VENV)/.testing
	$(RUN) tests.chaos $(ARGS)

# Minutes: 5,000 messages for each decoder, 300 valid and 300 invalid requests for each route, three million messages by libFuzzer.
fuzz: $(VENV)/.testing
	$(PYTEST) tests/fuzz --hypothesis-profile=long
	@$(RUN) cli.requirements fuzz > $(VENV)/.fuzzing.txt && $(PIP) install -c constraints.txt -r $(VENV)/.fuzzing.txt
	$(RUN) tests.fuzz.atheris_messages -runs=3000000 -max_len=256 -print_final_stats=1

# Known vulnerabilities of the pinned packages (asks PyPI; fails if it doesn't answer) and a bill of what is installed (sbom.json, CycloneDX).
# The tools have an environment of their own: they are no part of what they look at.
audit: $(VENV)/.testing
	@test -x .audit/bin/python || $(PYTHON) -m venv .audit
	@$(RUN) cli.requirements audit | tail -2 > .audit/requirements.txt && .audit/bin/pip -q install -r .audit/requirements.txt
	.audit/bin/cyclonedx-py environment --of JSON --output-reproducible -o .audit/sbom.json $(VENV)
	.audit/bin/pip-audit --strict --no-deps --disable-pip -r constraints.txt

# many seeds in few tests: any worker takes the next one
simulation: $(VENV)/.testing
	$(PYTEST) -n 2 --dist worksteal tests/simulation --seeds 10000

# Redis 7.0 itself, with TLS: Debian's, unpacked here and not installed. All else runs with the Valkey of a Python package, which has no TLS.
redis-7: $(VENV)/.testing
	@mkdir -p .redis-7 && cd .redis-7 && apt-get -q download redis-server redis-tools libjemalloc2 liblzf1 && for one in *.deb; do dpkg -x $$one .; done
	PATH="$$PWD/.redis-7/usr/bin:$$PATH" LD_LIBRARY_PATH="$$(echo $$PWD/.redis-7/usr/lib/*-linux-gnu)" $(PYTEST) \
	    tests/integration/access $(addprefix tests/integration/test_,budgets.py budget_leases.py hostile_redis.py placement.py registry.py store.py tls.py) $(addprefix tests/e2e/test_,chart.py secure.py)

# The chart by helm itself, which a Python package brings (one person's: x86-64, and the hash of what was looked at is in the file).
chart: $(VENV)/.testing
	@test -x .helm/bin/helm || { $(PYTHON) -m venv .helm && .helm/bin/pip -q install --require-hashes -r tests/unit/deploy/helm.txt; }
	PATH="$$PWD/.helm/bin:$$PATH" $(PYTEST) tests/unit/deploy/test_helm.py

# Unchanged clients, each in an environment of its own (asks PyPI and npm), against the demo model: the table in docs/clients.md.
clients: $(VENV)/.testing
	$(RUN) tests.clients $(ARGS)

# The wheel with all that it needs in an environment of its own, torch by the rules above: `baton up` from it in an empty folder answers.
package: $(VENV)/.testing
	@rm -rf .package && $(PYTHON) -m venv .package
	@TORCH="$(TORCH)" TORCH_INDEX="$(TORCH_INDEX)" .package/bin/python -m cli.torch_build torch==$$(sed -n 's/^torch==//p' constraints.txt)
	.package/bin/pip --disable-pip-version-check -q install -c constraints.txt "$$($(RUN) tests.package build .package)[all]"
	$(RUN) tests.package try .package/bin/baton

# Compose's services as user 10001 without capabilities, on read-only file systems. Needs root.
hardened: $(VENV)/.testing
	deploy/run-hardened.sh

# The image built by podman, compose's services as containers, each killed once. Needs root and Debian's podman, runc and mmdebstrap.
containers: $(VENV)/.testing
	$(RUN) tests.containers $(ARGS)

clean:
	rm -rf .clients .real .helm .package .redis-7 .audit .venv .baton .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
