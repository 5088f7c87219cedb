# `make demo` and `make test` set themselves up: Python 3.11+ and make are enough.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

.PHONY: demo tables test test-slow test-all lint setup clean

demo: $(READY)
	$(BIN)/driftgen demo --out runs/demo

# Writes the tables of README.md, docs/ and results/ from the files in results/.
tables: $(READY)
	$(BIN)/python -m tools.tables

# Everything but the tests marked slow.
test: $(READY) lint
	$(PYTEST) -m "not slow"

test-slow: $(READY)
	$(PYTEST) -m slow

test-all: $(READY) lint
	$(PYTEST)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup: $(READY)

# Made anew only when what is to be installed changes.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "driftgen needs Python 3.11 or newer: make PYTHON=/path/to/python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,latent,encoders,eval,datasets,policy]'
	touch $(READY)

clean:
	rm -rf $(VENV) runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
