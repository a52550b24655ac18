# PYTHON makes the environment ENV if it is not there yet; ARGS goes to the trainer or to pytest.
PYTHON ?= python3
ENV ?= .venv
ARGS ?=

BIN := $(ENV)/bin
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Two installations into one environment would spoil each other.
.NOTPARALLEL:
.PHONY: help train test lint docs clean

help: ## show this
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-6s %s\n", $$1, $$2 }' Makefile
	@echo 'Settings: PYTHON=$(PYTHON)  ENV=$(ENV)  ARGS="--steps 20"'

train: $(ENV)/installed-train ## train the debug preset: on GPUs if there are any, else on 8 simulated devices
	@$(BIN)/python -m train --preset debug $(ARGS)

# worksteal hands each worker a contiguous run of tests, so that neighbours share what they compile
# and their fixtures, and lets the worker that is done first take over from the other's end.
#
# Without bytecode of an earlier run, each worker rewrites the assertions of 300 modules and compiles
# them. An environment may forbid to write it: the suite does, and `make clean` removes it.
test: $(ENV)/installed-test ## run the suite; exhaustive: ARGS="-m 'not gpu'"; on GPUs: ARGS="-m gpu -n 0"
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

lint: $(ENV)/installed-lint ## check style, format and types
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/pyright --pythonpath $(BIN)/python

# Broken links, missing references and pages that no index lists are errors. Nothing is fetched.
docs: $(ENV)/installed-docs ## make the site, build/docs/index.html, from docs/ and the docstrings
	@$(BIN)/python -m sphinx --quiet -W --keep-going -c docs -d build/doctrees . build/docs

clean: ## remove the environments and caches; checkpoints and logs stay
	if [ -f $(ENV)/pyvenv.cfg ]; then rm -rf $(ENV); fi
	rm -rf .venv-* .pytest_cache .ruff_cache .hypothesis build dist docs/reference/generated
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The extra with the CUDA build of jax for this machine's NVIDIA driver; empty without a driver.
NVIDIA_DRIVER = { nvidia-smi --query-gpu=driver_version --format=csv,noheader \
	|| cat /proc/driver/nvidia/version; } 2>/dev/null | grep -oE '[0-9]{3,}\.[0-9]+' | head -n 1
CUDA = $(shell $(NVIDIA_DRIVER) | awk -F. '{ print ($$1 >= 580 ? ",cuda" : ",cuda12") }')

$(ENV)/installed-train: EXTRAS = train,hf$(CUDA)
$(ENV)/installed-test: EXTRAS = test$(CUDA)
$(ENV)/installed-lint: EXTRAS = lint
$(ENV)/installed-docs: EXTRAS = docs

# Each file marks a finished installation, which a later change of pyproject.toml repeats.
$(ENV)/installed-%: pyproject.toml | $(ENV)/created
	@extras='$(EXTRAS)'; \
	echo "Installing collective_matmul[$$extras] into $(ENV); the first time takes minutes."; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[$$extras]"
	@touch $@

$(ENV)/created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	echo "PYTHON=$(PYTHON): Python 3.11 or newer is needed, and this is '$$($(PYTHON) --version 2>&1)';" \
	"name another, as in: make PYTHON=python3.12 train" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	echo "PYTHON=$(PYTHON): this Python cannot make environments; install its venv package" \
	"(Debian and Ubuntu: apt install python3-venv) or name another Python" >&2; exit 1; }
	@$(PYTHON) -m venv $(ENV)
	@touch $@
