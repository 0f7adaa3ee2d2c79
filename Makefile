# A front for cmake; everything here can be done with the presets alone (cmake --list-presets).

SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
.ONESHELL:
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := build

J ?= $(shell nproc)
PREFIX ?= /usr/local
LLAMA ?= ON
# Written once here: a fresh build folder uses ninja if there is one.
configure = if [ ! -f $(1)/CMakeCache.txt ] && command -v ninja >/dev/null; then export CMAKE_GENERATOR=Ninja; fi; \
	cmake --preset $(2) $(3) >$(1).log 2>&1 && rm -f $(1).log || { cat $(1).log >&2; rm -f $(1).log; $(call fail,configuring failed$(comma) see above); }
comma := ,
fail = echo "make: $(1)" >&2; exit 1
llama_flag = -DIMPRESS_LLAMA=$(LLAMA)

.PHONY: help
help: ## list the targets
	@echo "targets:"
	sed -nE 's/^([a-z][a-z-]*):.*## (.*)/\1|\2/p' Makefile | while IFS='|' read -r name text; do printf '  make %-13s %s\n' "$$name" "$$text"; done
	echo "settings: J=jobs ($(J)), PREFIX=$(PREFIX), LLAMA=ON|OFF, IMPRESS_MODEL=model.gguf, IMPRESS_LLAMA_PREFIX=folder"

.PHONY: build
build: ## build the library and the program (build/impress)
	@$(call ready)
	echo "== building (release, in build/)"
	$(call configure,build,release,$(llama_flag))
	cmake --build build -j $(J) || { $(call fail,building failed$(comma) see above); }
	[ ! -x build/impress ] || echo "== built: build/impress"

