# make demo: the AG News comparison. make test: everything the project promises. Both build .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test bench accuracy fuzz docs lint clean

help:  ## Show the commands.
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 8

# The environment is rebuilt when what it is made from changes.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

demo: $(STAMP)  ## Train on AG News with and without projection; table and figures at the end.
	$(BIN)/python -m examples.lora_agnews $(ARGS)

test: $(STAMP)  ## Run all tests and the examples of the documentation.
	$(BIN)/python -m pytest -n auto --dist loadfile $(ARGS)

bench: $(STAMP)  ## Time every method and the published recipes on this machine.
	$(BIN)/python -m benchmarks.projection $(ARGS)

accuracy: $(STAMP)  ## Find out which solver fails where; tables and figure of docs/accuracy.md.
	$(BIN)/python -m benchmarks.accuracy $(ARGS)

fuzz: $(STAMP)  ## Compare a million degenerate integer problems with exact rational arithmetic.
	$(BIN)/python -m benchmarks.fuzz $(ARGS)

docs: $(STAMP)  ## Build the documentation into docs/_build.
	$(BIN)/python -m sphinx -W -q -b html docs docs/_build

lint: $(STAMP)  ## Check style and types.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:  ## Remove the environment and everything built.
	rm -rf $(VENV) docs/_build docs/api build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
