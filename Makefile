# Two commands do all their own set-up in .venv: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
PEERS := .venv-peers
PEERS_PIP := $(PEERS)/bin/pip --disable-pip-version-check
PEER_VERSIONS := 0.8.5.post1 0.18.1
PLUGINS := $(wildcard plugins/attn-*)
# Kernel libraries as far as they go without a GPU: without their own requirements, which are CUDA's and several GB.
KERNELS := triton flashinfer-python apache-tvm-ffi
SOURCES := $(CURDIR)/$(VENV)/sources
KERNEL_NEEDS := click filelock jinja2 nvidia-ml-py packaging requests tqdm
TRACE := ../shared/traces/azure_llm_2023_conv.csv.gz

# The first test run compiles numba's functions; both cores then share the rest.
JOBS ?= 2

.PHONY: help demo test test-all test-gpu lint types bench bench-compare bench-gpu bench-history bench-peers bench-replay clean

help:
	@echo "make demo           replay a request trace through metadata and attention (under two minutes after set-up)"
	@echo "make test           set up, lint, type-check, run the tests"
	@echo "make test-all       the same, and the slow proofs"
	@echo "make test-gpu       the tests that need a CUDA device, in the active Python"
	@echo "make bench          metadata-build latency: run, save, compare with the last saved run"
	@echo "make bench-compare REV=...   the working tree beside a revision, turn by turn; fails where it got slower"
	@echo "make bench-history  a diagram of the saved runs for each benchmark, in benchmarks/history/"
	@echo "make bench-peers    the same steps by vLLM's own builders, in an environment of their own (.venv-peers)"
	@echo "make bench-gpu      on a CUDA device, in the active Python: until a step is there, calls, bytes, a race (RACE=100000)"
	@echo "make bench-replay   builds of a whole trace that take over 50 us"
	@echo "make clean          remove the environments and everything that was built"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch comes first, pinned: a plain `pip install torch` would bring CUDA's libraries along.
$(VENV)/.deps: constraints.txt pyproject.toml | $(BIN)/python
	$(PIP) install -q -c constraints.txt torch setuptools wheel cython
	$(PIP) install -q -c constraints.txt numpy pluggy rich numba hypothesis pytest pytest-benchmark pytest-xdist \
		build cython-lint editables hatchling mypy pre-commit ruff
	touch $@

# What the plugins and the integrations are tested with; the demo does without.
$(VENV)/.libraries: $(VENV)/.deps
	$(PIP) install -q -c constraints.txt transformers psutil $(KERNEL_NEEDS)
	$(PIP) install -q -c constraints.txt --no-deps $(KERNELS)
	touch $@

$(VENV)/.built: $(VENV)/.deps setup.py attncore/_slots.pyx $(wildcard attncore/kernels/cython/*)
	ATTNCORE_REQUIRE_EXT=1 $(PIP) install -q --no-build-isolation --no-deps -e .
	touch $@

$(VENV)/.plugins: $(VENV)/.built $(VENV)/.libraries $(wildcard plugins/*/pyproject.toml)
	$(PIP) install -q --no-build-isolation --no-deps $(patsubst %,-e %,$(PLUGINS))
	touch $@

# Read, not imported: tests compare the signatures of attn-flash's stand-ins with them.
$(VENV)/.sources: $(VENV)/.deps
	rm -rf $(SOURCES) && mkdir -p $(SOURCES)/2 $(SOURCES)/4
	$(PIP) install -q --no-deps --no-compile --target $(SOURCES)/4 -c constraints.txt --pre flash-attn-4 \
		|| echo "no source of flash-attn-4 here: its signature test is skipped"
	FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE $(PIP) download -q --no-deps --no-binary=flash-attn --no-build-isolation \
		-c constraints.txt -d $(SOURCES) flash-attn \
		&& tar -C $(SOURCES)/2 --strip-components=1 -xzf $(SOURCES)/flash_attn-*.tar.gz --wildcards '*/flash_attn/*.py' \
		|| echo "no source of flash-attn here: its signature tests are skipped"
	touch $@

