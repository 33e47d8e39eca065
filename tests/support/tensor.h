// SPDX-License-Identifier: Apache-2.0
// Test memory as a tensor: canary bytes around it and between strided rows, poison inside until it is written.
// Thread rule: one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tokenyard/tensor.h"

namespace tokenyard::support {

inline constexpr std::byte kPoison{0x7F};  // reads as NaN in bf16, f16 and fp8, and as a huge id
inline constexpr std::byte kNanPoison{0xFF};

struct TensorOptions {
  std::int64_t padding_elements = 0;  // between rows: the tensor is then strided
  std::int64_t offset_bytes = 0;      // of the first element from a 64-byte boundary
  std::byte poison = kPoison;
};

// Two or three dimensions; a row is the last one.
class Tensor {
 public:
  Tensor() = default;
  Tensor(Dtype dtype, std::vector<std::int64_t> shape, const TensorOptions& options = {});
  Tensor(Tensor&&) noexcept = default;
  Tensor& operator=(Tensor&&) noexcept = default;
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;

  [[nodiscard]] TensorView view() const { return view_; }

  [[nodiscard]] std::int64_t num_rows() const { return num_rows_; }

  [[nodiscard]] std::int64_t row_bytes() const { return row_bytes_; }

  [[nodiscard]] std::byte* row(std::int64_t index) const;
  // Rows one after the other; as many bytes as the tensor has.
  void fill(std::span<const std::byte> bytes);
  [[nodiscard]] std::vector<std::byte> bytes() const;

  void remember() { remembered_ = memory_; }

  // Neither elements nor canaries changed since `remember`.
  void check_unchanged(const std::string& what) const;
  // Nothing was written outside the elements.
  void check_guards(const std::string& what) const;

 private:
  TensorView view_{};
  std::vector<std::byte> memory_;
  std::vector<std::byte> remembered_;
  std::size_t begin_ = 0;  // of the first element in memory_
  std::int64_t num_rows_ = 0;
  std::int64_t row_bytes_ = 0;
  std::int64_t stride_bytes_ = 0;
};

// Row `index` of a [rows, *] view, or of a [blocks, rows, *] view counted through.
[[nodiscard]] std::byte* row_of(const TensorView& view, std::int64_t index);
// Bytes of the last dimension.
[[nodiscard]] std::int64_t last_dim_bytes(const TensorView& view);
// All dimensions but the last.
[[nodiscard]] std::int64_t num_flat_rows(const TensorView& view);

}  // namespace tokenyard::support
