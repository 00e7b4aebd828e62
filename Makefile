# Everything runs in .venv, made here from pyproject.toml and constraints.txt. Run `make` for the list of targets.
# Paths are relative throughout, so a checkout may lie under any name.

# The interpreter that makes .venv, and the extras of pyproject.toml to install into it.
PYTHON ?= python3
EXTRAS ?= test

PY := .venv/bin/python

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help tour test lab book build bench lint format env clean

help: ## list these targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1|\2/p' Makefile | while IFS='|' read -r target text; do printf '%-14s %s\n' "$$target" "$$text"; done

tour: env ## set up, build, run every lesson, make the book build/book/index.html of them and print the ladder
	@$(PY) -m kda_lab.cli tour

test: env ## run the tests (PYTEST_ARGS="-k ops -x" narrows them)
	@$(PY) -m pytest $(PYTEST_ARGS)

lab: env ## open the lessons in JupyterLab
	@$(PY) -m kda_lab.cli lab

book: env ## make the book again, running only the lessons whose results may have changed
	@$(PY) -m kda_lab.cli book

build: env ## compile the library
	@$(PY) -m kda_lab.cli build

bench: env ## measure what the project promises: kernel speed, build and import time, the explorer's latency
	@$(PY) -m benchmarks

lint: env ## check style: ruff and clang-format
	@$(PY) -m ruff check . && $(PY) -m ruff format --check .
	@find csrc \( -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \) -print0 | xargs -0 .venv/bin/clang-format --dry-run --Werror

format: env ## mend style
	@$(PY) -m ruff check --fix . && $(PY) -m ruff format .
	@find csrc \( -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \) -print0 | xargs -0 .venv/bin/clang-format -i

clean: ## delete what was built here (.venv stays; delete it by hand to start over)
	@rm -rf build dist .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

env:
	@PYTHON="$(PYTHON)" EXTRAS="$(EXTRAS)" sh tools/environment.sh
