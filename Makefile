# Two commands do everything on a fresh machine (Python 3.11+, git, make): `make demo`, `make test`.
# Each makes .venv and installs what it needs, once per change of pyproject.toml or constraints.txt.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
CHECKED := .venv/.checked
# Of 10,000 modules some 3,000 are ever imported, and compiled then: compiling all takes longer than copying them.
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install --no-compile --constraint constraints.txt
export OMP_NUM_THREADS := 1
# A hundred processes of the tests import Shardwright: compiled once, that takes half the time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test laws check lint types docs format bench clean

help:
	@echo "make demo    plan and train a small language model on this machine (results in out/)"
	@echo "make test    run the whole test suite"
	@echo "make laws    try the laws on 500 random strategies, 1,000 for messages, 20 searched frontiers, 300 drawn examples (some 30 minutes)"
	@echo "make check   lint, types, import layers, spelling"
	@echo "make docs    write again what is generated: cli.md, outputs of examples and README"
	@echo "make format  let ruff format and fix what it can"
	@echo "make bench   list the benchmarks, one command each"

demo: $(INSTALLED)
	$(BIN)/shardwright demo --out out

test: $(INSTALLED)
	@echo "Compiling the planner's kernels and the packages, once; some 50 s"
	@$(BIN)/python -m tests.kernels
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

laws: $(INSTALLED)
	SHARDWRIGHT_LAWS=500 $(BIN)/python -m pytest -m hypothesis --ignore tests/laws --timeout 1800
	SHARDWRIGHT_LAWS=500 $(BIN)/python -m pytest tests/laws tests/papers/test_transformer_layer_traffic.py tests/docs tests/verbs/test_rules.py --timeout 1800

check: lint types

lint: $(CHECKED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/codespell README.md ARCHITECTURE.md CONTRIBUTING.md CHANGELOG.md docs examples src tests benchmarks

types: $(CHECKED)
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(INSTALLED)
	$(BIN)/python docs/make.py

format: $(CHECKED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(INSTALLED)
	@for script in benchmarks/*.py; do echo "$(BIN)/python $$script"; done

clean:
	rm -rf .venv out

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("Shardwright needs Python 3.11 or newer, not " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv

# torch first and by itself: it is the large one, and it is kept when anything else changes.
.venv/.torch: .venv/bin/python
	$(PIP) torch==2.13.0
	@touch $@

$(INSTALLED): .venv/.torch pyproject.toml constraints.txt
	$(PIP) --editable '.[train,models,test]'
	@touch $@

# What checks beside the packages, at the versions of constraints.txt: Shardwright itself is not installed anew.
$(CHECKED): $(INSTALLED)
	$(PIP) ruff pyright codespell
	@touch $@
