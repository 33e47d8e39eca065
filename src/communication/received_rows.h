// SPDX-License-Identifier: Apache-2.0
// Walking over received rows, wherever the placement put them. Internal to the communication room; pure.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "tokenyard/tensor.h"

#include "communication/handle.h"
#include "protocol/layout.h"

namespace tokenyard::communication {

// Calls visit(source, row) for every row that was received and kept, in the order of (source, token): `row` is the
// token index where sources have spaces of their own, and else the row of the result (source is then 0).
template <class Visit>
void for_each_received_row(const Route& route, const protocol::WindowLayout& layout, Visit&& visit) {
  const engine::Round& round = route.round;
  if (!protocol::space_per_source(layout.shape().placement)) {
    const std::int64_t kept = std::min(round.num_rows, round.row_limit);
    for (std::int64_t row = 0; row < kept; ++row)
      visit(std::int64_t{0}, row);
    return;
  }
  for (std::int64_t source = 0; source < std::ssize(round.rows_received); ++source) {
    engine::ReceivedTokens(round, layout, source).visit_all([&](std::int64_t token) { visit(source, token); });
  }
}

// One block of a [num_blocks, rows_per_block, ...] tensor.
inline TensorView block_of(const TensorView& tensor, std::int64_t index) {
  TensorView block = tensor;
  block.num_dims = tensor.num_dims - 1;
  for (int i = 0; i < block.num_dims; ++i) {
    block.shape[static_cast<std::size_t>(i)] = tensor.shape[static_cast<std::size_t>(i) + 1];
    block.strides[static_cast<std::size_t>(i)] = tensor.strides[static_cast<std::size_t>(i) + 1];
  }
  if (tensor.data != nullptr) {
    block.data = static_cast<std::byte*>(tensor.data) + index * tensor.strides[0] * size_of(tensor.dtype);
  }
  return block;
}

// Where the rows of an output are: base + block * block_stride + row * row_stride, in bytes.
struct RowPlaces {
  std::byte* base = nullptr;
  std::int64_t block_stride = 0;
  std::int64_t row_stride = 0;

  [[nodiscard]] std::byte* at(std::int64_t block, std::int64_t row) const {
    return base + block * block_stride + row * row_stride;
  }
};

// `rows_per_block` is 0 for layouts without blocks; outputs in blocks have a dimension for them, or the same rows in
// one.
inline RowPlaces places_of(const TensorView& output, const PayloadKind& kind, std::int64_t rows_per_block) {
  const std::int64_t element = size_of(output.dtype);
  auto* base = static_cast<std::byte*>(output.data);
  if (output.num_dims == kind.num_inner + 2) return {base, output.strides[0] * element, output.strides[1] * element};
  return {base, rows_per_block * output.strides[0] * element, output.strides[0] * element};
}

// The part of the caller's tensor that the result fills.
inline TensorView trimmed(TensorView into, const PayloadKind& kind, std::int64_t rows_per_block, std::int64_t rows) {
  if (into.num_dims == kind.num_inner + 2) {
    into.shape[1] = rows_per_block;
  } else {
    into.shape[0] = rows;
  }
  return into;
}

}  // namespace tokenyard::communication
