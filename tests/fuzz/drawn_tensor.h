// SPDX-License-Identifier: Apache-2.0
// Tensors as a careless or hostile caller would make them, out of the fuzzer's bytes.
// Thread rule: plain values; see input.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tokenyard/tensor.h"

#include "fuzz/input.h"

namespace tokenyard::fuzz {

// Larger tensors have no memory here: the library must have refused them before it reads a row.
inline constexpr std::int64_t kMostBytes = 1 << 16;

// A view, its memory of exactly the size it says, and whether every call must refuse it.
struct Drawn {
  TensorView view{};
  std::vector<std::byte> memory;
  bool wrong = false;
};

struct Wanted {
  Dtype dtype = Dtype::kU8;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t blocks = 0;  // > 0: [blocks, rows, columns]
};

// What is wanted, mostly; or something else that starts from it.
[[nodiscard]] Drawn draw_tensor(Input& input, const Wanted& wanted);
// [entries], or something that starts from it.
[[nodiscard]] Drawn draw_list(Input& input, Dtype dtype, std::int64_t entries);

}  // namespace tokenyard::fuzz
