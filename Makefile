# make install     set up .venv, so that `.venv/bin/ts serve smollm2` runs
# make test        every check, and every test
# make check       format, lint, types and the rules of imports
# make test-fast   every check, and the tests that need neither a model nor a server: two minutes
# make kernels     the tests of edited kernels, with every supported version of Triton and with CuTe DSL
# make demo        show a reload on a small model
# make docs        write anew what is generated in docs/
# make image       build the container image, for a CPU or with DEVICE=cuda
#
# PYTHON       interpreter that makes .venv (3.11 or 3.12)
# TORCH_INDEX  index with CPU builds of torch, where the default one has only CUDA builds:
#              make test TORCH_INDEX=https://download.pytorch.org/whl/cpu
# EXTRAS       what is installed beside the server itself; the checks and tests need dev
# PYTEST_ARGS  which tests, such as PYTEST_ARGS='tests/tokenspeed/cli -x'

PYTHON ?= python3
TORCH_INDEX ?=
EXTRAS ?= dev
DEVICE ?= cpu
PYTEST_ARGS ?=
TRITONS ?= 3.6.0 3.7.1 3.9.0
CUTE ?= 4.8.1

comma := ,
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed-$(subst $(comma),-,$(EXTRAS))
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints-cpu.txt

KERNEL_TESTS := -c tests/tokenspeed_reload/kernels.ini --rootdir . --confcutdir tests/tokenspeed_reload tests/tokenspeed_reload
FAST_TESTS := \
	tests/tokenspeed_reload/test_loader.py \
	tests/tokenspeed_reload/test_reload.py \
	tests/tokenspeed_reload/test_runonce.py \
	tests/tokenspeed/cli \
	tests/tokenspeed/server \
	tests/tokenspeed/test_modelname.py \
	tests/tokenspeed/runtime/cache \
	tests/tokenspeed/runtime/distributed \
	tests/tokenspeed/runtime/scheduler \
	tests/test_docs.py

.PHONY: install test test-fast check demo docs image kernels cute

# A reload looks at every object of its process, and torch brings a million: the reloader's tests run apart from it.
RELOADER := tests/tokenspeed_reload
WITH_TORCH := $(RELOADER)/test_torch.py
OTHERS := $(filter-out $(RELOADER)/ %/__pycache__/,$(wildcard tests/*/)) $(wildcard tests/test_*.py)

test: check
ifdef PYTEST_ARGS
	$(BIN)/pytest $(PYTEST_ARGS)
else
	failed=0; \
	$(BIN)/pytest $(RELOADER) --ignore $(WITH_TORCH) || failed=1; \
	$(BIN)/pytest $(OTHERS) $(WITH_TORCH) || failed=1; \
	exit $$failed
endif

test-fast: check
	$(BIN)/pytest $(FAST_TESTS) $(PYTEST_ARGS)

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

kernels: $(TRITONS:%=triton-%) cute

# Triton up to 3.6 does not work with numpy 2.4.
triton-%:
	test -x $(VENV)-$@/bin/pytest || $(PYTHON) -m venv $(VENV)-$@
	$(VENV)-$@/bin/python -m pip install --quiet --disable-pip-version-check triton==$* 'numpy<2.4' pytest
	PYTHONPATH=src TRITON_INTERPRET=0 $(VENV)-$@/bin/pytest $(KERNEL_TESTS)/triton/compiled.py
	PYTHONPATH=src TRITON_INTERPRET=1 $(VENV)-$@/bin/pytest $(KERNEL_TESTS)/triton/interpreted.py

cute:
	test -x $(VENV)-$@/bin/pytest || $(PYTHON) -m venv $(VENV)-$@
	$(VENV)-$@/bin/python -m pip install --quiet --disable-pip-version-check nvidia-cutlass-dsl==$(CUTE) pytest
	PYTHONPATH=src $(VENV)-$@/bin/pytest $(KERNEL_TESTS)/cute/compiled.py tests/tokenspeed_reload/cute/own.py

demo: $(INSTALLED)
	$(BIN)/python examples/demo.py

docs: $(INSTALLED)
	$(BIN)/python docs/generate.py

image:
	docker build --build-arg DEVICE=$(DEVICE) --tag tokenspeed:$(DEVICE) .

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints-cpu.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "TokenSpeed needs Python 3.11 or newer; give one with PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	$(PIP_INSTALL) --editable '.[$(EXTRAS)]'
	touch $@
