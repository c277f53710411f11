# Everything here runs in .venv, which is made on first use and again only when its ingredients change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt
INGREDIENTS := pyproject.toml constraints.txt

.PHONY: quickstart test quality study defaults clean

quickstart: $(VENV)/.installed
	$(BIN)/headpool run recipes/quickstart/gqa2.yaml

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -q -n auto --dist worksteal

quality: $(VENV)/.installed-quality
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/types && mkdir -p build/types && cp -r src/headpool build/types/
	cp -r convert uptrain eval build/types/headpool/
	MYPYPATH=build/types $(BIN)/mypy --python-executable $(BIN)/python -p headpool
	$(BIN)/codespell

# Some hours on two cores; it goes on where it was stopped.
study: $(VENV)/.installed
	$(BIN)/python benchmarks/study.py

# Measure the class defaults of all families anew from the installed transformers.
defaults: $(VENV)/.installed
	$(BIN)/python tools/class_defaults.py

$(VENV)/.installed: $(INGREDIENTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) -e .
	touch $@

$(VENV)/.installed-%: $(INGREDIENTS) $(VENV)/.installed
	$(INSTALL) -e '.[$*]'
	touch $@

clean:
	rm -rf $(VENV) build dist headpool-out
