# `make demo` and `make test` are all that a fresh machine needs; `make` alone lists the rest.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
.PHONY: help install demo test lint bench chaos lock clean distclean

VENV := .venv
PY := $(VENV)/bin/python
LOCK := cluster/requirements/cpu.txt
LOCK_GPU := cluster/requirements/gpu.txt
UV_VERSION := 0.13.9

help: ## lists the targets
	@sed -nE 's/^([a-z]+):.*## (.*)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 20

# ---- set-up ----------------------------------------------------------------------------------------------------------
# .venv/.installed says for which folder, lock and pyproject.toml it was made, and is written last; .venv/.unfinished lies
# there while an installation runs. One that was interrupted may have left packages that look whole, and one that was moved
# has scripts that point elsewhere: the next one starts afresh.

PYTHONS := $(or $(PYTHON),python3.11 python3.12 python3)
SUPPORTED := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))

install: ## creates .venv from the lock (again only when it changed) and prepares the small model
	@wanted="$$PWD $$(cat $(LOCK) pyproject.toml | sha256sum)"
	installed="$$(cat $(VENV)/.installed 2>/dev/null || true)"
	if [[ "$$installed" != "$$wanted" ]]; then
	  if [[ -e $(VENV)/.unfinished || ( -n "$$installed" && "$$installed" != "$$PWD "* ) ]]; then rm -rf $(VENV); fi
	  if [[ ! -x $(PY) ]]; then
	    python=
	    for candidate in $(PYTHONS); do
	      if "$$candidate" -c '$(SUPPORTED)' 2>/dev/null; then python="$$candidate"; break; fi
	    done
	    if [[ -z "$$python" ]]; then
	      echo "make install needs Python 3.11 or 3.12 with its venv module; tried: $(PYTHONS)." >&2
	      echo "Install one, or name it: make install PYTHON=/path/to/python3.11" >&2
	      exit 1
	    fi
	    mkdir -p $(VENV) && touch $(VENV)/.unfinished
	    "$$python" -m venv $(VENV)
	  fi
	  touch $(VENV)/.unfinished && rm -f $(VENV)/.installed
	  echo "installing $$(grep -c '==' $(LOCK)) packages into $(VENV) (about two minutes and 5 GB)"
	  $(PY) -m pip install --disable-pip-version-check -qq --no-deps -r $(LOCK)
	  $(PY) -m pip install --disable-pip-version-check -qq --no-deps --no-build-isolation -e .
	  echo "$$wanted" > $(VENV)/.installed && rm $(VENV)/.unfinished
	fi
	$(PY) -m examples.small_model > /dev/null

# ---- daily work ------------------------------------------------------------------------------------------------------

demo: install ## trains a small model to say "maybe"; ARGS="--steps 5" goes to the example
	@$(PY) examples/yes_no_maybe.py $(ARGS)

test: install ## runs the whole test suite; ARGS="tests/test_gather.py -x" goes to pytest
	@$(PY) -m pytest $(ARGS)

lint: install ## ruff, mypy and the import contract
	@$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

bench: install ## runs all benchmarks, or ONLY=name, and updates bench.json
	@$(PY) -m tests.bench $(ONLY)

chaos: install ## kills every kind of process at random moments, many times; KILLS=3 of each, ARGS go to pytest
	@CHAOS_KILLS="$(KILLS)" $(PY) -m pytest tests/chaos --timeout=3600 $(ARGS)

# ---- the locks -------------------------------------------------------------------------------------------------------
# uv resolves, pip installs. The CPU build of torch is found where pip is told to look for it: PIP_FIND_LINKS (a folder
# of wheels), or PIP_EXTRA_INDEX_URL (PyTorch's own index of CPU wheels). Neither is written into a lock.
# Pins that still fit are kept; UPGRADE=1 takes the newest releases instead.

COMPILE := pip compile pyproject.toml --extra demo --extra examples --extra tinker --group dev --override cluster/requirements/overrides.txt \
  --python-version 3.11 --annotation-style line --index-strategy unsafe-best-match
LOCK_TOOLS := .cache/lock-tools
UV := $(LOCK_TOOLS)/bin/uv

lock: ## resolves both locks anew from pyproject.toml
	@if [[ "$$($(UV) --version 2>/dev/null)" != "uv $(UV_VERSION)"* ]]; then
	  $(or $(PYTHON),python3) -m venv --clear $(LOCK_TOOLS)
	  $(LOCK_TOOLS)/bin/pip install --disable-pip-version-check --quiet uv==$(UV_VERSION)
	fi
	header() { echo "make lock    (uv $(COMPILE) --extra $$1 -o $$2)"; }
	newest="$(if $(UPGRADE),--upgrade)"
	UV_FIND_LINKS="$$(tr ' ' ',' <<< "$${PIP_FIND_LINKS:-}")" UV_EXTRA_INDEX_URL="$${PIP_EXTRA_INDEX_URL:-}" \
	  $(UV) $(COMPILE) --extra cpu -o $(LOCK) --quiet $$newest \
	  --custom-compile-command "$$(header cpu $(LOCK))"
	$(UV) $(COMPILE) --extra gpu -o $(LOCK_GPU) --quiet $$newest \
	  --custom-compile-command "$$(header gpu $(LOCK_GPU))"
	grep -c == $(LOCK) $(LOCK_GPU)

# ---- tidying ---------------------------------------------------------------------------------------------------------

clean: ## removes caches and build products
	@rm -rf build dist ./*.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## removes .venv and the prepared models too
	@rm -rf $(VENV) .cache