demo: $(VENV)/.built
	@if [ -f $(TRACE) ]; then $(BIN)/attncore replay $(TRACE) --requests 300; else $(BIN)/attncore replay; fi

lint: $(VENV)/.deps
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PATH="$(CURDIR)/$(BIN):$$PATH" cython-lint attncore

types: $(VENV)/.plugins
	$(BIN)/mypy

test: $(VENV)/.plugins $(VENV)/.sources lint types
	ATTN_FLASH_SOURCES=$(SOURCES)/4:$(SOURCES)/2 ATTNCORE_REQUIRE_EXT=1 $(BIN)/python -m pytest -n $(JOBS) -m "not gpu and not slow"

test-all: $(VENV)/.plugins $(VENV)/.sources lint types
	ATTN_FLASH_SOURCES=$(SOURCES)/4:$(SOURCES)/2 ATTNCORE_REQUIRE_EXT=1 $(BIN)/python -m pytest -n $(JOBS) -m "not gpu"

# -P: the attncore that is installed there, not the source tree, which has no compiled extension.
test-gpu:
	$(PYTHON) -P -m pytest -m gpu

# Compares with the last saved run of this kind of machine where there is one, then checks the goals.
bench: $(VENV)/.built
	$(BIN)/python -m pytest tests/benchmarks --benchmark-enable --benchmark-only --benchmark-autosave \
		--benchmark-storage=file://benchmarks/results --benchmark-compare --benchmark-columns=median,min,iqr,rounds \
		--benchmark-group-by=group --benchmark-sort=min -W "default::pytest_benchmark.logger.PytestBenchmarkWarning"
	$(BIN)/python benchmarks/reach.py "$$(ls -t benchmarks/results/*/[0-9]*.json | head -1)"

# More words for it in COMPARE, such as COMPARE="-k TestDecode --rounds 6".
bench-compare: $(VENV)/.built
	@test -n "$(REV)" || { echo "bench-compare: say with what: make bench-compare REV=main"; exit 2; }
	$(BIN)/python benchmarks/compare.py run $(REV) $(COMPARE)

bench-history: $(VENV)/.built
	$(PIP) install -q -c constraints.txt pygal pygaljs
	$(BIN)/python -m pytest_benchmark --storage=file://benchmarks/results compare --sort=name --group-by=fullname \
		--columns=median,iqr --histogram=benchmarks/history/run

# vLLM's wheels without their requirements (CUDA is several GB) and their compiled code, which nothing timed uses; a
# folder each, because two versions have no room in one environment. The same Python as .venv, whose extension it uses.
$(PEERS)/.deps: constraints.txt benchmarks/peers/requirements.txt | $(VENV)/.built
	$(BIN)/python -m venv --clear $(PEERS)
	$(PEERS_PIP) install -q -c constraints.txt torch
	$(PEERS_PIP) install -q -c constraints.txt numpy numba -r benchmarks/peers/requirements.txt
	for version in $(PEER_VERSIONS); do \
		$(PEERS_PIP) install -q --no-deps --target $(PEERS)/vllm-$$version vllm==$$version || exit 1; \
		find $(PEERS)/vllm-$$version -name "*.so" -delete; \
	done
	touch $@

bench-peers: $(VENV)/.built $(PEERS)/.deps
	$(PEERS)/bin/python benchmarks/peers/run.py $(PEERS) \
		--save benchmarks/results/peers/peers_$$(date +%Y%m%d).json

# The installed attncore, as in test-gpu: of a script, only its own folder is on the path.
RACE ?= 20000
bench-gpu:
	$(PYTHON) benchmarks/gpu.py --race $(RACE) $(if $(wildcard $(TRACE)),--trace $(TRACE)) \
		--save benchmarks/results/gpu/gpu_$$(date +%Y%m%d).json

bench-replay: $(VENV)/.built
	$(BIN)/python benchmarks/replay_builds.py $(TRACE)

clean:
	rm -rf $(VENV) $(PEERS) build dist *.egg-info attncore/_slots.c attncore/*.so .benchmarks .mypy_cache .ruff_cache .pytest_cache
