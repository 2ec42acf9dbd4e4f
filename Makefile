# The developer's verbs. Each makes .venv itself when it is missing or out of date.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-all matrix check bench format clean

demo: .venv/installed
	$(BIN)/replicax launch --workers 2 --devices-per-worker 2 examples/digits.py

# Two at a time, but for tests that start workers themselves, and watch the clock.
ALONE := tests/multiprocess tests/launch tests/doctor
WHICH := not slow
test: .venv/installed
	$(BIN)/python -m pytest --numprocesses 2 -m '$(WHICH)' $(addprefix --ignore=,$(ALONE))
	$(BIN)/python -m pytest -m '$(WHICH)' $(ALONE)

# Also the slow ones, and what needs TensorFlow, PyTorch and libtpu. Other builds of PyTorch bring
# gigabytes of CUDA.
test-all: .venv/installed
	$(BIN)/python -m pip install --quiet --editable '.[dev,tensorflow,torch,tpu]' torch==2.13.0
	$(MAKE) test WHICH=

# The oldest, the default and the newest versions of everything; `make matrix SESSIONS=newest` is one.
SESSIONS := oldest default newest
matrix: .venv/installed
	$(BIN)/nox --session $(SESSIONS)

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

bench: .venv/installed
	$(BIN)/python benchmarks/run.py

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .nox .bench build dist

.venv/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "replicax needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --editable '.[dev]'
	touch $@
