# `make` prints what there is to do. Needs Python 3.11 or newer with pip; everything else goes into .venv.

PYTHON ?= python3
# More arguments for the command that a target runs: make test ARGS="-k fused -x"
ARGS ?=
# Test processes.
JOBS ?= 2
# For `make demo`: a hub id or a folder.
MODEL ?=
# Where torch comes from, if not from the default index:
#   make test TORCH_PIP="--index-url https://download.pytorch.org/whl/cpu"
TORCH_PIP ?=
# Pythons on which the torch-free tests run too, if present.
OTHER_PYTHONS ?= 3.12 3.13

VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
TREE := build/tree
ROOMS := converters training tools
TORCH := $(shell sed -n '/^torch==/p' constraints.txt)
TORCH_FREE := $(OTHER_PYTHONS:%=test-torch-free-%)
PIP := -m pip install --disable-pip-version-check $(if $(CI),--quiet)
PIP_INSTALL := $(PIP) -c constraints.txt
# One thread per process: the test processes share the cores already.
PYTEST := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(PY) -m pytest

MAKEFLAGS += --no-builtin-rules
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help env tree lint format test test-slow test-torch-free $(TORCH_FREE) coverage bench demo build clean distclean

help:  ## print this
	@awk -F ':.*  ## ' '/^[a-z-]+:.*  ## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# -- environment -------------------------------------------------------------------------------------------------------

env: $(INSTALLED)  ## create or update .venv

# torch goes first and alone: asked for by another package's range, pip may pick a newer build with gigabytes of CUDA.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c "import sys; sys.version_info >= (3, 11) or sys.exit('qwen3conv needs Python 3.11 or newer, and \
	%s is %s. Say which to use: make PYTHON=python3.12' % (sys.executable, sys.version.split()[0]))"
	@echo "Installing into $(VENV): some minutes the first time"
	$(PYTHON) -m venv $(VENV)
	$(PY) $(PIP_INSTALL) $(TORCH_PIP) '$(TORCH)'
	$(PY) $(PIP_INSTALL) -e '.[train,dev]'
	@touch $@

# The rooms under their package name, for tools that read files: qwen3conv.converters is the folder converters.
tree:
	@rm -rf $(TREE) && mkdir -p $(TREE)/qwen3conv
	@for path in $(ROOMS) src/qwen3conv/*; do \
		case $$path in *__pycache__*) ;; *) ln -s "../../../$$path" $(TREE)/qwen3conv/ ;; esac; done

# -- checks ------------------------------------------------------------------------------------------------------------

lint: $(INSTALLED) tree  ## ruff, mypy, import rules
	$(PY) -m ruff check .
	$(PY) -m ruff format --check --output-format concise .
	$(PY) -m mypy
	PYTHONPATH=$(TREE) $(VENV)/bin/lint-imports --no-logo

format: $(INSTALLED)  ## let ruff mend what it can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

test: lint test-torch-free  ## everything that must pass before a change lands
	$(PYTEST) -n $(JOBS) --dist loadfile -m 'not slow' $(ARGS)

# An older release, beside the one that is installed and that constraints.txt asks for, for the tests that go from one to the other.
.titan-0.2.2: $(INSTALLED)
	$(PY) $(PIP) --no-deps --target $@ torchtitan==0.2.2

# A mirror of the hub, in an environment of its own: it pins what it needs.
.olah-0.5.4/.installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP) olah==0.5.4
	@touch $@

test-slow: $(INSTALLED) .titan-0.2.2 .olah-0.5.4/.installed  ## the tests that `make test` leaves out
	$(PYTEST) -n $(JOBS) --dist loadfile -m slow $(ARGS)

# Side by side: each is one process.
test-torch-free:  ## the torch-free tests on other Pythons, without torch
	@$(MAKE) --no-print-directory --jobs $(JOBS) $(TORCH_FREE)

# pyenv's shims exist for versions that do not run, so the versions themselves are tried too.
$(TORCH_FREE): test-torch-free-%:
	@for python in python$* "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/$*.*/bin/python$*; do \
		"$$python" -c 'import ensurepip, venv' >/dev/null 2>&1 || continue; \
		$(MAKE) --no-print-directory .venv-$*/.installed PYTHON="$$python" || exit 1; \
		echo "Torch-free tests on Python $*"; \
		exec .venv-$*/bin/python -m pytest -q -m 'torch_free and not slow'; \
	done; echo "Torch-free tests skipped: no python$* here"

.venv-%/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python $(PIP_INSTALL) click numpy rich xxhash pytest hypothesis
	.venv-$*/bin/python $(PIP_INSTALL) --no-deps -e .
	@touch $@

coverage: $(INSTALLED)  ## line and branch coverage of the tests
	$(PY) -m coverage erase
	OMP_NUM_THREADS=1 $(PY) -m coverage run -m pytest -m 'not slow' $(ARGS)
	$(PY) -m coverage combine --quiet
	$(PY) -m coverage report

# -- use ---------------------------------------------------------------------------------------------------------------

bench: $(INSTALLED)  ## speed and memory beside cp and the peers' scripts; ARGS="--help" for more
	$(PY) -m qwen3conv.tools.bench $(ARGS)

demo: $(INSTALLED)  ## convert a model there and back; MODEL=Qwen/Qwen3-0.6B for a real one
	$(PY) examples/demo.py $(if $(MODEL),--model '$(MODEL)') $(ARGS)

build: $(INSTALLED)  ## wheel and sdist in dist/
	rm -rf dist
	$(PY) -m build --no-isolation
clean:  ## remove what was built and cached
	rm -rf build dist *.egg-info .coverage .coverage.* htmlcov
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find $(ROOMS) src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## the same, and the environments
	rm -rf $(VENV) $(OTHER_PYTHONS:%=.venv-%) .titan-0.2.2 .olah-0.5.4
