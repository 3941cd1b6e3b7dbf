# make up: set everything up and serve the demo model. make test: set up what the tests need and pass them.
VENV := .venv
PYTHON ?= python3
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
RUN := $(VENV)/bin/python -m
PACKAGES := services gateway prefill decode worker kvtransfer engine common tests models benchmarks
.PHONY: up setup test check unit integration e2e clean

up: setup
	@exec ./baton up $(ARGS)

setup: $(VENV)/.serving

# torch by itself and pinned, before anything can ask for another build of it
$(VENV)/.serving: constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "baton: Python 3.11 or 3.12 is needed: make PYTHON=python3.11")'
	@test -x $(VENV)/bin/python || { echo "making $(VENV) …"; $(PYTHON) -m venv $(VENV); }
	@echo "installing what serving needs (once, about a minute) …"
	@$(PIP) install -q -c constraints.txt torch==2.13.0
	@$(RUN) services.requirements pyproject.toml gateway worker servers ucx > $(VENV)/serving.txt
	@$(PIP) install -q -c constraints.txt -r $(VENV)/serving.txt
	@touch $@

$(VENV)/.testing: $(VENV)/.serving
	@echo "installing what the tests need (once) …"
	@$(RUN) services.requirements pyproject.toml dev train > $(VENV)/testing.txt
	@$(PIP) install -q -c constraints.txt -r $(VENV)/testing.txt
	@touch $@

test: check
	$(RUN) pytest -q -n 2 --dist loadfile tests/unit tests/integration tests/e2e

check: $(VENV)/.testing
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy
	$(VENV)/bin/lint-imports

unit integration e2e: $(VENV)/.testing
	$(RUN) pytest -q -n 2 --dist loadfile tests/$@

clean:
	rm -rf .venv .baton .pytest_cache .mypy_cache .ruff_cache .hypothesis
