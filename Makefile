# The commands that set up, train and test. `make pretrain` and `make test` start from Python >= 3.10, a C++ compiler and a package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# ninja and the compiler's helpers are found through PATH by torch's just-in-time builds.
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Without a GPU, DeepSpeed's launchers would each warn that one may have been missed.
ifeq ($(shell for tool in nvidia-smi rocm-smi hl-smi npu-smi xpu-smi; do command -v $$tool; done),)
export DS_ACCELERATOR ?= cpu
endif
CORPUS := data/stdlib
INSTALLED := $(VENV)/.installed

.PHONY: setup data pretrain test test_all lint bench gpu pages clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z_]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(INSTALLED)  ## the virtual environment .venv, from constraints.txt

# Set-up is done again only when what it installs from has changed.
$(INSTALLED): setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "error: $(PYTHON) is older than 3.10; name another one: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 2; }
	@[ "$$(uname -s)" = Linux ] || { echo "error: this project needs Linux; on another system, use a container or a virtual machine" >&2; exit 2; }
	@echo "Setting up $(VENV) from constraints.txt (about a minute; once)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

data: $(CORPUS)/manifest.json  ## the embedded corpus: the Python standard library's source, 8k byte-level BPE

$(CORPUS)/manifest.json: | $(INSTALLED)
	$(BIN)/python data_pipeline/prepare.py --source stdlib --out $(CORPUS) --resume

# The run's name is `first`, or the next free `first-N`: a second `make pretrain` trains again and overwrites nothing.
# In fp32 where the processor has no bf16 arithmetic: emulated bf16 is slower (recipes/bf16/README.md). The precision of a JSON in ARGS is kept.
pretrain: $(INSTALLED) $(CORPUS)/manifest.json  ## train a nano GPT through ds_configs/zero1_bf16.json; ARGS="..." goes through
	@name=first; n=2; while [ -e "runs/$$name" ]; do name=first-$$n; n=$$((n + 1)); done; \
	port=$$($(BIN)/python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'); set -x; \
	$(BIN)/deepspeed --log_level error --master_port $$port launch/pretrain.py $(if $(findstring --recipe,$(ARGS)),,--deepspeed_config \
	  ds_configs/zero1_bf16.json $(if $(findstring --deepspeed_config,$(ARGS)),,--set bf16.enabled=auto)) --preset nano --data $(CORPUS) --run_name $$name $(ARGS)

# Each of two processes gets whole files, in the order of the folders: tests/distributed takes longest and comes first.
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder

# The tests start hundreds of processes, which read what the first one has compiled.
test test_all: export PYTHONDONTWRITEBYTECODE =

test: $(INSTALLED)  ## the tests (about 10 minutes on two cores)
	$(BIN)/python -m pytest -m "not long" $(PARALLEL)

test_all: $(INSTALLED)  ## the tests with the long grids
	$(BIN)/python -m pytest $(PARALLEL)

lint: $(INSTALLED)  ## ruff, the types, and the rule that imports run one way
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_imports_run_one_way.py

bench: $(INSTALLED) $(CORPUS)/manifest.json  ## the benchmarks, and one table of what they found; ARGS="..." goes through
	$(BIN)/python -m benchmarks $(ARGS)

gpu: $(INSTALLED)  ## correctness and utilization on a GPU (benchmarks/gpu/README.md); ARGS="..." goes through
	$(BIN)/python -m benchmarks.gpu $(ARGS)

pages: $(INSTALLED)  ## all generated pages, tables and pictures, from the committed results
	$(BIN)/python -m launch.comparison.recipe_pages --write
	$(BIN)/python -m benchmarks --pages

clean:  ## remove the virtual environment and the caches (never data/ or runs/)
	rm -rf $(VENV) .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache
