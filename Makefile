# shardwise: `make plan` answers a question, `make check` runs the fast tests, `make test` all of them.
# Each sets up .venv itself.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check --no-input
WORKERS ?= auto
ROUNDS ?= 10
# CI names .ci/hashes.txt: then of every package in it no other file than the one with its hash is installed.
HASHES ?=
# The versions on which `make test-python` runs, where they are there: as python3.12 on the PATH, or in pyenv.
PYTHONS ?= 3.11 3.12 3.13 3.14
MEGATRON := 0.19.2
MEGATRON_BRIDGE := 0.6.2
TORCHTITAN := 0.3.0
ACCELERATE := 1.15.0
DEEPSPEED := 0.19.8

# Tests start hundreds of processes: where the shell forbids bytecode, each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: plan check test test-random test-oldest test-python test-targets docs bench accuracy demo clean
.DELETE_ON_ERROR:

plan: .venv/installed
	@$(BIN)/shardwise plan examples/llama-3.1-70b --cluster 8x8xH100-SXM --seq-len 8192 --global-batch-size 256

# Everything but the tests marked `slow`: a few minutes on two cores. Run it before each commit.
check: .venv/installed-for-tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -m "not slow" -n $(WORKERS) --maxprocesses 8 --dist loadgroup

test: .venv/installed-for-tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n $(WORKERS) --maxprocesses 8 --dist loadgroup

# The tests that draw examples, each round with others; a round that fails prints its example and ends it.
test-random: .venv/installed-for-tests
	@for round in $$(seq $(ROUNDS)); do echo "round $$round of $(ROUNDS)"; \
	  $(BIN)/pytest -n $(WORKERS) --maxprocesses 8 --dist loadgroup -m hypothesis --hypothesis-profile random || exit 1; done

# The fast tests with the oldest allowed version of every dependency, in an environment of its own.
test-oldest: .venv-oldest/installed
	.venv-oldest/bin/python -m pytest -m "not slow" -W ignore::DeprecationWarning -n $(WORKERS) \
	  --maxprocesses 8 --dist loadgroup tests/unit tests/property tests/recorded tests/architecture

# The fast tests that need no PyTorch on every version of Python that is there, each in an environment of its own.
test-python:
	@for version in $(PYTHONS); do \
	  python=$$(command -v python$$version || ls "$$HOME"/.pyenv/versions/$$version.*/bin/python 2>/dev/null | tail -1); \
	  if [ -z "$$python" ]; then echo "Python $$version is not here: not tested"; continue; fi; \
	  echo "Python $$version"; \
	  "$$python" -m venv .venv-python/$$version && \
	  .venv-python/$$version/bin/python -m pip --quiet --disable-pip-version-check --no-input install \
	    -c constraints.txt -e '.[dev,graph,plot]' && \
	  .venv-python/$$version/bin/python -m pytest -m "not slow" -n $(WORKERS) --maxprocesses 8 --dist loadgroup \
	    tests/unit tests/property tests/recorded || exit 1; \
	done

# Exports read back by the software that they are for, which is installed into .cache and needs no GPU; and a sweep on
# a local Ray.
test-targets: .venv/installed-for-targets .cache/megatron/installed-$(MEGATRON)
test-targets: .cache/megatron-bridge/installed-$(MEGATRON_BRIDGE)
test-targets: .cache/torchtitan/installed-$(TORCHTITAN)
test-targets: .cache/accelerate/installed-$(ACCELERATE) .cache/deepspeed/installed-$(DEEPSPEED)
	$(BIN)/pytest -n $(WORKERS) --maxprocesses 8 --dist loadgroup tests/targets

# The documentation site, into .cache/site; a broken link or anchor fails.
docs: .venv/installed-for-docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open .cache/site/index.html"

bench: .venv/installed-for-tests
	@$(BIN)/python -m benchmarks

# Emulates clusters on this machine: needs root and Linux; fails where it cannot, or where a goal is missed.
accuracy: .venv/installed-for-tests
	@$(BIN)/python -m benchmarks.emulated

# Changes plans while an emulated network changes: needs root and Linux; fails where a claim does not hold.
demo: .venv/installed-for-tests
	@$(BIN)/python -m benchmarks.demo

clean:
	rm -rf .venv .venv-oldest .venv-python .cache build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "shardwise needs Python 3.11 or newer as $(PYTHON); name another with make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv .venv
	@$(if $(HASHES),$(PIP) install --no-deps --require-hashes -r $(HASHES))

