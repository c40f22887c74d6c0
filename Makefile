# make demo: the AG News comparison. make test: everything the project promises. Both build .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo study test test-lowest dist matrix bench bench-gpu bench-asv accuracy fuzz soak docs lint clean

help:  ## Show the commands.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

# The environment is rebuilt when what it is made from changes.
$(STAMP): pyproject.toml constraints.txt
	@echo "Installing 3 GB into $(VENV), which takes some minutes and prints nothing."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

demo: $(STAMP)  ## Train on AG News with and without projection; table and figures at the end.
	$(BIN)/python -m examples.lora_agnews $(ARGS)

study: $(STAMP)  ## Do what is missing of the study, and draw what is there; hours, and it may be stopped.
	$(BIN)/python -m examples.study.paper
	$(BIN)/python -m examples.study.skill
	$(BIN)/python -m examples.study --time $(ARGS)

test: $(STAMP)  ## Run all tests and the examples of the documentation.
	$(BIN)/python -m pytest -n auto --dist loadfile $(ARGS)
	$(OTHER_ARITHMETIC) GEMPROJ_BACKEND=portable $(BIN)/python -m pytest -q -n auto $(NUMERICAL) $(ARGS)

# What runs once more on the portable backend, with other kernels of OpenBLAS, MKL and torch than this machine's:
# other orders of sums, and no FMA. The strict array library takes that backend anyway.
NUMERICAL := -k 'not array_api_strict' $(addprefix tests/test_,stages.py exact.py bounds.py feasibility.py refine.py certificate.py)
OTHER_ARITHMETIC := OPENBLAS_CORETYPE=Nehalem MKL_CBWR=COMPATIBLE ATEN_CPU_CAPABILITY=default

# An environment of its own, of some gigabytes, with the lowest version of everything; before a release.
LOWEST := .venv-lowest

test-lowest: $(LOWEST)/.installed  ## Run all tests with the lowest versions that pyproject.toml admits.
	$(LOWEST)/$(notdir $(BIN))/python -m pytest -p tests.lowest -n auto --dist loadfile $(ARGS)

$(LOWEST)/.installed: pyproject.toml
	$(PYTHON) -m venv --clear $(LOWEST)
	$(LOWEST)/$(notdir $(BIN))/python tests/lowest.py > $(LOWEST)/constraints.txt
	$(LOWEST)/$(notdir $(BIN))/python -m pip install --disable-pip-version-check -q -c $(LOWEST)/constraints.txt -e '.[test]'
	@touch $@

# In an environment of its own, so that a release needs nothing but these two.
PUBLISH := .venv-dist

dist:  ## Build sdist and wheel into dist/, and check what they hold.
	$(PYTHON) -m venv --clear $(PUBLISH)
	$(PUBLISH)/bin/python -m pip install --disable-pip-version-check -q build twine
	$(PUBLISH)/bin/python tests/dists.py

matrix:  ## Install and test the wheel in some twenty environments, one by one; hours; docs/results/matrix.md.
	$(PYTHON) tests/matrix.py $(ARGS)

bench: $(STAMP)  ## Time every method and the published recipes on this machine.
	$(BIN)/python -m asv_benchmarks.reports.projection $(ARGS)

# In no environment of its own: a machine with a GPU has the torch that fits it.
bench-gpu:  ## Check and time everything on an NVIDIA device, with the torch of PYTHON.
	$(PYTHON) -m asv_benchmarks.reports.gpu --out docs/results/bench-gpu.md $(ARGS)

bench-asv: $(STAMP)  ## Record the benchmarks of commits, HEAD by default; pages of all recorded ones in asv_benchmarks/html.
	$(BIN)/python -m asv_benchmarks.reports.commits $(ARGS)

accuracy: $(STAMP)  ## Find out which solver fails where; tables and figure of docs/accuracy.md.
	$(BIN)/python -m asv_benchmarks.reports.accuracy $(ARGS)

fuzz: $(STAMP)  ## Compare a million degenerate integer problems with exact rational arithmetic; hours.
	$(BIN)/python -m asv_benchmarks.reports.fuzz $(ARGS)

soak: $(STAMP)  ## Train ten thousand steps, and see whether memory stays flat.
	$(BIN)/python -m asv_benchmarks.reports.soak $(ARGS)

docs: $(STAMP)  ## Build the documentation into docs/_build, run its gallery, and check links and formulas.
	$(BIN)/python -m sphinx -W -q -b html docs docs/_build

lint: $(STAMP)  ## Check style, types and the workflows.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/zizmor --offline --quiet .github

clean:  ## Remove the environment and everything built.
	find gemproj -name '*.nb[ci]' -delete
	rm -rf $(VENV) $(LOWEST) $(PUBLISH) asv_benchmarks/env asv_benchmarks/html docs/_build docs/gallery_pages build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
