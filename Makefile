# make pretrain   install into .venv and pretrain a small BLOOM-shaped model on Python's standard library (4 ranks, CPU; FLAGS="--train-iters 20")
# make check      after each change: lint, types and the quick tests; 2 minutes once the rest is installed
# make test       install into .venv and run all that a change can break, lint and types too; the same cases in each run (SEED=n: other ones)
# make test-all   every test and every case of every grid, judged by DeepSpeed, Megatron-core and lm-eval, too; hours
# make explore    make test with new cases again and again; prints the command that repeats a failure (HOURS=2 PYTEST=tests/parity)
# make parity     many generated layouts against one process (LAYOUTS=200 SEED=n)
# make fuzz       damaged files for every reader, for some minutes (MINUTES=10 TARGET="yaml manifest"); failures go to tests/fuzz/found
# make gpu-test   all tests that need an NVIDIA GPU, with the installed torch; 8 minutes, no network
# make gpu-bench  ops and training steps on an NVIDIA GPU compared with torch and transformers; 8 minutes, no network
# make bench      ops, parts of a training step, megazero compared with other trainers, generation compared with transformers (BENCH=--quick: a smoke test)
# make docs       build the documentation's site with sphinx, and print the path of its first page; needs no megazero and no torch
# make lint       ruff and mypy, without what the tests install
# make install    the program alone, into .venv
# make clean      remove caches and builds (.venv, runs and data stay)

PYTHON ?= python3
VENV ?= .venv
LAYOUTS ?= 200
HOURS ?= 2
MINUTES ?= 10
SEED ?=

# tools/install.sh leaves most Python files uncompiled. Each is compiled once, when it is first imported.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install pretrain check test test-all explore parity fuzz gpu-test gpu-bench bench docs lint clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

INSTALL_FROM := pyproject.toml setup.py constraints.txt tools/install.sh

$(VENV)/.installed: $(INSTALL_FROM)
	@PYTHON="$(PYTHON)" tools/install.sh "$(VENV)" ""
	@touch $@

$(VENV)/.installed-test: $(INSTALL_FROM)
	@PYTHON="$(PYTHON)" tools/install.sh "$(VENV)" test
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-test-all: $(INSTALL_FROM)
	@PYTHON="$(PYTHON)" tools/install.sh "$(VENV)" test-all
	@touch $@ $(VENV)/.installed-test $(VENV)/.installed

$(VENV)/.installed-lint: $(INSTALL_FROM)
	@PYTHON="$(PYTHON)" tools/install.sh "$(VENV)" lint
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-bench: $(INSTALL_FROM)
	@PYTHON="$(PYTHON)" tools/install.sh "$(VENV)" bench
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-docs: $(INSTALL_FROM)
	@PYTHON="$(PYTHON)" tools/install_docs.sh "$(VENV)"
	@touch $@

install: $(VENV)/.installed

pretrain: $(VENV)/.installed
	@PATH="$(abspath $(VENV))/bin:$$PATH" examples/pretrain_stdlib.sh $(FLAGS)

# pytest runs one process for each core. The tests of a file stay in one process and share their set-up. tests/conftest.py has the order.
TO_PYTEST = -n auto --dist loadfile --no-loadscope-reorder -ra --cpu 15 $(if $(SEED),--seed $(SEED))
RUN_TESTS = $(VENV)/bin/python -m pytest $(TO_PYTEST)

check: $(VENV)/.installed-test
	$(RUN_TESTS) --depth check $(PYTEST)

# As in continuous integration, a test that skips for want of an installed package or program fails. CI=0 lets these tests skip.
test: $(VENV)/.installed-test
	CI=$(or $(CI),true) $(RUN_TESTS) $(PYTEST)

test-all: $(VENV)/.installed-test-all
	MEGAZERO_FUSED=reference $(RUN_TESTS) tests/parity tests/zero tests/pipeline
	$(RUN_TESTS) --depth all $(PYTEST)

explore: $(VENV)/.installed-test
	$(VENV)/bin/python -m tests.explore --hours $(HOURS) $(TO_PYTEST) $(PYTEST)

parity: $(VENV)/.installed-test
	$(RUN_TESTS) --layouts $(LAYOUTS) tests/parity/test_layouts.py $(PYTEST)

fuzz: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.fuzz --minutes $(MINUTES) $(if $(TARGET),--target $(TARGET)) $(if $(SEED),--seed $(SEED))

# These two install nothing. They use PYTHON if it is given, else the virtual environment if it exists, else python3.
GPU_PYTHON = $(if $(filter file,$(origin PYTHON)),$(or $(wildcard $(VENV)/bin/python),$(PYTHON)),$(PYTHON))

gpu-test:
	@$(GPU_PYTHON) -m tools.gpu_test $(TEST)

gpu-bench:
	@$(GPU_PYTHON) -m bench.gpu $(BENCH)

# DeepSpeed takes part if it is installed. It is not installed here, because pip would build its package for one table.
bench: $(VENV)/.installed-bench
	$(VENV)/bin/python -m bench.ops $(BENCH)
	$(VENV)/bin/python -m bench.train $(BENCH)
	OMP_NUM_THREADS=1 $(VENV)/bin/torchrun --nproc-per-node 2 -m bench.exchange $(BENCH)
	$(VENV)/bin/python -m bench.peers $(BENCH)
	$(VENV)/bin/python -m bench.generate $(BENCH)

docs: $(VENV)/.installed-docs
	@OMP_NUM_THREADS=1 $(VENV)/bin/python -m sphinx -q -W --keep-going docs build/docs
	@echo "$(CURDIR)/build/docs/index.html"

lint: $(or $(wildcard $(VENV)/.installed-test),$(VENV)/.installed-lint)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path "./$(VENV)/*" -prune -exec rm -rf {} +
