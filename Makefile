# Everything lives in this checkout (.venv, models, runs), except the embedded Slurm: its Unix socket paths must stay short, so it has
# $LIBRA_HPC_CLUSTER (~/.libra-hpc/cluster) and $LIBRA_HPC_CACHE (~/.cache/libra-hpc).  `make clean` undoes all of it.

PYTHON ?= python3
VENV := $(CURDIR)/.venv
BIN := $(VENV)/bin
POLICY := models/tiny-keychain
RUN_FILE := examples/quickstart.toml
# Test processes.  Tests wait more than they compute, so two of them also pay on two cores (tests/conftest.py).
TEST_PROCESSES ?= 2

.PHONY: help venv dev run test chaos lint bench clean
.DEFAULT_GOAL := help

help:
	@echo "make run    a complete run on this machine: environment, Slurm, tiny policy, job, summary"
	@echo "make test   the test suite        make lint   ruff and mypy"
	@echo "make chaos  every injected fault, the slow ones too"
	@echo "make bench  the benchmarks        make clean  undo everything"

venv:
	@$(PYTHON) envs/install.py cpu --venv $(VENV) --extra compile

dev:
	@$(PYTHON) envs/install.py cpu --venv $(VENV) --extra dev

run: venv
	@$(BIN)/libra-hpc cluster up --if-needed
	@test -f $(POLICY)/config.json || $(BIN)/libra-hpc make-policy $(POLICY)
	@$(BIN)/libra-hpc submit $(RUN_FILE) --wait

test: dev
	@OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadscope --no-loadscope-reorder

chaos: dev
	@OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest tests/chaos -m "chaos or not chaos"

lint: dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy libra_hpc cli envs sbatch

bench: venv
	@for name in loop learning decisions policies knowledge live_policies planner replan repartition simulated_vs_real; do echo "== $$name"; $(BIN)/python -m bench.$$name || exit 1; done

clean:
	@if [ -x $(BIN)/libra-hpc ]; then $(BIN)/libra-hpc cluster down --remove; fi
	@rmdir $(HOME)/.libra-hpc 2>/dev/null || true
	rm -rf .venv models runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
