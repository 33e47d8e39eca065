// SPDX-License-Identifier: Apache-2.0
// The row operations that wire formats need: casts to blocks of fp8, the logarithmic wire, and weighted sums, with the
// best vector instructions that the machine has. Results equal the scalar definitions (protocol/block_cast.h,
// protocol/log_wire.h, protocol/casts.h) bit for bit on every machine.
// Pointers may have any alignment. Ranges must not overlap except where said.
// Thread rule: pure functions of the memory they are given; use from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "tokenyard/dispatch.h"
#include "tokenyard/tensor.h"

namespace tokenyard::engine::host {

// A row of n values to n codes and their scales, of the sizes that protocol::cast_row_bytes gives.
struct BlockCast {
  std::byte* values = nullptr;
  std::byte* scales = nullptr;
  const std::byte* from = nullptr;
  Dtype from_dtype = Dtype::kBf16;  // bf16, f16 or f32
  std::int64_t n = 0;
  DispatchCast cast = DispatchCast::kFp8Block128;  // not kNone
};

// Throws kInvalidArgument for another dtype or cast.
void cast_row_to_fp8_blocks(const BlockCast& row);

// A row of n values takes protocol::log_row_bytes(n) bytes.
void encode_log_row(std::byte* to, const float* from, std::int64_t n);
void decode_log_row(float* to, const std::byte* from, std::int64_t n);

// output[i] = round(... fma(weights[1], rows[1][i], fma(weights[0], rows[0][i], 0.0f))): fp32, each product and its
// addition rounded once, in this order, then one rounding to the output's dtype. No rows give zeros.
struct WeightedSum {
  std::span<const std::byte* const> rows;
  Dtype rows_dtype = Dtype::kBf16;  // bf16, f16 or f32
  std::span<const float> weights;   // one for each row
  std::byte* output = nullptr;
  Dtype output_dtype = Dtype::kBf16;  // bf16, f16 or f32
  std::int64_t n = 0;
  bool stream = false;  // as in RowSum: flush_streams() afterwards
};

// `output` may equal one of the rows when their dtypes have one width. Throws kInvalidArgument for other dtypes and for
// another number of weights than rows.
void weighted_sum_rows(const WeightedSum& sum);

}  // namespace tokenyard::engine::host
