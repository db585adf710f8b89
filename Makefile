# make train | test | test-slow | test-extras | nightly | lint | docs | pictures | bench, on a fresh machine too: the
# first call makes the virtual environment, and each call installs what it needs and is not there yet.
#   PYTHON=python3.12   another interpreter for the virtual environment
#   PYTEST_ARGS="-k coverage -x"   more arguments for pytest
#   JOBS=8   pytest processes; by default one more than there are cores

SHELL := /bin/bash
VENV ?= .venv
# One more than there are cores: tests also wait for files and for other processes.
JOBS ?= $(shell echo $$(($$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2) + 1)))
PYTHON ?=
PYTEST_ARGS ?=

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
CHECK := import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))

# Containers often forbid Python to keep bytecode; pytest then rewrites all tests anew in every run.
PYTEST = env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

# Environments, loggers, export formats, learners and simulators of other libraries, tested against the real packages.
# playground needs another MuJoCo than Meta-World, so an environment of its own:
#   make test-extras VENV=.venv-playground EXTRAS=playground TEST_PACKAGES=
EXTRAS ?= gymnax,jumanji,brax,jaxmarl,gymnasium,pettingzoo,envpool,export,wandb,torch,real
TEST_PACKAGES ?= onnxruntime mpe2 stable-baselines3 sbx-rl supersuit

# The interpreters that are tried for a new virtual environment, the first that runs.
PYTHONS := $(or $(PYTHON),python3.13 python3.12 python3.11 python3)
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --quiet

.NOTPARALLEL: # targets install into one virtual environment
.PHONY: train test test-slow test-extras nightly lint docs pictures format bench clean

train: $(INSTALLED)
	$(BIN)/python -m jaxrl.train --config configs/coma_quick.yaml
	$(BIN)/python -m jaxrl.evaluate "$$(cat runs/latest)"
	$(BIN)/python -m jaxrl.render "$$(cat runs/latest)" --out "$$(cat runs/latest)/mission.png"

test: $(INSTALLED)-test
	$(PYTEST) $(PYTEST_ARGS)

test-slow: $(INSTALLED)-test
	JAXRL_TEST_XLA_FLAGS= $(PYTEST) -m "slow or bench" $(PYTEST_ARGS)

# The tests that need them, slow ones and those of benchmarks, too; without these packages every target skips them.
test-extras: $(INSTALLED)
	$(PIP_INSTALL) --editable '.[test,$(EXTRAS)]' $(TEST_PACKAGES)
	$(PYTEST) -m needs $(PYTEST_ARGS)

# Every test, compiled as users' programs are: the default run tells the compiler to be quick.
nightly: $(INSTALLED)-test
	JAXRL_TEST_XLA_FLAGS= $(PYTEST) -m "" $(PYTEST_ARGS)

lint: $(INSTALLED)-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(INSTALLED)-docs
	$(BIN)/python -m bench.tables --check
	$(BIN)/python -m scripts.pictures --check
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/python -m mkdocs build --strict --quiet --site-dir build/site
	@echo "the documentation is in build/site"

# The pictures of the documentation, drawn anew where the program draws them otherwise.
pictures: $(INSTALLED)
	$(BIN)/python -m scripts.pictures

format: $(INSTALLED)-lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)
	$(BIN)/python -m bench.env_throughput

clean:
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info

# Installs again only when the list of dependencies or packages has changed. A candidate must really run: the
# shims of version managers are found on the PATH also where no interpreter stands behind them.
$(INSTALLED): pyproject.toml setup.py
	@if ! $(BIN)/python -c '$(CHECK)' 2>/dev/null; then \
	    for candidate in $(PYTHONS); do \
	        if $$candidate -c '$(CHECK)' >/dev/null 2>&1; then chosen=$$candidate; break; fi; \
	    done; \
	    if [ -z "$$chosen" ]; then \
	        echo "make: no Python 3.11 or newer with the venv module runs here (tried:" \
	            "$(PYTHONS)); install one, or name it: make PYTHON=/path/to/python3.13" >&2; \
	        exit 1; \
	    fi; \
	    rm -rf $(VENV) && $$chosen -m venv $(VENV); \
	fi
	@echo "installing jaxrl with $$($(BIN)/python --version) into $(VENV): this takes a minute or more"
	@$(PIP_INSTALL) --editable .
	@touch $@

# The tools of a target, which are an extra in pyproject.toml: $(INSTALLED)-test, $(INSTALLED)-lint, $(INSTALLED)-docs.
$(INSTALLED)-%: $(INSTALLED)
	@echo "installing the tools for make $* into $(VENV)"
	@$(PIP_INSTALL) --editable '.[$*]'
	@touch $@
