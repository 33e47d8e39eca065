// SPDX-License-Identifier: Apache-2.0
// Row i of a tensor, whether its rows lie in one block or in one block per source rank. Thread rule: a value.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tokenyard/tensor.h"

namespace tokenyard::cli {

class RowAccess {
 public:
  // [rows, columns] or [blocks, rows, columns], last dimension contiguous.
  explicit RowAccess(const TensorView& view)
      : data_(view.as<std::byte>()),
        num_rows_(view.num_dims == 3 ? view.shape[0] * view.shape[1] : view.shape[0]),
        rows_per_block_(view.num_dims == 3 ? view.shape[1] : view.shape[0]),
        block_stride_(view.num_dims == 3 ? view.strides[0] * size_of(view.dtype) : 0),
        row_stride_(view.strides[view.num_dims == 3 ? 1 : 0] * size_of(view.dtype)) {}

  [[nodiscard]] std::int64_t num_rows() const { return num_rows_; }

  template <class T>
  [[nodiscard]] T* row(std::int64_t index) const {
    const std::int64_t block = index / rows_per_block_;
    return reinterpret_cast<T*>(data_ + block * block_stride_ + (index - block * rows_per_block_) * row_stride_);
  }

 private:
  std::byte* data_;
  std::int64_t num_rows_;
  std::int64_t rows_per_block_;
  std::int64_t block_stride_;
  std::int64_t row_stride_;
};

}  // namespace tokenyard::cli
