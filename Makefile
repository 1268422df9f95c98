# make pretrain   install into .venv and pretrain a small BLOOM-shaped model on Python's standard library (4 ranks, CPU)
# make test       install into .venv and run all tests
# make parity     many generated layouts against one process (LAYOUTS=200 SEED=0)
# make gpu-test   everything that needs an NVIDIA GPU to be tested, with the torch that is installed; 8 minutes, no network
# make gpu-bench  ops and training steps on an NVIDIA GPU beside torch and transformers, likewise
# make bench      ops, a training step by its parts, megazero beside its peers, generation beside transformers (BENCH=--quick: a smoke test)
# make lint       ruff and mypy
# make clean      remove caches and builds (.venv, runs and data stay)

PYTHON ?= python3
VENV ?= .venv
LAYOUTS ?= 200
SEED ?= 0

.DEFAULT_GOAL := help
.PHONY: help install pretrain test parity gpu-test gpu-bench bench lint clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

INSTALL_FROM := pyproject.toml setup.py constraints.txt tools/install.sh

$(VENV)/.installed: $(INSTALL_FROM)
	@PYTHON="$(PYTHON)" tools/install.sh "$(VENV)" ""
	@touch $@

$(VENV)/.installed-test: $(INSTALL_FROM)
	@PYTHON="$(PYTHON)" tools/install.sh "$(VENV)" test
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-bench: $(INSTALL_FROM)
	@PYTHON="$(PYTHON)" tools/install.sh "$(VENV)" bench
	@touch $@ $(VENV)/.installed

install: $(VENV)/.installed

pretrain: $(VENV)/.installed
	@PATH="$(abspath $(VENV))/bin:$$PATH" examples/pretrain_stdlib.sh

test: $(VENV)/.installed-test
	$(VENV)/bin/python -m pytest -ra --durations=15 $(PYTEST)

parity: $(VENV)/.installed-test
	MEGAZERO_PARITY_LAYOUTS=$(LAYOUTS) MEGAZERO_PARITY_SEED=$(SEED) $(VENV)/bin/python -m pytest -ra tests/parity $(PYTEST)

# These two install nothing: PYTHON where it is given, else the virtual environment where there is one, else python3.
GPU_PYTHON = $(if $(filter file,$(origin PYTHON)),$(or $(wildcard $(VENV)/bin/python),$(PYTHON)),$(PYTHON))

gpu-test:
	@$(GPU_PYTHON) tools/gpu_test.py $(TEST)

gpu-bench:
	@$(GPU_PYTHON) bench/gpu.py $(BENCH)

# DeepSpeed takes part where it is installed: its own pip package would otherwise be built here for one table.
bench: $(VENV)/.installed-bench
	$(VENV)/bin/python bench/ops.py $(BENCH)
	$(VENV)/bin/python bench/train.py $(BENCH)
	OMP_NUM_THREADS=1 $(VENV)/bin/torchrun --nproc-per-node 2 bench/exchange.py $(BENCH)
	$(VENV)/bin/python bench/peers.py $(BENCH)
	$(VENV)/bin/python bench/generate.py $(BENCH)

lint: $(VENV)/.installed-test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path "./$(VENV)/*" -prune -exec rm -rf {} +
