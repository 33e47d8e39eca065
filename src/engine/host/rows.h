// SPDX-License-Identifier: Apache-2.0
// The row operations of the host engine: copies, casts and sums, with the best vector instructions that the machine
// has. Results equal the scalar definition (protocol/casts.h) bit for bit on every machine.
// Pointers may have any alignment and sizes may be 0. Ranges must not overlap except where said.
// Thread rule: pure functions of the memory they are given; use from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "tokenyard/tensor.h"

namespace tokenyard::engine::host {

// Shorter rows are never streamed. Streaming stores do not fetch the target's lines first and leave the cache alone.
// What decides is who reads the rows and the volume of a phase, which the caller knows, and hardly the row.
inline constexpr std::int64_t kStreamBytes = 512;
// The same for rows that do not start on a line of the cache: 4 KiB rows then copy at 13 to 16 GB/s streamed and at 26
// to 45 GB/s plain while they fit the cache, and gain nothing beyond it. Keep row strides multiples of 64 bytes.
inline constexpr std::int64_t kStreamUnalignedBytes = 8192;

// A thread that made streaming stores (copy_row, or sum_rows with `stream`) calls flush_streams() before the release
// or join that publishes them: they are weakly ordered, and without it the reader may see old lines.
void flush_streams();

// With `stream`, rows of at least kStreamBytes (kStreamUnalignedBytes) are streamed.
void copy_row(std::byte* to, const std::byte* from, std::int64_t bytes, bool stream = true);

// Casts n elements between bf16, f16, f32, f8e4m3 and f8e5m2, with one rounding. The same dtype (any) is a plain
// copy. `to` may equal `from` when the target is not wider. Throws kInvalidArgument for another pair of dtypes.
void cast_row(std::byte* to, Dtype to_dtype, const std::byte* from, Dtype from_dtype, std::int64_t n);

// output[i] = round(((0.0f + rows[0][i]) + rows[1][i] + ...) + biases[0][i] + ...): fp32, each addition rounded, in
// this order, then one rounding to the output's dtype. No rows and no biases give zeros.
struct RowSum {
  std::span<const std::byte* const> rows;  // may lie in other ranks' memory; each element is read once
  Dtype rows_dtype = Dtype::kBf16;         // bf16, f16, f32, f8e4m3 or f8e5m2
  std::span<const std::byte* const> biases;
  std::byte* output = nullptr;
  Dtype output_dtype = Dtype::kBf16;  // bf16, f16 or f32; the biases' too
  std::int64_t n = 0;
  bool stream = false;  // streaming stores where the output's alignment allows
};

// `output` may equal one of the rows or biases of the output's width. Throws kInvalidArgument for other dtypes.
void sum_rows(const RowSum& sum);

}  // namespace tokenyard::engine::host
