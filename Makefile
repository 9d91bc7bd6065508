# make test    set up .venv and run every check
# make demo    set up .venv and show a reload on a small model
#
# PYTHON       interpreter that makes .venv (3.11 or 3.12)
# TORCH_INDEX  index with CPU builds of torch, where the default one has only CUDA builds:
#              make test TORCH_INDEX=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
TORCH_INDEX ?=
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints-cpu.txt

.PHONY: test check demo

test: check
	$(BIN)/pytest $(PYTEST_ARGS)

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

demo: $(INSTALLED)
	$(BIN)/python examples/demo.py

$(INSTALLED): pyproject.toml constraints-cpu.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "TokenSpeed needs Python 3.11 or newer; give one with PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	$(PIP_INSTALL) --editable '.[dev]'
	touch $@
