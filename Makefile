# Two commands do all their own set-up in .venv: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
RELEASE := .venv-release
NEWEST := .venv-newest
OLDEST := .venv-oldest
PEERS := .venv-peers
PEERS_PIP := $(PEERS)/bin/pip --disable-pip-version-check
PEER_WHEELS := vllm_lists vllm_step
ENGINE_VLLM := .venv-vllm
VLLM_MINORS := vllm_032 vllm_033
SGLANG := .venv-sglang
SGLANG_PIP := $(SGLANG)/bin/pip --disable-pip-version-check
PLUGINS := $(wildcard plugins/attn-*)
SOURCES := $(VENV)/sources
# Another build of the pinned torch, such as a wheel's path, and an extra index that has one. A plain torch brings CUDA's
# libraries along, several GB, which nothing that runs in .venv uses.
TORCH ?= torch
TORCH_INDEX ?=
INSTALL_TORCH = install -q -c requirements/shared.txt $(if $(TORCH_INDEX),--extra-index-url "$(TORCH_INDEX)") "$(TORCH)"
TRACE ?= ../shared/traces/azure_llm_2023_conv.csv.gz

# tests/numba_call.py has numba compile its functions; both cores then share the rest.
JOBS ?= 2

# The path of the checkout may have blanks: recipes use relative paths, or "$$PWD/...", which the shell takes as one word.

# The scripts of an environment name the folder that it was made in.
ifneq ($(filter-out clean help,$(MAKECMDGOALS)),)
ifneq ($(wildcard $(BIN)/activate),)
ifneq ($(shell $(BIN)/pip --version >/dev/null 2>&1; echo $$?),0)
$(error $(VENV) cannot run its pip, as where the checkout was moved since: run make clean, then make $(MAKECMDGOALS))
endif
endif
endif

.PHONY: help demo docs test test-all test-engines test-vllm test-sglang test-gpu test-debug test-asan test-dev fuzz lint types bench bench-compare bench-gpu bench-history bench-peers bench-replay \
	with-rev resolve api-check release-check test-newest test-oldest clean

help:
	@echo "make demo           replay requests and verify them: 1.5 minutes after set-up"
	@echo "make test           set up, lint, type-check, run the tests: 12 minutes"
	@echo "make test-all       the same, and the slow proofs"
	@echo "make test-engines   inside two minors of vLLM and SGLang; STRICT=1: skip none"
	@echo "make test-gpu       tests that need a CUDA device, in the active Python"
	@echo "make test-debug     builders and fuzz targets, over a build with bounds checks"
	@echo "make test-asan      the same over one with gcc's sanitizers"
	@echo "make test-dev       the tests under python -X dev -O"
	@echo "make test-newest    the tests with the newest of all requirements"
	@echo "make test-oldest    the same with the oldest that pyproject.toml allows"
	@echo "make fuzz           the fuzz targets, for FUZZ_MINUTES=10"
	@echo "make lint           ruff and cython-lint; needs what make test needs"
	@echo "make types          mypy, strict"
	@echo "make bench          time builds; STRICT=1 judges goals; K=TestDecode runs a part"
	@echo "make bench-compare  the same beside those of a revision, REV=main"
	@echo "make bench-history  pages of saved runs: benchmarks/history/index.html"
	@echo "make bench-peers    the same steps by vLLM's own builders"
	@echo "make bench-gpu      on a CUDA device, in the active Python; RACE=100000"
	@echo "make bench-replay   a trace's builds over 50 us; STRICT=1 judges the goal"
	@echo "make docs           the site: build/site/index.html; LINKS=1 tries all links"
	@echo "make api-check      public names broken since the last tag, or since REV=..."
	@echo "make release-check  workflows, forms, citation, and the list of wheels"
	@echo "make resolve        resolve requirements/ as from an ordinary package index"
	@echo "make clean          remove the environments and everything that was built"

# What venv writes last: it is not there where it was interrupted.
$(BIN)/activate:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "attncore needs Python 3.11 or later; $(PYTHON) is $$($(PYTHON) -V 2>&1). Say which: make demo PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv $(VENV)

# A stamp for each set of requirements/; a set includes those that it is built on. torch comes first, as TORCH says.
$(VENV)/.demo: requirements/demo.txt requirements/shared.txt | $(BIN)/activate
	@echo "installing torch: several GB from an ordinary index, unless TORCH_INDEX=URL says where a CPU build is"
	$(PIP) $(INSTALL_TORCH)
	$(PIP) install -q -r requirements/demo.txt
	touch $@

$(VENV)/.bench $(VENV)/.docs $(VENV)/.history $(VENV)/.test: $(VENV)/.%: requirements/%.txt requirements/bench.txt $(VENV)/.demo
	$(PIP) install -q -r $<
	touch $@

$(VENV)/.fuzz: requirements/fuzz.txt $(VENV)/.test
	$(PIP) install -q -r requirements/fuzz.txt || echo "no atheris here: hypothesis fuzzes alone"
	touch $@

$(VENV)/.kernels: requirements/kernels.txt $(VENV)/.test
	$(PIP) install -q --no-deps -r $<
	touch $@

$(VENV)/.built: $(VENV)/.demo pyproject.toml setup.py attncore/_slots.pyx $(wildcard attncore/kernels/cython/*)
	$(PIP) install -q --no-build-isolation --no-deps -e .
	touch $@

$(VENV)/.plugins: $(VENV)/.built $(VENV)/.kernels $(wildcard plugins/*/pyproject.toml)
	$(PIP) install -q --no-build-isolation --no-deps $(patsubst %,-e %,$(PLUGINS))
	touch $@

# Read, not imported: tests compare the signatures of attn-flash's stand-ins with them.
$(VENV)/.sources: requirements/sources.txt $(VENV)/.test
	rm -rf $(SOURCES) && mkdir -p $(SOURCES)/2 $(SOURCES)/4
	$(PIP) install -q --no-deps --no-compile --target $(SOURCES)/4 -c requirements/sources.txt --pre flash-attn-4 \
		|| echo "no source of flash-attn-4 here: its signature test is skipped"
	FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE $(PIP) download -q --no-deps --no-binary=flash-attn --no-build-isolation \
		-c requirements/sources.txt -d $(SOURCES) flash-attn \
		&& tar -C $(SOURCES)/2 --strip-components=1 -xzf $(SOURCES)/flash_attn-*.tar.gz --wildcards '*/flash_attn/*.py' \
		|| echo "no source of flash-attn here: its signature tests are skipped"
	touch $@

# On the CPU, also where a GPU is: the torch here may be one without CUDA.
demo: $(VENV)/.built
	@CUDA_VISIBLE_DEVICES= HIP_VISIBLE_DEVICES= $(BIN)/attncore replay $(wildcard $(TRACE)) --requests 150
	@echo
	@echo "next: . $(BIN)/activate; attncore explain; attncore --help"
	@echo "Python in it: docs/first-steps.md"
	@echo "a model: pip install --no-build-isolation -e '.[transformers]'"
	@echo "         python examples/generate.py"

# Breaks of the public names since the last tag, or since REV=...
api-check: $(VENV)/.test
	$(BIN)/python tests/api_check.py $(REV)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PATH="$$PWD/$(BIN):$$PATH" cython-lint attncore

types: $(VENV)/.plugins
	$(BIN)/mypy

test: $(VENV)/.plugins $(VENV)/.sources lint types
	$(BIN)/python tests/numba_call.py
	ATTN_FLASH_SOURCES="$$PWD/$(SOURCES)/4:$$PWD/$(SOURCES)/2" ATTNCORE_REQUIRE_EXT=1 $(BIN)/python -m pytest -n $(JOBS) -m "not gpu and not slow"

test-all: $(VENV)/.plugins $(VENV)/.sources lint types
	$(BIN)/python tests/numba_call.py
	ATTN_FLASH_SOURCES="$$PWD/$(SOURCES)/4:$$PWD/$(SOURCES)/2" ATTNCORE_REQUIRE_EXT=1 $(BIN)/python -m pytest -n $(JOBS) -m "not gpu"
	$(MAKE) test-debug test-dev

# Another build of the extension, in a copy of the tree that comes first on the path: the one in use stays as it is. -P
# leaves the working folder out of the path. Tests that run on numba alone would tell nothing new.
BUILD_TESTS = -m "not gpu and not slow" -k "not numba" tests/fuzz tests/kernels tests/builder/lists \
	tests/builder/persistent tests/builder/device tests/builder/adopted tests/test_slots.py
IN_BUILD = PYTHONPATH="$$PWD/build/$(1)" ATTNCORE_REQUIRE_EXT=1

build/%/.built: setup.py pyproject.toml $(shell find attncore -name "*.p[yx]*" -o -name "*.h") | $(VENV)/.test
	rm -rf build/$* && mkdir -p build/$*
	cp -r attncore setup.py pyproject.toml README.md LICENSE build/$*
	rm -f build/$*/attncore/_slots.c build/$*/attncore/_slots.*.so
	cd build/$* && $(SWITCH) ../../$(BIN)/python setup.py -q build_ext --inplace
	$(call IN_BUILD,$*) $(BIN)/python -P -c "import attncore; assert '/build/$*/' in attncore.__file__"
	touch $@
