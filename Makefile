# The developer's verbs. Each makes .venv itself when it is missing or out of date.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-all matrix chaos check docs docs-serve bench format clean

demo: .venv/installed
	$(BIN)/replicax launch --workers 2 --devices-per-worker 2 examples/digits.py

# Two at a time, but for tests that start workers themselves, and watch the clock.
ALONE := tests/multiprocess tests/launch tests/doctor tests/chaos tests/parameter_server
WHICH := not slow
test: .venv/installed
	$(BIN)/python -m pytest --numprocesses 2 -m '$(WHICH)' $(addprefix --ignore=,$(ALONE))
	$(BIN)/python -m pytest -m '$(WHICH)' $(ALONE)

# Also the slow ones, and what needs Ray, TensorFlow, PyTorch, Accelerate and libtpu. Other builds of
# PyTorch bring gigabytes of CUDA.
test-all: .venv/installed
	$(BIN)/python -m pip install --quiet --editable '.[dev,ray,tensorflow,torch,tpu]' accelerate torch==2.13.0
	$(MAKE) test WHICH=

# The oldest, the default and the newest versions of everything; `make matrix SESSIONS=newest` is one.
SESSIONS := oldest default newest
matrix: .venv/installed
	$(BIN)/nox --session $(SESSIONS)

# Random failures until Ctrl-C, then a table. `SEED=7 SECONDS=1800` chooses what is tried and for how
# long; `SEED=7 TRIAL=12` repeats one trial.
chaos: .venv/installed
	JAX_PLATFORMS=cpu PYTHONPATH=src:tests $(BIN)/python -m chaos $(if $(SEED),--seed $(SEED)) \
	    $(if $(SECONDS),--seconds $(SECONDS)) $(if $(TRIAL),--trial $(TRIAL))

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

# The site, in site/. Open site/index.html, or look at it while you edit: `make docs-serve`.
docs docs-serve: export NO_MKDOCS_2_WARNING = 1
docs: .venv/installed
	$(BIN)/mkdocs build --quiet

docs-serve: .venv/installed
	$(BIN)/mkdocs serve

bench: .venv/installed
	$(BIN)/python benchmarks/run.py

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .nox .bench .jax_cache build dist site

.venv/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "replicax needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --editable '.[dev]'
	touch $@
