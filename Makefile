# `make demo` and `make test` set themselves up: Python 3.11+ and make are enough.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

# Bytecode is kept even where the environment says otherwise: compiling all tests takes ten seconds.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

.PHONY: demo docs tables playground torture test test-slow test-all lint style setup clean

demo: $(READY)
	$(BIN)/driftgen demo --out runs/demo

# Writes the tables of README.md, docs/ and results/ from the files in results/.
tables: $(READY)
	$(BIN)/python -m tools.tables

# Builds the guide into site/. A broken link, a stale table or a public name without a docstring fails.
# Not --quiet, with which mkdocs does not count warnings.
docs: $(READY)
	$(BIN)/python -m tools.tables --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo site/index.html

# Writes the playground as one file from its sources.
playground: $(READY)
	$(BIN)/python -m tools.playground

# Tries to break everything for half an hour on two cores, and writes the figures to results/reliability.
torture: $(READY)
	$(BIN)/python -m tools.torture --out results/reliability

# Everything but the tests marked slow. The type check, which uses one core, runs beside the tests.
test: style
	@$(BIN)/mypy > $(VENV)/mypy.log 2>&1 & types=$$!; trap "kill $$types" INT TERM; \
	$(PYTEST) -m "not slow"; tests=$$?; \
	wait $$types; types=$$?; cat $(VENV)/mypy.log; \
	test $$tests -eq 0 && test $$types -eq 0

test-slow: $(READY)
	$(PYTEST) -m slow

test-all: $(READY) lint
	$(PYTEST)

lint: style
	$(BIN)/mypy

style: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

setup: $(READY)

# Made anew only when what is to be installed changes.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "driftgen needs Python 3.11 or newer: make PYTHON=/path/to/python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,latent,encoders,eval,datasets,policy,onnx,studio,serve,docs]'
	touch $(READY)

clean:
	rm -rf $(VENV) runs site .mypy_cache .ruff_cache .pytest_cache .hypothesis
