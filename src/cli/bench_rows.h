// SPDX-License-Identifier: Apache-2.0
// The rows that the bench's ranks have, get and give, as bytes: everything is factor * bench_value, and bench_value
// depends on one sum of rank, token and column, so that every row is a part of one long row.
// Thread rule: one thread per object.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "tokenyard/tensor.h"

#include "cli/bench_routing.h"

namespace tokenyard::cli {

struct BenchToken {
  int rank = 0;
  std::int64_t token = 0;
};

class BenchRowBytes {
 public:
  // f32, bf16, f16 or f8e4m3.
  BenchRowBytes(const BenchShape& shape, Dtype dtype);

  // Valid as long as the object.
  [[nodiscard]] std::span<const std::byte> row(const BenchToken& token, float factor);

  // Throws kPeerFailed with the first element that differs; `what` begins the message.
  void require(const std::byte* got, const BenchToken& token, float factor, const char* what);

 private:
  [[nodiscard]] const std::vector<std::byte>& long_row(float factor);

  BenchShape shape_;
  Dtype dtype_;
  std::map<float, std::vector<std::byte>> long_rows_;
};

}  // namespace tokenyard::cli
