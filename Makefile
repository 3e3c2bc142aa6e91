# Every target makes its own environment when there is none, or when what it is made from has changed.

PYTHON ?= python3
# Not taken from the environment, because `clean` removes it; `make VENV=somewhere test` works.
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

WORKERS ?= 2
THREADS ?= 1
ARGS ?=

export MPLBACKEND ?= Agg

.DEFAULT_GOAL := help
.PHONY: help demo test check bench fix clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-6s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "  make test ARGS='tests/test_imports.py -x' WORKERS=0     some tests, in one process"

demo: $(STAMP) ## train, prune, fine-tune and compare a small network
	$(BIN)/python -m eigendamage.demo $(ARGS)

test: $(STAMP) ## run the tests (WORKERS=2 processes, THREADS=1 in each, ARGS for pytest)
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

check: $(STAMP) ## lint, format and types, without changing a file
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(STAMP) ## measure against plain training passes, write bench.json
	$(BIN)/python -m eigendamage.bench $(ARGS)

fix: $(STAMP) ## format, and mend what the linter can mend
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## remove the environment, caches and build products
	rm -rf $(VENV) .venv-ci build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -type d -name __pycache__ -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt requirements-oracle.txt
	@echo "Installing into $(VENV): once, a few minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt -e '.[dev]'
	$(PIP) install -c constraints.txt --no-deps -r requirements-oracle.txt
	@touch $@