build/debug/.built: SWITCH := ATTNCORE_DEBUG_EXT=1
build/asan/.built: SWITCH := ATTNCORE_SANITIZE_EXT=1

test-debug: build/debug/.built $(VENV)/.plugins
	$(call IN_BUILD,debug) $(BIN)/python -P -m pytest -n $(JOBS) $(BUILD_TESTS)

# The sanitizer's library, and C++'s whose exceptions it follows, are loaded before Python; it sees the memory only that
# malloc gives. pytest would swallow the report of a process that ends: it goes to a file. One allocation is limited to
# 2 GiB, as the fuzz targets limit themselves elsewhere.
LIBASAN = $(shell gcc -print-file-name=libasan.so 2>/dev/null)
LIBSTDCXX = $(shell gcc -print-file-name=libstdc++.so.6 2>/dev/null)
REPORT = build/asan/report
test-asan: $(VENV)/.plugins
	@test -e "$(LIBASAN)" || { echo "test-asan: gcc has no libasan here; install gcc with its libasan"; exit 2; }
	$(MAKE) build/asan/.built
	rm -f $(REPORT)*
	$(call IN_BUILD,asan) LD_PRELOAD=$(LIBASAN):$(LIBSTDCXX) PYTHONMALLOC=malloc \
		UBSAN_OPTIONS="print_stacktrace=1:log_path='$$PWD/$(REPORT)'" \
		ASAN_OPTIONS="detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=2048:log_path='$$PWD/$(REPORT)'" \
		$(BIN)/python -P -m pytest -n $(JOBS) $(BUILD_TESTS) || { cat $(REPORT)* 2>/dev/null; exit 1; }

# pytest keeps the asserts of tests under -O, and those of the helpers that tests/conftest.py names.
test-dev: $(VENV)/.plugins
	ATTNCORE_REQUIRE_EXT=1 $(BIN)/python -X dev -O -m pytest -n $(JOBS) -m "not gpu and not slow" \
		-W "ignore:assertions not in test modules" tests

# SGLang's wheel without its requirements (CUDA is several GB) and without compiled code, its own or torchvision's. The
# same Python as .venv, whose extension the tests use; they run attncore from this tree. Where the index has not what it
# takes, the tests are skipped, and pip's words say why.
$(SGLANG)/.deps: requirements/sglang.txt requirements/shared.txt | $(VENV)/.built
	$(BIN)/python -m venv --clear $(SGLANG)
	$(SGLANG_PIP) $(INSTALL_TORCH)
	$(SGLANG_PIP) install -q --no-deps -r $<
	find $(SGLANG)/lib/python3.*/site-packages/sglang $(SGLANG)/lib/python3.*/site-packages/torchvision -name "*.so" -delete
	touch $@

test-sglang: $(VENV)/.built
	@if $(MAKE) $(SGLANG)/.deps; then \
		PYTHONPATH="$$PWD" ATTNCORE_SGLANG=1 $(SGLANG)/bin/python -P -m pytest -n $(JOBS) -m "not gpu" tests/integrations/sglang; \
	else echo "test-sglang: skipped: SGLang's environment cannot be made here; pip's words above say why"; $(SKIPPED); fi

# Each round has new seeds and first tries what failed before (.hypothesis); where atheris is installed, its turn follows.
FUZZ_MINUTES ?= 10
FUZZ ?= tests/fuzz
fuzz: $(VENV)/.plugins $(VENV)/.fuzz
	ATTNCORE_REQUIRE_EXT=1 $(BIN)/python tests/fuzz/run.py --minutes $(FUZZ_MINUTES) --jobs $(JOBS) $(FUZZ)

# -P: the attncore that is installed there, not the source tree, which has no compiled extension.
test-gpu:
	@$(PYTHON) -P benchmarks/gpu_here.py
	$(PYTHON) -P -m pytest -m gpu

