// SPDX-License-Identifier: Apache-2.0
#include "steady/allocation_counter.h"

#include <malloc.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>

// The C library's own, under the names by which it lets programs stand in front of it.
// NOLINTBEGIN(bugprone-reserved-identifier,cert-dcl37-c,cert-dcl51-cpp,readability-identifier-naming)
extern "C" {
void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t count, size_t bytes);
void* __libc_realloc(void* memory, size_t bytes);
void* __libc_memalign(size_t alignment, size_t bytes);
void __libc_free(void* memory);
}

// NOLINTEND(bugprone-reserved-identifier,cert-dcl37-c,cert-dcl51-cpp,readability-identifier-naming)

namespace tokenyard::steady_tests {
namespace {

std::atomic<bool> counting{false};
std::atomic<std::int64_t> num_calls{0};
std::atomic<std::size_t> first_bytes{0};
std::atomic<std::int64_t> live_blocks{0};
std::atomic<std::int64_t> live_bytes{0};

void count(std::size_t bytes) {
  if (!counting.load(std::memory_order_relaxed)) return;
  if (num_calls.fetch_add(1) == 0) first_bytes = bytes;
}

void add(void* memory, std::int64_t sign) {
  if (memory == nullptr) return;
  live_blocks.fetch_add(sign, std::memory_order_relaxed);
  live_bytes.fetch_add(sign * static_cast<std::int64_t>(::malloc_usable_size(memory)), std::memory_order_relaxed);
}

void* given(void* memory) {
  add(memory, 1);
  return memory;
}

}  // namespace

void start_counting_allocations() {
  num_calls = 0;
  first_bytes = 0;
  counting = true;
}

std::int64_t stop_counting_allocations() {
  counting = false;
  return num_calls;
}

std::size_t first_counted_bytes() {
  return first_bytes;
}

HeapInUse heap_in_use() {
  return {.blocks = live_blocks, .bytes = live_bytes};
}

}  // namespace tokenyard::steady_tests

using tokenyard::steady_tests::add;
using tokenyard::steady_tests::count;
using tokenyard::steady_tests::given;

extern "C" {

void* malloc(size_t bytes) {
  count(bytes);
  return given(__libc_malloc(bytes));
}

void* calloc(size_t number, size_t bytes) {
  count(number * bytes);
  return given(__libc_calloc(number, bytes));
}

void* realloc(void* memory, size_t bytes) {
  count(bytes);
  add(memory, -1);
  void* const moved = __libc_realloc(memory, bytes);
  // Refused: the old block stays. Of 0 bytes: it went.
  add(moved == nullptr && bytes > 0 ? memory : moved, 1);
  return moved;
}

void* memalign(size_t alignment, size_t bytes) {
  count(bytes);
  return given(__libc_memalign(alignment, bytes));
}

void* aligned_alloc(size_t alignment, size_t bytes) {
  count(bytes);
  return given(__libc_memalign(alignment, bytes));
}

int posix_memalign(void** memory, size_t alignment, size_t bytes) {
  count(bytes);
  *memory = given(__libc_memalign(alignment, bytes));
  return *memory == nullptr ? ENOMEM : 0;
}

void free(void* memory) {
  if (memory != nullptr) count(0);
  add(memory, -1);
  __libc_free(memory);
}
}
