# Everything starts here: `make demo` and `make test` set up what they need from a bare checkout.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

# PYTHON chooses the interpreter for .venv; TORCH_INDEX_URL another index for torch alone (say, a CPU-only one).
PYTHON ?=
TORCH_INDEX_URL ?=
TORCH := torch==2.13.0
# One test process more than cores, at most four: tests fork ranks of their own, and wait for most of the time. (nproc
# minds OMP_NUM_THREADS.)
TEST_PROCESSES ?= $(shell n=$$(env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 2); echo $$(( n > 3 ? 4 : n + 1 )))
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
RUN := $(BIN)/python
# Neighbours go to one process, which makes what they share only once.
PYTEST := $(RUN) -m pytest --color=$(if $(CI),no,auto) -n $(TEST_PROCESSES) --dist worksteal
PIP := $(BIN)/pip --disable-pip-version-check
NATIVE_BUILD := build/native
ON_PATH := PATH="$(abspath $(BIN)):$$PATH"
STAMPS := $(VENV)/stamps
NATIVE_LOCK := $(VENV)/native.lock
# Folders too, so that a removed file counts as a change.
NATIVE_SOURCES := $(shell find native -mindepth 1 -path native/tests -prune -o \( -type d -o -name '*.cc' -o -name '*.h' -o -name '*.txt' -o -name '*.cmake' \) -print 2>/dev/null)
CXX_FILES := $(shell find native -name '*.cc' -o -name '*.h' 2>/dev/null)
# Threads of libraries fight with the ranks for the cores, and change bits.
export OMP_NUM_THREADS ?= 1
# As elaswave_fx sets it, for what imports torch first.
export TORCH_DEVICE_BACKEND_AUTOLOAD ?= 0

.PHONY: help
help: ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F'\t' '{printf "  make %-14s %s\n", $$1, $$2}'

.PHONY: demo
demo: $(STAMPS)/ready ## Train a GPT on the Python standard library: four ranks; one of them is killed, another one joins
	$(RUN) -m elaswave_fx.train recipe=lose_and_regain $(ARGS)

.PHONY: test
test: $(STAMPS)/ready ## Run the tests (PYTEST_ARGS='-k name' for some)
	$(PYTEST) -m 'not slow' $(PYTEST_ARGS)

.PHONY: test-all
test-all: $(STAMPS)/ready ## Run the slow tests too
	$(PYTEST) $(PYTEST_ARGS)

.PHONY: chaos
chaos: $(STAMPS)/ready ## Kill, stop and starve processes of real runs in every way, let ranks join and leave (ARGS='--only host --seed 1')
	$(RUN) -m tests.recovery.chaos $(ARGS)

.PHONY: fuzz
fuzz: SANITIZE := address,undefined
fuzz: $(STAMPS)/ready ## Give a million damaged inputs to every parser of outside bytes, C++ included (ARGS='--only plan --seed 7')
	$(call configure_torch_free,build/native-test-address)
	$(ON_PATH) cmake --build build/native-test-address --target fuzz_parsers
	$(RUN) -m tests.fuzz --native build/native-test-address/tests/fuzz_parsers $(ARGS)

.PHONY: proofs
proofs: $(STAMPS)/ready ## Compare plans with brute force, and run real steps on 200 random clusters (ARGS='--only shares')
	$(RUN) -m tests.plan.campaign $(ARGS)

.PHONY: disk
disk: $(STAMPS)/ready ## Fail one write after another of a real run with EIO or ENOSPC (ARGS='--every 20')
	$(RUN) -m tests.disk.campaign $(ARGS)

.PHONY: bench
bench: $(STAMPS)/ready ## Run the benchmarks (NAME=executor, ...)
	$(RUN) -m tools.bench $(or $(NAME),executor)

.PHONY: models
models: $(STAMPS)/ready ## Try modules and 20 Hugging Face architectures; write docs/reference/models.md and docs/reference/architectures.md (ARGS='--only gpt')
	$(RUN) -m tests.zoo.page --out docs/reference/models.md
	$(RUN) -m tools.model_zoo docs/model_types.yaml --out docs/reference/architectures.md $(ARGS)