# vLLM's wheels as in bench-peers: without requirements and compiled code, a folder for each minor. Where the index has
# them not, the tests are skipped with its words. VLLM_TESTS names the unpacked source distribution of vLLM, whose own
# cases run too then.
VLLM_PIP = $(ENGINE_VLLM)/bin/pip --disable-pip-version-check
VLLM_TESTS ?=
$(ENGINE_VLLM)/.deps: requirements/engine_vllm.txt requirements/shared.txt $(VLLM_MINORS:%=requirements/%.txt) | $(VENV)/.built
	$(BIN)/python -m venv --clear $(ENGINE_VLLM)
	$(VLLM_PIP) $(INSTALL_TORCH)
	$(VLLM_PIP) install -q --no-deps -r requirements/engine_vllm.txt
	for minor in $(VLLM_MINORS); do \
		$(VLLM_PIP) install -q --no-deps --target $(ENGINE_VLLM)/$$minor -r requirements/$$minor.txt || exit 1; \
		find $(ENGINE_VLLM)/$$minor -name "*.so" -delete; \
	done
	$(VLLM_PIP) install -q --no-build-isolation --no-deps -e .
	touch $@

test-engines: test-vllm test-sglang

# STRICT=1 makes an error of an engine that is skipped.
SKIPPED = $(if $(filter-out 0,$(STRICT)),exit 1,true)

test-vllm: $(VENV)/.built
	@mkdir -p build; if $(MAKE) $(ENGINE_VLLM)/.deps >build/vllm.log 2>&1; then \
		for minor in $(VLLM_MINORS); do echo "$$minor:"; \
			PYTHONPATH="$$PWD/$(ENGINE_VLLM)/$$minor" VLLM_TESTS="$(VLLM_TESTS)" $(ENGINE_VLLM)/bin/python -m pytest \
				-o filterwarnings=default tests/integrations/vllm || exit 1; \
		done; \
	else echo "test-vllm: skipped: its environment cannot be made:"; grep -i error build/vllm.log || tail -n 3 build/vllm.log; \
		$(SKIPPED); fi

# K=TestDecode, or other words for pytest in BENCH, run a part: it is compared, and neither saved nor judged.
# STRICT=1 makes a missed goal an error.
BENCH ?=
PART = $(strip $(if $(K),-k "$(K)") $(BENCH))
bench: $(VENV)/.built $(VENV)/.bench
	$(BIN)/python benchmarks/run.py $(if $(filter-out 0,$(STRICT)),--strict) $(if $(PART),-- $(PART))

# First of what bench-compare needs, so that nothing is installed in vain.
with-rev:
	@test -n "$(REV)" || { echo "bench-compare: say with what: make bench-compare REV=main"; exit 2; }

# K="TestDecode or select" compares these alone; more words for it in COMPARE, such as COMPARE="--rounds 6".
bench-compare: with-rev $(VENV)/.built $(VENV)/.bench
	$(BIN)/python benchmarks/compare.py run $(if $(K),-k "$(K)") $(COMPARE) -- "$(REV)"

bench-history: $(VENV)/.built $(VENV)/.history
	$(BIN)/python benchmarks/history.py

# vLLM's wheels without their requirements (CUDA is several GB) and their compiled code, which nothing timed uses; a
# folder each, because two versions have no room in one environment. The same Python as .venv, whose extension it uses.
$(PEERS)/.deps: requirements/peers.txt requirements/shared.txt $(PEER_WHEELS:%=requirements/%.txt) | $(VENV)/.built
	$(BIN)/python -m venv --clear $(PEERS)
	$(PEERS_PIP) $(INSTALL_TORCH)
	$(PEERS_PIP) install -q -r requirements/peers.txt
	for peer in $(PEER_WHEELS); do \
		$(PEERS_PIP) install -q --no-deps --target $(PEERS)/$$peer -r requirements/$$peer.txt || exit 1; \
		find $(PEERS)/$$peer -name "*.so" -delete; \
	done
	touch $@

bench-peers: $(VENV)/.built $(PEERS)/.deps
	$(PEERS)/bin/python benchmarks/peers/run.py $(PEERS) \
		--save benchmarks/results/peers/peers_$$(date +%Y%m%d).json

# The installed attncore, as in test-gpu: of a script, only its own folder is on the path.
RACE ?= 20000
bench-gpu:
	@$(PYTHON) -P benchmarks/gpu_here.py
	$(PYTHON) benchmarks/gpu.py --race $(RACE) $(if $(wildcard $(TRACE)),--trace $(TRACE)) \
		--save benchmarks/results/gpu/gpu_$$(date +%Y%m%d).json

bench-replay: $(VENV)/.built
	@test -f "$(TRACE)" || { echo "bench-replay: no trace at $(TRACE); make bench-replay TRACE=FILE"; exit 2; }
	$(BIN)/python benchmarks/replay_builds.py $(TRACE) $(if $(filter-out 0,$(STRICT)),--strict)

