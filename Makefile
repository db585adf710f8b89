# make train | test | test-long | test-extras | nightly | lint | docs | bench, on a fresh machine too: the virtual environment is made on the first call.
#   PYTHON=python3.11   another interpreter for the virtual environment
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

.PHONY: train test test-long test-extras nightly lint docs format bench clean

train: $(INSTALLED)
	$(BIN)/python -m jaxrl.train --config configs/coma_quick.yaml
	$(BIN)/python -m jaxrl.evaluate "$$(cat runs/latest)"
	$(BIN)/python -m jaxrl.render "$$(cat runs/latest)" --out "$$(cat runs/latest)/mission.png"

test: $(INSTALLED)
	$(PYTEST) $(PYTEST_ARGS)

test-long: $(INSTALLED)
	JAXRL_TEST_XLA_FLAGS= $(PYTEST) -m long $(PYTEST_ARGS)

# The tests that need them, the long ones too; without these packages every target skips them.
test-extras: $(INSTALLED)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --editable '.[dev,$(EXTRAS)]' $(TEST_PACKAGES)
	$(PYTEST) -m "needs and not fuzz" $(PYTEST_ARGS)

# Every test, compiled as users' programs are: the default run tells the compiler to be quick.
nightly: $(INSTALLED)
	JAXRL_TEST_XLA_FLAGS= $(PYTEST) -m "" $(PYTEST_ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(INSTALLED)
	$(BIN)/python -m bench.tables --check
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/python -m mkdocs build --strict --quiet --site-dir build/site
	@echo "the documentation is in build/site"

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)
	$(BIN)/python -m bench.compare

clean:
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info

# Installs again only when the list of dependencies or packages has changed. A candidate must really run: the
# shims of version managers are found on the PATH also where no interpreter stands behind them.
$(INSTALLED): pyproject.toml setup.py
	@if ! $(BIN)/python -c '$(CHECK)' 2>/dev/null; then \
	    for candidate in $(or $(PYTHON),python3.12 python3.11 python3); do \
	        if $$candidate -c '$(CHECK)' >/dev/null 2>&1; then chosen=$$candidate; break; fi; \
	    done; \
	    if [ -z "$$chosen" ]; then \
	        echo "make: no Python 3.11 or newer with the venv module runs here (tried:" \
	            "$(or $(PYTHON),python3.12 python3.11 python3)); install one, or name it: make PYTHON=/path/to/python3.12" >&2; \
	        exit 1; \
	    fi; \
	    echo "making $(VENV) with $$($$chosen --version) ($$chosen)"; \
	    rm -rf $(VENV) && $$chosen -m venv $(VENV); \
	fi
	@echo "installing jaxrl and its dependencies into $(VENV): this takes a minute or more"
	$(BIN)/python -m pip install --disable-pip-version-check --editable '.[dev]'
	@touch $@
