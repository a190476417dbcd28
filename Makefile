# Two commands for a fresh machine: `make quickstart` trains a small model, `make test` runs every check.
# Each makes its own set-up in .venv; PYTHON chooses the interpreter that .venv is made from (3.11 or later).

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
SET_UP := pyproject.toml constraints.txt
# One worker a core, each with ranks of its own; the tests of a file share what they set up, so they stay together.
# A test beyond its time ends its worker; a fresh one would only begin it again.
WORKERS ?= $(shell getconf _NPROCESSORS_ONLN)
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

.PHONY: quickstart test test-fast lint format clean

quickstart: $(VENV)/.installed-train
	$(BIN)/bytescale train configs/quickstart.toml --nproc 4

# One thread a process: the distributed tests start many. The closing lines sum up, pytest's own comes last.
test: export OMP_NUM_THREADS := 1
test: $(VENV)/.installed-dev
	@failed=0; summary=; log=$$(mktemp); trap 'rm -f "$$log"' EXIT; \
	check() { \
	  local name="$$1"; shift; echo "== $$name"; \
	  if "$$@"; then summary+="  ok      $$name"$$'\n'; else summary+="  FAILED  $$name"$$'\n'; failed=1; fi; \
	}; \
	tests() { $(PYTEST) $(PYTEST_ARGS) 2>&1 | tee "$$log"; return "$${PIPESTATUS[0]}"; }; \
	check "ruff check" $(BIN)/ruff check --quiet .; \
	check "ruff format" $(BIN)/ruff format --quiet --check .; \
	check "mypy" $(BIN)/mypy; \
	check "import contracts" $(BIN)/lint-imports --no-logo; \
	check "pytest" tests; \
	echo "== summary"; printf '%s' "$$summary"; tail -n 1 "$$log"; exit $$failed

# What answers within two minutes: everything but the tests marked `long`.
test-fast: export OMP_NUM_THREADS := 1
test-fast: $(VENV)/.installed-dev
	$(PYTEST) -m 'not long' $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports

format: $(VENV)/.installed-dev
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache runs dist

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-train: $(SET_UP) | $(BIN)/python
	$(PIP) -e '.[train]'
	@touch $@

$(VENV)/.installed-dev: $(SET_UP) | $(BIN)/python
	$(PIP) -e '.[train,data,report,tensorboard,wandb,dev]'
	@touch $@ $(VENV)/.installed-train
