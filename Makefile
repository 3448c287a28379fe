# make test       lint-free test run: everything but the longest tests
# make test-all   everything but what needs a GPU (benchmarks/gpu_check.py)
# make demo       the main job on a real model, speed beside quality
# make lint       style
# make clean      what the targets above made, the fetched model and texts included
#
# One virtual environment, .venv, made by $(PYTHON); `make demo` installs only what the demo needs.
PYTHON ?= python3
MARKERS ?= not slow_all and not gpu
PYTEST ?= --durations=10

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet install
# The CUDA kernels are compiled, and their compilation tested, where there is an nvcc.
NVCC := $(shell command -v nvcc)
CUDA := $(if $(NVCC),-C cmake.define.TIDE_CUDA=ON)
SOURCES := pyproject.toml CMakeLists.txt $(shell find xla_ffi -type f)

# Programs compiled by one target are used again by the next.
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.jax_cache
# Without this, jax looks for a GPU behind the compiler that the tests install. `make demo JAX_PLATFORMS=cuda`.
export JAX_PLATFORMS ?= cpu

.PHONY: test test-all demo lint clean

test: $(VENV)/.test
	$(BIN)/python examples/assets.py
	TIDE_REQUIRE_KERNELS=1 TIDE_REQUIRE_AOT=1 $(if $(NVCC),TIDE_REQUIRE_CUDA=1) $(BIN)/python -m pytest -m "$(MARKERS)" $(PYTEST)

test-all: MARKERS := not gpu
test-all: test

demo: $(VENV)/.demo
	$(BIN)/python examples/demo.py

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) .assets .jax_cache build demo_out .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The build's own requirements, so that pip can build without an isolated copy of jax.
$(VENV)/.build: $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Python 3.11 or newer is needed, $(PYTHON) is {sys.version}")'
	$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")' > $@.txt
	$(PIP) -r $@.txt
	touch $@

$(VENV)/.demo: $(VENV)/.build
	$(PIP) --no-build-isolation -e '.[plot]'
	touch $@

# torch: the version that the parity tests were written with. The two jax packages are XLA's compiler for NVIDIA GPUs,
# which compiles for an H200 without one, and libtpu that for TPUs; they need none of their dependencies for that.
$(VENV)/.test: $(VENV)/.build
	$(PIP) --no-build-isolation $(CUDA) -e '.[test,plot,dev]' torch==2.13.0
	version=$$($(BIN)/python -c 'import jax; print(jax.__version__)') \
	&& $(PIP) --no-deps jax-cuda13-pjrt==$$version jax-cuda13-plugin==$$version libtpu==0.0.52
	touch $(VENV)/.demo $@
