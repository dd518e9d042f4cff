# Build, show, test and check the project: `make demo` and `make test` are all that a newcomer needs.
#
# Every target first brings the virtual environment up to date. The stamp file stands for a finished set-up; it is made
# anew when a requirement, a build file or a C++ source is newer, or when a compiler has come or gone since. With a compiler,
# a C++ part that does not build is an error; without one they are left out.
# To change from outside: PYTHON (the interpreter that makes the environment), VENV (its folder), PIP_ARGS (passed to
# every `pip install`), CXX (the C++ compiler), PYTEST_ARGS (passed to pytest).

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
PYTEST_ARGS ?=

# Make's own default for CXX hides whether there is a compiler; torch builds with $CXX, else c++.
ifeq ($(origin CXX),default)
CXX := c++
else
export CXX
endif

BIN := $(VENV)/bin
CXX_SOURCES := $(shell find csrc csrc_stub -name '*.cpp' -o -name '*.h')
PIP := $(BIN)/python -m pip --disable-pip-version-check install $(PIP_ARGS)
STAND_IN_LINE = $(BIN)/python -c 'import torch_neuron_scatter.report as report; print(report.stand_in_line())'
COMPILER := $(shell command -v $(firstword $(CXX)))
STAMP := $(VENV)/.ready-$(if $(COMPILER),with,without)-compiler

.PHONY: setup demo test bench lint format clean

setup: $(STAMP)

$(STAMP): requirements-dev.txt setup.py pyproject.toml $(CXX_SOURCES)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("Python 3.10 or newer is needed, this is " + sys.version.split()[0] + "; name another with: make PYTHON=...")'
	@echo "Setting up $(VENV): torch and the tools of requirements-dev.txt, then this package (minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -r requirements-dev.txt
	PATH="$(abspath $(BIN)):$$PATH" TORCH_NEURON_SCATTER_CPP=$(if $(COMPILER),1,0) $(PIP) --quiet --no-build-isolation --no-deps --editable .
	@$(STAND_IN_LINE)
	@rm -f $(VENV)/.ready-*
	@touch $@

demo: $(STAMP)
	$(BIN)/python examples/demo.py

# One thread a worker: the workers already fill the cores.
test: $(STAMP)
	@$(STAND_IN_LINE)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 $(PYTEST_ARGS)

bench: $(STAMP)
	$(BIN)/python benchmarks/cpu_op.py
	$(BIN)/python benchmarks/kernel_model.py

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(if $(CXX_SOURCES),$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES))

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(if $(CXX_SOURCES),$(BIN)/clang-format -i $(CXX_SOURCES))

clean:
	rm -rf $(VENV) build *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +
	find torch_neuron_scatter csrc_stub -name '*.so' -delete
