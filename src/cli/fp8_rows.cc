// SPDX-License-Identifier: Apache-2.0
#include "cli/fp8_rows.h"

#include <algorithm>
#include <cmath>

#include "cli/row_access.h"
#include "protocol/casts.h"

namespace tokenyard::cli {
namespace {

using protocol::decode;
using protocol::encode;

constexpr float kLargestFp8 = decode<protocol::F8e4m3>(protocol::F8e4m3::kLargestFinite);
static_assert(kLargestFp8 == 448.0F);

// Returns the block's scale.
float quantise_block(std::span<const std::uint16_t> values, std::uint8_t* codes) {
  float largest = 0;
  for (const std::uint16_t value : values)
    largest = std::max(largest, std::abs(decode<protocol::Bf16>(value)));
  const float scale = largest > 0 ? largest / kLargestFp8 : 1.0F;
  std::ranges::transform(values, codes, [scale](std::uint16_t value) {
    return encode<protocol::F8e4m3>(decode<protocol::Bf16>(value) / scale);
  });
  return scale;
}

}  // namespace

TensorView Fp8Rows::codes_view() const {
  return TensorView::of_const(codes.data(), Dtype::kF8e4m3, {num_rows, hidden_size});
}

TensorView Fp8Rows::scales_view() const {
  return TensorView::of_const(scales.data(), Dtype::kF32, {num_rows, scales_per_row()});
}

Fp8Rows quantise_fp8_rows(const TensorView& bf16_rows) {
  Fp8Rows result{.codes = {}, .scales = {}, .num_rows = bf16_rows.num_rows(), .hidden_size = bf16_rows.shape[1]};
  result.codes.resize(static_cast<std::size_t>(result.num_rows * result.hidden_size));
  result.scales.reserve(static_cast<std::size_t>(result.num_rows * result.scales_per_row()));
  const RowAccess rows(bf16_rows);
  std::uint8_t* codes = result.codes.data();
  for (std::int64_t row = 0; row < result.num_rows; ++row) {
    const auto* values = rows.row<const std::uint16_t>(row);
    for (std::int64_t first = 0; first < result.hidden_size; first += kFp8Block) {
      const auto count = static_cast<std::size_t>(std::min<std::int64_t>(kFp8Block, result.hidden_size - first));
      result.scales.push_back(quantise_block({values + first, count}, codes));
      codes += count;
    }
  }
  return result;
}

void dequantise_fp8_row(std::span<const std::uint8_t> codes, const float* scales, float* values) {
  for (std::size_t i = 0; i < codes.size(); ++i) {
    values[i] = decode<protocol::F8e4m3>(codes[i]) * scales[i / kFp8Block];
  }
}

}  // namespace tokenyard::cli
