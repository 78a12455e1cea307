# Everything lives in this checkout (.venv, models, runs), except the embedded Slurm: its Unix socket paths must stay short, so it has
# $LIBRA_HPC_CLUSTER (~/.libra-hpc/cluster) and $LIBRA_HPC_CACHE (~/.cache/libra-hpc).  `make clean` undoes all of it.

PYTHON ?= python3
VENV := $(CURDIR)/.venv
BIN := $(VENV)/bin
POLICY := models/tiny-keychain
RUN_FILE := examples/quickstart.toml
# For `make gpu-check` (docs/gpu-check.md): a folder of wheels for a machine without an index, packages that may be missing there, cuda or
# cpu, and options of bench.gpu.
GPU_CHECK_WHEELS ?=
GPU_CHECK_WITHOUT ?=
GPU_CHECK_DEVICE ?= cuda
GPU_CHECK_FLAGS ?=
CUDA_VENV ?= $(CURDIR)/build/venv-cuda
# Hundreds of processes are started, and each would compile what it imports where the environment forbids to keep that.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest \
	--durations 12 --durations-min 20
# More workers than two cores, because tests wait too.  Of four, one has Slurm, one vLLM, two the rest (tests/conftest.py).
WORKERS := --dist loadgroup --no-loadscope-reorder -n
QUICK := not (cluster or vllm or engine or slow or nightly or chaos)
REST := (cluster or vllm or engine or slow) and not (nightly or chaos)
# A test that a busy machine fails has a second try, alone, and is named at the end; one that fails again is wrong.
define tries
$(PYTEST) $(WORKERS) $(1) -m "$(2)" || { test $$? = 1 || exit 2; echo "== once more, alone, what has failed"; \
	$(PYTEST) -m "$(2)" --last-failed --last-failed-no-failures none --maxfail 1 --tb short; }
endef
ROOM ?=

.PHONY: help venv dev run test test-all test-room nightly chaos mutants lint docs bench numbers gpu-venv gpu-check clean
.DEFAULT_GOAL := help

help:
	@echo "make run    a complete run on this machine: environment, Slurm, tiny policy, job, summary"
	@echo "make test   the quick tests       make lint   ruff and mypy"
	@echo "make test-all    the quick tests, then those with Slurm, vLLM and Megatron"
	@echo "make test-room ROOM=policies/scheduling    the tests of one room"
	@echo "make nightly  what takes too long for test-all     make chaos  of that, every injected fault"
	@echo "make mutants  whether the tests notice 60 small mistakes (90 minutes)"
	@echo "make docs   the examples in the pages, made by their commands"
	@echo "make numbers  the pages' figures of planner and scheduler, played again (half an hour)"
	@echo "make bench  the benchmarks        make clean  undo everything"
	@echo "make gpu-check  a machine with a GPU, checked and measured in ten minutes (docs/gpu-check.md)"

venv:
	@$(PYTHON) envs/install.py cpu --venv $(VENV) --extra compile

dev:
	@$(PYTHON) envs/install.py cpu --venv $(VENV) --extra dev

run: venv
	@$(BIN)/libra-hpc cluster up --if-needed
	@test -f $(POLICY)/config.json || $(BIN)/libra-hpc make-policy $(POLICY) --task examples/keychain.py:KeyChain
	@$(BIN)/libra-hpc submit $(RUN_FILE) --wait

test: dev
	@$(PYTEST) $(WORKERS) 3 -m "$(QUICK)"

# The quick ones first: a commit that they refuse is refused within minutes.
test-all: export FAILED_ONCE := $(CURDIR)/build/failed-once.txt
test-all: dev
	@mkdir -p build && rm -f $$FAILED_ONCE
	@$(call tries,3,$(QUICK))
	@$(call tries,4,$(REST))

test-room: dev
	@test -d tests/$(ROOM) || { echo "tests/$(ROOM) is no folder; say for example: make test-room ROOM=policies/scheduling"; exit 2; }
	@$(PYTEST) tests/$(ROOM)

chaos: dev
	@$(PYTEST) tests/chaos -m "chaos or not chaos"
	@$(PYTEST) tests --ignore=tests/chaos -m chaos

# All that test-all leaves out; one after the other, as a fault is noticed by a deadline.
nightly: dev
	@$(PYTEST) -m "nightly or chaos"

# Kept mistakes that were noticed before must be noticed again.
mutants: dev
	@test -f build/mutants.json || $(BIN)/python -m tests.house.mutants draw build/mutants.json
	@$(BIN)/python -m tests.house.mutants run build/mutants.json

lint: dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy libra_hpc cli envs sbatch bench

# Writes the console blocks of the pages that name their command.
docs: dev
	@$(BIN)/python -m tests.docs.update

bench: venv
	@for name in learning decisions live_kv simulated_vs_real; do echo "== $$name"; $(BIN)/python -m bench.$$name || exit 1; done

# Figures that the pages print; `make nightly` plays a few seeds of each and fails where one is off.
numbers: dev
	@$(BIN)/python -m bench.numbers play
	@$(BIN)/python -m tests.docs.update README.md docs/benchmarks.md docs/plan.md

gpu-venv:
ifeq ($(GPU_CHECK_WHEELS),)
	@$(PYTHON) envs/install.py cuda --venv $(CUDA_VENV) --extra dev
else
	@$(PYTHON) -m envs.beside $(GPU_CHECK_WHEELS) --venv $(CUDA_VENV) $(GPU_CHECK_WITHOUT:%=--without %)
endif

gpu-check: $(if $(filter cpu,$(GPU_CHECK_DEVICE)),dev,gpu-venv)
	@HF_HUB_OFFLINE=1 LIBRA_HPC_SITE=none $(if $(filter cpu,$(GPU_CHECK_DEVICE)),$(VENV),$(CUDA_VENV))/bin/python -m bench.gpu --device $(GPU_CHECK_DEVICE) $(GPU_CHECK_FLAGS)

clean:
	@if [ -x $(BIN)/libra-hpc ]; then $(BIN)/libra-hpc cluster down --remove; fi
	@rmdir $(HOME)/.libra-hpc 2>/dev/null || true
	rm -rf .venv models runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
