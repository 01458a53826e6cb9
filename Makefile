# Two commands to begin with: `make train` and `make test`. Each sets up what it needs.
.DEFAULT_GOAL := help
.PHONY: help setup train test check bench notebooks docs tape exercise clean

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# One rank per GPU where there are GPUs, two on a CPU. `nvidia-smi -L` prints a line for each GPU.
NPROC ?= $(shell n=$$(nvidia-smi -L 2>/dev/null | grep -c '^GPU'); [ "$$n" -gt 0 ] && echo $$n || echo 2)
# Ranks share the cores. torchrun would choose one thread for each too, with a warning.
ONE_THREAD = $(if $(filter-out 1,$(NPROC)),OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1})
# Tests that run side by side, each on ranks of its own, which wait for each other half of the time.
JOBS ?= 2
# What to hand on: `make train ARGS="--steps 200"`, `make test ARGS="-k order"`.
ARGS ?=

help: ## Show this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(STAMP) ## Make .venv and install the package in it (PYTHON=python3.12 chooses another Python)

# torch first and alone, from the pin: an open range takes the newest build, with gigabytes of CUDA.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "zero3 needs Python 3.10 or newer, and $(PYTHON) is %d.%d. Set PYTHON=..." % sys.version_info[:2])'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[app,tests,docs,notebooks]'
# labml-nn asks for these two and needs neither here. They do not import beside a CPU build of torch,
# and `transformers` imports torchvision wherever it is.
	$(BIN)/pip uninstall --quiet --yes torchvision torchtext
	@touch $@

# A store of its own for each attempt, for ARGS of torchrun's own such as --max-restarts: torchrun
# otherwise keeps one, with the addresses of ranks that are dead.
train: $(STAMP) ## Train a small GPT in shards, NPROC=2 ranks (ARGS="--help" lists the options)
	TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 $(ONE_THREAD) $(BIN)/torchrun --standalone --nproc_per_node=$(NPROC) -m zero3.train $(ARGS)

test: $(STAMP) ## Run the tests, JOBS=2 at once (ARGS="-k order" chooses some)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

check: $(STAMP) ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(STAMP) ## Measure against plain data parallelism and FSDP2
	$(BIN)/python -m tests.bench $(ARGS)

notebooks: $(STAMP) ## Execute the notebooks and compare (ARGS=--write keeps what comes out)
	$(BIN)/python -m notebooks.run $(ARGS)

docs: $(STAMP) ## Build the book, build/site/index.html
	$(BIN)/python -m docs.build $(ARGS)

tape: $(STAMP) ## Record a step on two ranks, as tape.json and as a trace for Perfetto, in runs/tape
	$(BIN)/python -m docs.tape --out runs/tape $(ARGS)

exercise: $(STAMP) ## Check your answer to exercise N, 1 to 10 (ARGS=--solution shows one)
	$(BIN)/python -m docs.exercises.check $(N) $(ARGS)

clean: ## Remove the environment and everything that runs left behind
	rm -rf .venv build notebooks/worker_*.py *.egg-info runs logs .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
