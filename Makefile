# Needs python3 (>= 3.11) with pip and venv; everything else is installed into $(VENV).
PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?= -n 3
BIN := $(VENV)/bin

.PHONY: demo test gate notebooks bench bench-compiled clean

demo: $(VENV)/.examples
	$(BIN)/python examples/train_gpt.py

test: $(VENV)/.test,examples
	$(BIN)/python -m pytest $(PYTEST_ARGS)

gate: $(VENV)/.test,examples,gate
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

notebooks: $(VENV)/.notebooks,examples
	$(BIN)/jupyter-execute --timeout=300 notebooks/*.ipynb

bench: $(VENV)/.examples
	set -e; for name in step accumulate overhead processes zero reductions exposed balance power input checkpoint two_processes; do \
		echo "== $$name"; $(BIN)/python benchmarks/$$name.py; \
	done

# Programs for devices that are not here, by NVIDIA's compiler (Linux).
bench-compiled: $(VENV)/.examples,gpu
	$(BIN)/python benchmarks/memory_table.py

clean:
	rm -rf $(VENV) build *.egg-info

# One stamp for each set of extras: installed again only when pyproject.toml has changed. Of a GB of
# packages little is ever imported: what is, Python compiles then.
$(VENV)/.%: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable '.[$*]'
	touch $@
