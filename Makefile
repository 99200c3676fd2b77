# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
NOTEBOOK ?= nbs
WORKERS ?= 2

.PHONY: demo test docs lint lab export readme bench bench-optimizers clean

# torch first and by itself: its pinned release is the one that every other package is tested with.
$(VENV)/.base: constraints.txt pyproject.toml
	@echo "Installing into $(VENV) (about two minutes the first time) ..."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "pip>=24.2" "setuptools>=77" wheel
	$(PIP) torch
	$(PIP) -e .
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP) -e ".[dev]"
	touch $@

demo: $(VENV)/.base  ## find the best pipeline for the Python language reference
	$(BIN)/ai4rag-nb demo

test: $(VENV)/.dev  ## run everything that must hold
	$(BIN)/python -m pytest -q -p no:cacheprovider -n $(WORKERS) --dist loadgroup --durations=15 --cov=ai4rag_nb --cov-report=term:skip-covered --cov-fail-under=90 tests

docs: $(VENV)/.dev  ## build the documentation into _docs
	$(BIN)/python tools/build_docs.py

lint: $(VENV)/.dev  ## style and types
	$(BIN)/ruff check nbs ai4rag_nb tests tools benchmarks
	$(BIN)/ruff format --check nbs tests tools benchmarks
	$(BIN)/mypy ai4rag_nb

export: $(VENV)/.dev  ## generate the package and the README from the notebooks
	$(BIN)/nbdev-export
	$(BIN)/nbdev-clean
	$(BIN)/python tools/build_indexes.py
	$(BIN)/python tools/build_readme.py

lab: $(VENV)/.dev  ## open the notebooks
	$(BIN)/jupyter lab $(NOTEBOOK)

bench: $(VENV)/.dev  ## measure; the grids that optimizers are replayed on are made apart, they take hours
	for script in $(filter-out benchmarks/make_tables.py,$(wildcard benchmarks/*.py)); do $(BIN)/python $$script || exit 1; done

bench-optimizers: $(VENV)/.dev  ## replay the grids in benchmarks/tables to optimizers, and write the result
	$(BIN)/python benchmarks/optimizers.py --save

clean:  ## remove what was generated, but not what was paid for
	rm -rf $(VENV) _docs _proc build dist .pytest_cache .ruff_cache .mypy_cache .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
