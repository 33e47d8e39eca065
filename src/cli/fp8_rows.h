// SPDX-License-Identifier: Apache-2.0
// Rows in DispatchFormat::kFp8Block128: f8e4m3 values and one f32 scale per 128 of them, value = code * scale.
// Thread rule: pure functions and values.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tokenyard/tensor.h"

namespace tokenyard::cli {

inline constexpr int kFp8Block = 128;

struct Fp8Rows {
  std::vector<std::uint8_t> codes;  // [rows, hidden]
  std::vector<float> scales;        // [rows, ceil(hidden / 128)]
  std::int64_t num_rows = 0;
  std::int64_t hidden_size = 0;

  [[nodiscard]] std::int64_t scales_per_row() const { return (hidden_size + kFp8Block - 1) / kFp8Block; }

  [[nodiscard]] TensorView codes_view() const;
  [[nodiscard]] TensorView scales_view() const;
};

// From bf16 rows. A block's scale is its largest magnitude / 448, or 1 when all of it is zero.
[[nodiscard]] Fp8Rows quantise_fp8_rows(const TensorView& bf16_rows);

void dequantise_fp8_row(std::span<const std::uint8_t> codes, const float* scales, float* values);

}  // namespace tokenyard::cli
