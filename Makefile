# The thin front: builds .venv once and calls the pdd command or the test tools in it.
#   make demo [ARGS=--once]     make test [ARGS="tests/unit -k link"]     make soak [KILLS=40] [SCALE=100]
#   make install | lint | clean

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.SILENT:
.DEFAULT_GOAL := help
.PHONY: help demo test soak lint install install-cpu clean

VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
WORKERS ?= 2

help:
	sed -n '2,4s/^# \{0,1\}//p' Makefile

demo: install-cpu
	$(BIN)/pdd demo --cache .cache/models $(ARGS)

# Two processes, files whole and in order: end to end comes last and has the machine to itself.
test: lint
	$(BIN)/pytest -n $(WORKERS) --no-loadscope-reorder $(ARGS)

# Half an hour of random trouble on fake engines, then KILLS kills of real ones (a quarter of an hour for 40 on two cores),
# then the faults and state machines of the WAN tier, SCALE times as long as in `make test`.
SCALE ?= 100
KILLS ?= 40
soak: install
	PYTHONPATH=. $(BIN)/python -m tests.kit.soak --minutes 30
	PYTHONPATH=. $(BIN)/python -m tests.kit.kills --kills $(KILLS)
	PDD_SOAK_SCALE=$(SCALE) $(BIN)/pytest --timeout 0 tests/integration/agent/test_faults.py tests/integration/link/test_agents_on_line.py tests/fuzz tests/unit/agent tests/unit/wire $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

install-cpu:
	tools/install.sh cpu

install:
	tools/install.sh dev

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