.venv/installed: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing shardwise into .venv" >&2
	@$(PIP) install -c constraints.txt -e .
	@touch $@

# torch first and alone, so that a build without CUDA is taken where the index or a folder of wheels has one.
.venv/installed-for-tests: pyproject.toml constraints.txt | .venv/installed
	@echo "installing what the tests need into .venv" >&2
	@$(PIP) install -c constraints.txt torch==2.13.0
	@$(PIP) install -c constraints.txt -e '.[dev,graph,oracle,plot,web]'
	@touch $@

.venv-oldest/installed: pyproject.toml tests/oldest.py
	@echo "installing the oldest allowed dependencies into .venv-oldest" >&2
	@rm -rf .venv-oldest
	@$(PYTHON) -m venv .venv-oldest
	@$(PYTHON) -m tests.oldest core torch graph plot > .venv-oldest/constraints.txt
	@.venv-oldest/bin/python -m pip --quiet --disable-pip-version-check --no-input install torch==2.13.0
	@.venv-oldest/bin/python -m pip --quiet --disable-pip-version-check --no-input install \
	  -c .venv-oldest/constraints.txt -e '.[dev,torch,graph,plot,web]'
	@touch $@

.venv/installed-for-docs: pyproject.toml constraints.txt | .venv/installed
	@echo "installing what the documentation needs into .venv" >&2
	@$(PIP) install -c constraints.txt -e '.[docs]'
	@touch $@

.venv/installed-for-targets: pyproject.toml constraints.txt | .venv/installed-for-tests
	@$(PIP) install -c constraints.txt -e '.[targets]'
	@touch $@

# Megatron-LM names Python 3.12 and packages for GPUs that its parser does without: it lies in a folder of its own.
.cache/megatron/installed-$(MEGATRON): | .venv/bin/python
	@echo "installing Megatron-LM $(MEGATRON) into .cache" >&2
	@rm -rf .cache/megatron
	@$(PIP) install --no-deps --only-binary=:all: --python-version 3.12 --ignore-requires-python \
	  --platform manylinux_2_28_x86_64 --target .cache/megatron megatron-core==$(MEGATRON)
	@touch $@

# Megatron-Bridge as source: tests read the fields of its classes, and import nothing of it.
.cache/megatron-bridge/installed-$(MEGATRON_BRIDGE): | .venv/bin/python
	@echo "installing Megatron-Bridge $(MEGATRON_BRIDGE) into .cache" >&2
	@rm -rf .cache/megatron-bridge
	@$(PIP) install --no-deps --only-binary=:all: --python-version 3.12 --ignore-requires-python \
	  --target .cache/megatron-bridge megatron-bridge==$(MEGATRON_BRIDGE)
	@touch $@

# TorchTitan without the packages that read data, write logs or compile for GPUs: its parser does without them.
.cache/torchtitan/installed-$(TORCHTITAN): | .venv/bin/python
	@echo "installing TorchTitan $(TORCHTITAN) into .cache" >&2
	@rm -rf .cache/torchtitan
	@$(PIP) install --no-deps --target .cache/torchtitan torchtitan==$(TORCHTITAN) spmd_types==0.2.3 \
	  torch_checkpointing==0.1.1 torchdata==0.11.0 tyro==1.0.17 typeguard==4.6.1 docstring_parser==0.18.0
	@touch $@

# Accelerate without PyTorch and Transformers, which .venv has.
.cache/accelerate/installed-$(ACCELERATE): | .venv/bin/python
	@echo "installing Accelerate $(ACCELERATE) into .cache" >&2
	@rm -rf .cache/accelerate
	@$(PIP) install --no-deps --only-binary=:all: --target .cache/accelerate accelerate==$(ACCELERATE) psutil==7.2.2
	@touch $@

# DeepSpeed comes as source only; without DS_BUILD_OPS it compiles nothing.
.cache/deepspeed/installed-$(DEEPSPEED): | .venv/installed-for-tests
	@echo "installing DeepSpeed $(DEEPSPEED) into .cache" >&2
	@rm -rf .cache/deepspeed
	@DS_BUILD_OPS=0 $(PIP) install --no-deps --no-build-isolation --target .cache/deepspeed deepspeed==$(DEEPSPEED) \
	  hjson==3.1.0 py-cpuinfo==9.0.0 psutil==7.2.2 msgpack==1.2.4 pydantic==2.14.3 pydantic-core==2.50.4 \
	  annotated-types typing-inspection
	@touch $@
