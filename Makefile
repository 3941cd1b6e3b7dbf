# make up: set everything up and serve the demo model. make test: set up what the tests need and pass them.
VENV := .venv
PYTHON ?= python3
RUN := $(VENV)/bin/python -m
PIP := $(RUN) pip --disable-pip-version-check -q
.PHONY: up setup test check unit integration e2e clean

up: setup
	@exec ./baton up $(ARGS)

setup: $(VENV)/.serving

# torch first, by itself: its build decides what else it brings
$(VENV)/.serving: constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "baton: needs Python 3.11 or later: make PYTHON=python3.11")'
	@test -x $(VENV)/bin/python || { echo "making $(VENV) …"; $(PYTHON) -m venv $(VENV); }
	@echo "installing torch (once) …" && $(PIP) install torch==$$(sed -n 's/^torch==//p' constraints.txt)
	@echo "installing what serving needs (once) …" && $(RUN) services.requirements gateway worker servers ucx > $@.txt
	@$(PIP) install -c constraints.txt -r $@.txt && touch $@

# triton comes with a torch for GPUs; without one, its interpreter alone runs the kernels' tests
$(VENV)/.testing: $(VENV)/.serving
	@echo "installing what the tests need (once) …" && $(RUN) services.requirements dev tracing > $@.txt
	@$(VENV)/bin/python -c 'import triton' 2>/dev/null || $(PIP) install triton==3.6.0
	@$(PIP) install -c constraints.txt -r $@.txt && touch $@

test: check unit integration e2e

check: $(VENV)/.testing
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy
	$(VENV)/bin/lint-imports

unit integration e2e: $(VENV)/.testing
	$(RUN) pytest -q -n 2 --dist loadfile tests/$@

clean:
	rm -rf .venv .baton .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
