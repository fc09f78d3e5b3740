# `make demo` trains a small model on a cluster played by this machine; `make help` lists the rest.
#
# PYTHON      the interpreter a new environment is made with (default python3; 3.11 or newer)
# VIRTUAL_ENV an activated virtual environment is used in place; otherwise .venv is made here
# TORCH       a version: make test TORCH=2.15.0 runs the tests in .venv-torch-2.15.0, made on first use
# ARGS        extra arguments: make demo ARGS="--steps 50", make test ARGS="-k layout"

PYTHON ?= python3
TORCH ?=
ENV_DIR := $(if $(TORCH),.venv-torch-$(TORCH),$(or $(VIRTUAL_ENV),.venv))
BIN := $(ENV_DIR)/bin
READY := $(ENV_DIR)/.mics-ready
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help env demo test test-all docs lint package format clean

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | awk -F'\t' '{printf "  make %-9s %s\n", $$1, $$2}'

env: $(READY)  ## create the environment and install what is needed

$(READY): pyproject.toml scripts/setup_env.sh
	@scripts/setup_env.sh "$(PYTHON)" "$(ENV_DIR)" $(TORCH)
	@touch "$@"

demo: $(READY)  ## train a small model on this machine and draw the run (about a minute)
	@$(BIN)/mics train $(ARGS)

test: $(READY)  ## every mechanism, with the grids thinned (5 to 7 minutes on two cores); GPU tests skip without one
	@$(BIN)/python -m pytest --quick -n auto $(ARGS)

test-all: $(READY)  ## grids too (15 to 20 minutes on two cores); ARGS=--long adds what takes longest
	@$(BIN)/python -m pytest -n auto $(ARGS)

lint: $(READY)  ## style, types, import order; prose is read and never fails
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python scripts/check_prose.py

package: $(READY)  ## build sdist and wheel, install the wheel into a fresh environment and use it
	@scripts/check_wheel.sh "$(BIN)/python"

format: $(READY)  ## rewrite the code in the project's style
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: $(READY)  ## build the site in build/site; a warning is an error
	@$(BIN)/python -m pip install --disable-pip-version-check -qq -e ".[docs]"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@$(BIN)/python scripts/check_site.py

clean:  ## remove caches and runs, keep the environment
	@rm -rf runs build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