# A warning, such as of a link that leads nowhere, is an error.
# Pages are read anew each time (-E), since docs/site may have changed.
SPHINX = $(BIN)/python -m sphinx -q -E -W --keep-going -c docs -d build/doctrees
docs: $(VENV)/.built $(VENV)/.docs
	$(SPHINX) . build/site
	$(BIN)/python docs/site/plots.py
	$(BIN)/python docs/site/check.py
	$(if $(filter-out 0,$(LINKS)),$(SPHINX) -b linkcheck . build/links)
	@echo "the site: build/site/index.html"

$(RELEASE)/.release: requirements/release.txt requirements/shared.txt
	$(PYTHON) -m venv --clear $(RELEASE)
	$(RELEASE)/bin/pip --disable-pip-version-check install -q -r $<
	touch $@

# check-jsonschema has the schemas in it, and zizmor looks for holes in workflows: nothing is fetched. The last line
# prints each wheel that a release has.
SCHEMA = $(RELEASE)/bin/check-jsonschema --builtin-schema
release-check: $(RELEASE)/.release
	$(SCHEMA) vendor.github-workflows .github/workflows/*.yml
	$(SCHEMA) custom.github-workflows-require-timeout .github/workflows/*.yml
	$(SCHEMA) vendor.dependabot .github/dependabot.yml
	$(SCHEMA) vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(SCHEMA) vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(SCHEMA) vendor.citation-file-format --force-filetype yaml CITATION.cff
	$(RELEASE)/bin/zizmor --offline --quiet .github
	for machine in "linux x86_64" "linux aarch64" "macos arm64" "macos x86_64"; do set -- $$machine; \
		$(RELEASE)/bin/cibuildwheel --print-build-identifiers --platform $$1 --archs $$2 . || exit 1; done

# The same packages without their pins; FlashInfer without its requirements, as in .venv.
NEWEST_PIP := $(NEWEST)/bin/pip --disable-pip-version-check
NAMES = $(shell sed -E '/^(-|\#|$$)/d; s/[=<>~!; ].*//' $(1:%=requirements/%.txt) | sort -u)
test-newest:
	$(PYTHON) -m venv --clear $(NEWEST)
	$(NEWEST_PIP) install -q $(if $(TORCH_INDEX),--extra-index-url "$(TORCH_INDEX)") "$(TORCH)"
	$(NEWEST_PIP) install -q $(call NAMES,demo bench test)
	$(NEWEST_PIP) install -q --no-deps $(call NAMES,kernels)
	$(NEWEST_PIP) install -q --no-build-isolation --no-deps -e . $(patsubst %,-e %,$(PLUGINS))
	$(NEWEST_PIP) freeze
	ATTNCORE_REQUIRE_EXT=1 $(NEWEST)/bin/python -m pytest -n $(JOBS) -m "not gpu and not slow"

# The oldest versions that attncore and its plugins allow, on the oldest Python; tools as they come. The oldest torch brings
# an older Triton along than attn-rocm's kernels need, whose tests are skipped. The builds are those of a user, each in an
# environment that pip makes.
OLDEST_PIP := $(OLDEST)/bin/pip --disable-pip-version-check
test-oldest:
	$(PYTHON) -m venv --clear $(OLDEST)
	$(OLDEST_PIP) install -q packaging
	$(OLDEST)/bin/python requirements/oldest.py > $(OLDEST)/oldest.txt
	$(OLDEST_PIP) install -q -c $(OLDEST)/oldest.txt $(if $(TORCH_INDEX),--extra-index-url "$(TORCH_INDEX)") torch
	$(OLDEST_PIP) install -q -c $(OLDEST)/oldest.txt $(filter-out triton hatchling,$(call NAMES,demo bench test))
	$(OLDEST_PIP) install -q -c $(OLDEST)/oldest.txt --no-deps $(call NAMES,kernels)
	$(OLDEST_PIP) install -q --no-deps -e . $(patsubst %,-e %,$(PLUGINS))
	$(OLDEST_PIP) freeze
	ATTNCORE_REQUIRE_EXT=1 $(OLDEST)/bin/python -m pytest -n $(JOBS) -m "not gpu and not slow"

# What CI runs first: requirements that have come to contradict each other, or that an index has lost.
resolve:
	PYTHON=$(PYTHON) requirements/check.sh

clean:
	rm -rf $(VENV) $(PEERS) $(SGLANG) $(RELEASE) $(NEWEST) $(OLDEST) $(ENGINE_VLLM) .fuzz build dist *.egg-info attncore/_slots.c attncore/*.so .mypy_cache .ruff_cache .pytest_cache benchmarks/history