.PHONY: docs
docs: $(STAMPS)/ready ## Make the generated pages of docs/reference/ (ARGS=--check: only say which are stale)
	$(RUN) -m tools.docs $(ARGS)

.PHONY: lint
lint: $(STAMPS)/packages ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(if $(CXX_FILES),$(BIN)/clang-format --dry-run -Werror $(CXX_FILES))
	$(MAKE) --no-print-directory types

.PHONY: types
types: $(STAMPS)/ready ## Check types alone
	$(BIN)/pyright --pythonpath $(RUN)

.PHONY: format
format: $(STAMPS)/packages ## Format Python and C++
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(if $(CXX_FILES),$(BIN)/clang-format -i $(CXX_FILES))

# The torch-free part, configured apart from the module: plain, address+undefined, thread.
.PHONY: native-test
native-test: native-test-plain native-test-address native-test-thread ## Test the torch-free C++: plain, ASan+UBSan, TSan

native-test-plain: SANITIZE :=
native-test-address: SANITIZE := address,undefined
native-test-thread: SANITIZE := thread
.PHONY: native-test-plain native-test-address native-test-thread
native-test-plain native-test-address native-test-thread: $(STAMPS)/packages
	@echo "== $@"
	$(call configure_torch_free,build/$@)
	$(ON_PATH) cmake --build build/$@
	cd build/$@ && $(ON_PATH) ctest --output-on-failure --timeout 300

configure_torch_free = $(ON_PATH) cmake -S native -B $(1) -G Ninja -DELASWAVE_TORCH=OFF -DELASWAVE_TESTS=ON \
  -DELASWAVE_SANITIZE=$(SANITIZE) > /dev/null

.PHONY: native
native: $(STAMPS)/ready ## Build the native module, if its sources changed

.PHONY: wheel
wheel: $(STAMPS)/packages ## Build a wheel into dist/
	$(ON_PATH) flock $(NATIVE_LOCK) $(PIP) wheel --no-build-isolation --no-deps --wheel-dir dist .

.PHONY: clean
clean: ## Remove what was built; the environment and its packages stay
	rm -rf build dist .pytest_cache .ruff_cache $(STAMPS)/ready $(STAMPS)/installed

.PHONY: distclean
distclean: clean ## Remove the environment too
	rm -rf $(VENV)

# --- Set-up. A stamp is written when its step has succeeded; a second call finds nothing to do. ---

$(STAMPS)/venv:
	@python=$$(.ci/find-python $(PYTHON)); test -x $(RUN) || "$$python" -m venv $(VENV)
	@mkdir -p $(STAMPS)
	@touch $@

# torch first and pinned exactly: everything after it is built against it, and an open range would bring another.
$(STAMPS)/packages: pyproject.toml | $(STAMPS)/venv
	@echo "Installing packages into $(VENV) (minutes the first time)"
	@$(PIP) install --quiet $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) $(TORCH)
	@$(PIP) install --quiet $$($(RUN) .ci/requirements.py dev hf data plot bench)
	@touch $@

# Again when the metadata or the packages change; new modules inside them are found without it.
$(STAMPS)/installed: $(STAMPS)/packages $(shell find elaswave_fx passes -name __init__.py 2>/dev/null)
	@echo "Installing elaswave_fx into $(VENV), native build included (minutes the first time)"
	@$(ON_PATH) flock $(NATIVE_LOCK) $(PIP) install --quiet --no-build-isolation --no-deps -e .
	@touch $@

# The stamp bears the time before the build: a source saved while it ran is newer.
$(STAMPS)/ready: $(STAMPS)/installed $(NATIVE_SOURCES)
	@touch $@.begun
	@flock $(NATIVE_LOCK) .ci/build-native $(RUN) $(NATIVE_BUILD)
	@mv $@.begun $@
