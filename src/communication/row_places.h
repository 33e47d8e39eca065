// SPDX-License-Identifier: Apache-2.0
// Where the rows of an output tensor are. Internal to the communication room; pure.
#pragma once

#include <cstdint>

#include "tokenyard/tensor.h"

#include "communication/handle.h"
#include "engine/engine.h"

namespace tokenyard::communication {

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

inline std::int64_t bytes_of_row(const PayloadKind& kind) {
  std::int64_t bytes = size_of(kind.dtype);
  for (int i = 0; i < kind.num_inner; ++i)
    bytes *= kind.inner[static_cast<std::size_t>(i)];
  return bytes;
}

// `rows_per_block` is 0 for layouts without blocks; outputs in blocks have a dimension for them, or the same rows in
// one.
inline engine::OutputPlane places_of(const TensorView& output, const PayloadKind& kind, std::int64_t rows_per_block) {
  const std::int64_t element = size_of(output.dtype);
  const bool blocks = output.num_dims == kind.num_inner + 2;
  const std::int64_t row_stride = output.strides[blocks ? 1 : 0] * element;
  return {.data = static_cast<std::byte*>(output.data),
          .block_stride = blocks ? output.strides[0] * element : rows_per_block * row_stride,
          .row_stride = row_stride,
          .row_bytes = bytes_of_row(kind),
          .dtype = kind.dtype};
}

// Rows without gaps.
inline engine::OutputPlane dense_places(std::byte* memory, const PayloadKind& kind, std::int64_t rows_per_block) {
  const std::int64_t row_bytes = bytes_of_row(kind);
  return {.data = memory,
          .block_stride = rows_per_block * row_bytes,
          .row_stride = row_bytes,
          .row_bytes = row_bytes,
          .dtype = kind.dtype};
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