# System packages and llama.cpp there, or a clear line.
ready = scripts/deps.sh --check >/dev/null || { $(call fail,run \`make deps\` as root first); }; \
	[ $(LLAMA) = OFF ] || scripts/get-llama.sh >/dev/null || { $(call fail,no llama.cpp; \`make LLAMA=OFF\` builds the library without it); }

.PHONY: deps
deps: ## install missing Debian packages (as root; else say which)
	@scripts/deps.sh || { $(call fail,system packages are missing); }

.PHONY: llama
llama: ## find llama.cpp, or get and build it once, in ~/.cache/impress
	@dir=$$(scripts/get-llama.sh) || { $(call fail,no llama.cpp); }
	echo "== llama.cpp: $$dir"

.PHONY: model
model: ## get the small model for demo and tests, in ~/.cache/impress
	@file=$$(scripts/get-model.sh) || { $(call fail,no model); }
	echo "== model: $$file"

.PHONY: demo
demo: deps llama model build ## everything from nothing: the main job on a real model, with its table
	@scripts/demo.sh || { $(call fail,the demo failed); }

.PHONY: test
test: deps ## build and run all tests (up to 15 minutes)
	@if [ $(LLAMA) != OFF ]; then $(MAKE) llama model || exit 1; fi
	echo "== building with tests (release, in build/)"
	$(call configure,build,release,$(llama_flag) -DBUILD_TESTING=ON -DIMPRESS_NESTED_TESTS=ON -DIMPRESS_WERROR=ON)
	cmake --build build -j $(J) || { $(call fail,building failed$(comma) see above); }
	echo "== testing"
	ctest --test-dir build --progress --output-on-failure -j $(J) $(CTEST_ARGS) || { $(call fail,tests failed$(comma) see above); }

.PHONY: quick
quick: ## build and run the unit tests only (seconds)
	@$(MAKE) build || exit 1
	ctest --test-dir build --output-on-failure -j $(J) -L unit || { $(call fail,unit tests failed$(comma) see above); }

# $(1) preset, $(2) folder, $(3) labels, $(4) flags: build it and run its tests with these labels.
checked = $(call ready); echo "== building with preset $(1) (in $(2)/)"; $(call configure,$(2),$(1),$(4)); \
	cmake --build $(2) -j $(J) || { $(call fail,building with preset $(1) failed$(comma) see above); }; \
	echo "== testing with preset $(1)"; \
	ctest --preset $(1) -j $(J) -L '$(3)' $(CTEST_ARGS) || { $(call fail,tests with preset $(1) failed$(comma) see above); }

# Not the label `build`: tests that build the project once more.
without_program = unit|model|fault|fuzz
all_but_builds = $(without_program)|cli|e2e

.PHONY: asan
asan: ## build with AddressSanitizer and UBSan, run all tests, those of the whole program too (40 minutes)
	@if [ $(LLAMA) != OFF ]; then $(MAKE) llama model || exit 1; fi
	$(call checked,asan-ubsan,build-asan,$(all_but_builds),$(llama_flag))

.PHONY: tsan
tsan: ## build without llama.cpp with ThreadSanitizer, run all tests of that (half an hour)
	@$(call checked,tsan,build-tsan,$(without_program))

.PHONY: valgrind
valgrind: ## build without llama.cpp, run all tests of that under valgrind (hours; needs the package valgrind)
	@command -v valgrind >/dev/null || { $(call fail,valgrind is not installed); }
	$(call checked,valgrind,build-valgrind,$(without_program))

FUZZ_SECONDS ?= 60
.PHONY: fuzz
fuzz: ## fuzz each reader of foreign bytes and the library (FUZZ_SECONDS=60 each; FUZZ="api http": only these)
	@$(call ready)
	echo "== building with preset fuzz (in build-fuzz/)"
	$(call configure,build-fuzz,fuzz,$(llama_flag))
	cmake --build build-fuzz --target fuzzers -j $(J) || { $(call fail,building with preset fuzz failed$(comma) see above); }
	echo "== fuzzing, $(FUZZ_SECONDS) s each"
	rc=0; bash tests/fuzz/run.sh build-fuzz $(FUZZ_SECONDS) $(FUZZ) || rc=$$?
	case $$rc in 0) ;; 2) exit 2 ;; *) $(call fail,fuzzing found something$(comma) see above) ;; esac

KILLS ?= 1000
CORRUPTIONS ?= 10000
.PHONY: crash
crash: ## kill -9 at KILLS=1000 moments, damage CORRUPTIONS=10000 stores (some minutes; IMP_TEST_SEED=n: again)
	@$(call ready)
	echo "== building with tests (release, in build/)"
	$(call configure,build,release,$(llama_flag) -DBUILD_TESTING=ON)
	cmake --build build -j $(J) --target test_kill test_corrupt test_processes || { $(call fail,building failed$(comma) see above); }
	echo "== $(KILLS) kills"
	IMP_KILL_ROUNDS=$(KILLS) build/tests/fault/test_kill || { $(call fail,a killed store was not as it should be$(comma) see above); }
	echo "== $(CORRUPTIONS) corruptions"
	IMP_CORRUPT_ROUNDS=$(CORRUPTIONS) build/tests/fault/test_corrupt || { $(call fail,a damaged store was not as it should be$(comma) see above); }
	echo "== several processes"
	build/tests/fault/test_processes || { $(call fail,several processes on one store: see above); }

FUZZ_REQUESTS ?= 5000
.PHONY: fuzz-http
fuzz-http: model build ## broken requests to a whole server (FUZZ_REQUESTS=5000)
	@bash tests/soak/run.sh tests/fuzz/serve_fuzz.py $(FUZZ_REQUESTS) || { $(call fail,fuzzing found something$(comma) see above); }

SOAK_MINUTES ?= 60
.PHONY: soak
soak: model build ## a server under mixed load, faults and kills (SOAK_MINUTES=60): answers, memory, files
	@bash tests/soak/run.sh tests/soak/soak.py $(SOAK_MINUTES) || { $(call fail,the soak found something$(comma) see above); }

SOAK_REQUESTS ?= 10000
.PHONY: soak-requests
soak-requests: model build ## short requests to one server (SOAK_REQUESTS=10000): memory stays flat
	@bash tests/soak/run.sh tests/soak/soak.py --requests $(SOAK_REQUESTS) || { $(call fail,memory rose$(comma) see above); }

MEMORY_LIMIT ?= 1G
MEMORY_PROMPTS ?= 100
.PHONY: soak-memory
soak-memory: model build ## long prompts (MEMORY_PROMPTS=100), more than the host cache (MEMORY_LIMIT=1G) holds: RSS (up to an hour)
	@bash tests/soak/run.sh tests/soak/memory.py $(MEMORY_LIMIT) $(MEMORY_PROMPTS) || { $(call fail,memory went beyond the limit$(comma) or wasn't measured: see above); }

POWER_CUTS ?= 3000
.PHONY: faults
faults: ## fail each system call in turn, cut the power POWER_CUTS=3000 times (some minutes; IMP_TEST_SEED=n: again)
	@$(call ready)
	echo "== building with tests (release, in build/)"
	$(call configure,build,release,$(llama_flag) -DBUILD_TESTING=ON)
	cmake --build build -j $(J) || { $(call fail,building failed$(comma) see above); }
	echo "== faults"
	IMP_FAULTS=all IMP_CRASH_STATES=$(POWER_CUTS) ctest --test-dir build --timeout 3600 --output-on-failure -j $(J) -L faults || \
	    { $(call fail,a store with faults was not as it should be$(comma) see above); }

.PHONY: clang
clang: ## build with clang, warnings as errors, run the unit tests
	@$(call checked,clang,build-clang,unit)

.PHONY: debug
debug: ## debug build, run the unit tests
	@$(call checked,debug,build-debug,unit)

.PHONY: bench
bench: build ## run the benchmarks (bench/)
	@echo "== benchmarks"
	found=0
	for b in build/bench/bench[-_]*; do
	    if [ -x "$$b" ] && [ ! -d "$$b" ]; then
	        found=1
	        echo "-- $$(basename $$b)"
	        "$$b" || { $(call fail,$$b failed); }
	    fi
	done
	[ $$found = 1 ] || { $(call fail,no benchmarks were built); }

.PHONY: bench-open
bench-open: build ## open and list a store of 50,000 entries: is all there, and soon (some minutes)
	@build/bench/bench-open --check || { $(call fail,opening a store of many entries: see above); }

.PHONY: install
install: build ## install below PREFIX (DESTDIR is honoured)
	@echo "== installing below $(DESTDIR)$(PREFIX)"
	cmake --install build --prefix $(PREFIX) >build/install.log || { $(call fail,installing failed); }
	tail -n +2 build/install.log

.PHONY: clean
clean: ## remove the build folders (not the cache)
	@echo "== removing build folders"
	rm -rf build build-asan build-tsan build-valgrind build-fuzz build-clang build-debug
