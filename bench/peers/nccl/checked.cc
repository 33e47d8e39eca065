// SPDX-License-Identifier: Apache-2.0
#include "checked.h"

#include <fmt/format.h>

#include <cstdio>
#include <stdexcept>

namespace tokenyard::bench {
namespace {

std::string explain(const char* call, cudaError_t result) {
  return fmt::format("{}: {}: {}", call, cudaGetErrorName(result), cudaGetErrorString(result));
}

std::string explain(const char* call, ncclResult_t result) {
  const char* last = ncclGetLastError(nullptr);
  return fmt::format("{}: {}{}{} (NCCL_DEBUG=WARN tells more)", call, ncclGetErrorString(result),
                     last != nullptr && *last != '\0' ? ": " : "", last != nullptr ? last : "");
}

template <typename Result>
void complain(const char* call, Result result) noexcept {
  try {
    fmt::print(stderr, "bench_nccl: {}\n", explain(call, result));
  } catch (...) {
    std::fputs("bench_nccl: a call failed, and so did telling which\n", stderr);
  }
}

}  // namespace

void check(const char* call, cudaError_t result) {
  if (result != cudaSuccess) throw std::runtime_error(explain(call, result));
}

void check(const char* call, ncclResult_t result) {
  if (result != ncclSuccess) throw std::runtime_error(explain(call, result));
}

void report(const char* call, cudaError_t result) noexcept {
  if (result != cudaSuccess) complain(call, result);
}

void report(const char* call, ncclResult_t result) noexcept {
  if (result != ncclSuccess) complain(call, result);
}

std::string nccl_version() {
  int code = 0;
  check("ncclGetVersion", ncclGetVersion(&code));
  return fmt::format("{}.{}.{}", code / 10'000, code / 100 % 100, code % 100);
}

}  // namespace tokenyard::bench
