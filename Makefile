# Everything works from a fresh clone: the environment in .venv is made on demand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
# The version that was tried, and the one with a small CPU build where an index offers one;
# newer ones come as several GB for CUDA. TORCH='torch>=2.13' takes what pip prefers.
TORCH ?= torch==2.13.0

.DEFAULT_GOAL := help
.PHONY: help demo serve test check bench-quick clean

help:
	@echo "make demo         two conversations over one document, and a table (ARGS='--document FILE')"
	@echo "make serve        the API on 127.0.0.1:8000, until Ctrl-C"
	@echo "make test         all tests"
	@echo "make check        format, lint, types, architecture, packaging, generated code"
	@echo "make bench-quick  a short benchmark of time to first token"
	@echo "make clean        remove .venv and what tools left behind"

demo: $(VENV)/.run
	$(BIN)/criticalkv demo $(ARGS)

serve: $(VENV)/.run
	$(BIN)/criticalkv serve $(ARGS)

# Two processes at once: much of the time goes into waiting for servers to start.
test: $(VENV)/.test
	$(BIN)/pytest -n 2 --dist loadscope --no-loadscope-reorder $(ARGS)

check: $(VENV)/.dev
	PYTHON=$(abspath $(BIN)/python) infra/scripts/check.sh

bench-quick: $(VENV)/.run
	$(BIN)/criticalkv bench ttft --quick --json /tmp/criticalkv-ttft.json $(ARGS)

clean:
	rm -rf $(VENV) .check .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info

# One stamp per set of dependencies: installed once, and again when pyproject.toml changes.
# A larger set contains the smaller ones, so its stamp renews theirs as well.
$(VENV)/.run: $(VENV)/.python pyproject.toml
	$(BIN)/python -m pip install '$(TORCH)' -e .
	@touch $@

$(VENV)/.test: $(VENV)/.python pyproject.toml
	$(BIN)/python -m pip install '$(TORCH)' -e '.[test]'
	@touch $(VENV)/.run $@

$(VENV)/.dev: $(VENV)/.python pyproject.toml
	$(BIN)/python -m pip install '$(TORCH)' -e '.[dev]'
	@touch $(VENV)/.run $(VENV)/.test $@

$(VENV)/.python:
	@command -v $(PYTHON) >/dev/null || { echo "error: no '$(PYTHON)' found; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: Python 3.11 or newer is needed, '$(PYTHON)' is $$($(PYTHON) -V 2>&1);" \
	       "set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "Creating $(VENV) with $$($(PYTHON) -V) …"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --upgrade 'pip>=25'
	@touch $@
