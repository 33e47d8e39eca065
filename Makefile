# SPDX-License-Identifier: Apache-2.0
# The front door. Every target does all of its set-up, also on a fresh Debian 12 or Ubuntu 24.04; second calls are quick.
#
#   make run             the main job: a layer's tokens to its experts and back, through every backend
#   make test            build everything and run every test
#   make test-gpu        builds what needs nvcc and runs its tests; without nvcc or a GPU they are skipped, which it says
#   make bench           dispatch and combine beside memcpy and Open MPI, in turns; the last line has the worst ratios
#   make check           format, clang-tidy, budgets, public headers
#   make test-sanitize   the tests under address+undefined, then under the thread sanitizer
#   make fuzz            each fuzz target for SECONDS (60) with clang's libFuzzer, from the kept corpus on
#   make docs            write the generated pages anew
#   make install         install to PREFIX (/usr/local)

PRESET ?= release
PREFIX ?= /usr/local
SECONDS ?= 60
BUILD := build/$(PRESET)

.PHONY: run test test-gpu bench check test-sanitize fuzz docs install clean
.DEFAULT_GOAL := run

# Configures a preset when its folder is new; Ninja does it again by itself when a CMake file changes.
build/%/build.ninja:
	@cmake --preset $*

.PRECIOUS: build/%/build.ninja

define program
	@tools/install_packages build test
	@$(MAKE) --no-print-directory --silent $(BUILD)/build.ninja
	@cmake --build --preset $(PRESET) --target tokenyard_program
endef

run:
	$(program)
	@$(BUILD)/tokenyard run

test:
	@tools/install_packages build test
	@$(MAKE) --no-print-directory --silent $(BUILD)/build.ninja
	@cmake --build --preset $(PRESET)
	@ctest --preset $(PRESET)

test-gpu:
	@tools/install_packages build test
	@if [ -z "$$(command -v nvcc)" ] && [ ! -x "$${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ]; then \
	  echo "test-gpu: skipped: no nvcc in PATH, CUDA_HOME or /usr/local/cuda"; \
	else \
	  $(MAKE) --no-print-directory --silent build/cuda/build.ninja && \
	  cmake --build --preset cuda --target gpu_tests tokenyard_program && \
	  if [ -e /dev/nvidiactl ]; then \
	    tools/gpu_tests --out build/cuda/gpu_tests.log; \
	  else \
	    echo "test-gpu: built; the tests that need a GPU are skipped: there is no /dev/nvidiactl"; \
	  fi && \
	  ctest --test-dir build/cuda/tests/gpu --output-on-failure -R carries; \
	fi

bench:
	@tools/install_packages build test bench
	@cmake --preset $(PRESET) -DTOKENYARD_BENCH=ON
	@cmake --build --preset $(PRESET) --target tokenyard_program bench_openmpi
	@tools/bench_against_peers $(BUILD)

check:
	@tools/install_packages build test check
	@$(MAKE) --no-print-directory --silent $(BUILD)/build.ninja
	@tools/check $(BUILD)

test-sanitize:
	@tools/install_packages build test
	@for preset in asan tsan; do \
	  echo "== $$preset"; \
	  $(MAKE) --no-print-directory --silent build/$$preset/build.ninja && \
	  tools/without_aslr cmake --build --preset $$preset && \
	  tools/without_aslr ctest --preset $$preset || exit 1; \
	done

# New inputs are collected in build/fuzz/inputs; what fails is written to build/fuzz/failed.
fuzz:
	@tools/install_packages build test fuzz
	@$(MAKE) --no-print-directory --silent build/fuzz/build.ninja
	@cmake --build --preset fuzz
	@tools/fuzz build/fuzz $(SECONDS)

docs:
	$(program)
	@$(BUILD)/tokenyard info --markdown > docs/contracts.md

install:
	@tools/install_packages build test
	@$(MAKE) --no-print-directory --silent $(BUILD)/build.ninja
	@cmake --build --preset $(PRESET)
	@cmake --install $(BUILD) --prefix $(PREFIX)

clean:
	rm -rf build
