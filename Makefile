# Two commands do all the set-up on a machine with Python 3.11 and make: `make run` and `make test`.
# Both work without a terminal; nothing is installed outside $(VENV).

VENV    := .venv
BIN     := $(VENV)/bin
# The first interpreter that is new enough; override with `make run PYTHON=/path/to/python`.
PYTHON  ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3 python; do \
             $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
WORKERS ?= 2

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
export PIP_RETRIES ?= 10
export PYTHONUTF8 := 1

.DEFAULT_GOAL := help
.PHONY: help run test lint format clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(VENV)/.base  ## set up and run the main job on the default model
	@$(BIN)/dgemma demo

test: export OMP_NUM_THREADS := 1
test: export HF_HUB_OFFLINE := 1
test: lint  ## set up, check style and types, run the tests
	$(BIN)/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

lint: $(VENV)/.dev  ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev  ## rewrite the code in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove everything that can be made again
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- the virtual environment: each stamp is newer than the pyproject.toml it was installed from -------------------

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "error: Python 3.11 or newer is needed and was not found;" \
	  "install it, or name one: make run PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else \
	  "error: Python 3.11 or newer is needed, %s is %d.%d" % (sys.executable, v[0], v[1]))'
	@"$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); echo "error: $(PYTHON) cannot make a virtual environment;" \
	  "on Debian and Ubuntu, install its python3-venv package" >&2; exit 1; }

$(VENV)/.base: pyproject.toml | $(BIN)/python
	@echo "installing diffusiongemma into $(VENV) (once; torch is the large part)"
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	@echo "installing diffusiongemma with its development tools into $(VENV) (once)"
	$(BIN)/python -m pip install --quiet --editable '.[dev,serve,train]'
	@touch $(VENV)/.base $@
