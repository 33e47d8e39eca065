// SPDX-License-Identifier: Apache-2.0
#include "support/tensor.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "support/check.h"

namespace tokenyard::support {
namespace {

constexpr std::size_t kGuardBytes = 64;
constexpr std::byte kCanary{0xC5};

}  // namespace

Tensor::Tensor(Dtype dtype, std::vector<std::int64_t> shape, const TensorOptions& options) {
  const std::int64_t columns = shape.back();
  row_bytes_ = columns * size_of(dtype);
  stride_bytes_ = (columns + options.padding_elements) * size_of(dtype);
  num_rows_ = 1;
  for (std::size_t i = 0; i + 1 < shape.size(); ++i)
    num_rows_ *= shape[i];
  const auto bytes = static_cast<std::size_t>(num_rows_ * stride_bytes_);
  memory_.assign(bytes + 3 * kGuardBytes + static_cast<std::size_t>(options.offset_bytes), kCanary);
  const auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
  begin_ = kGuardBytes + (kGuardBytes - address % kGuardBytes) % kGuardBytes +
           static_cast<std::size_t>(options.offset_bytes);
  view_ = TensorView(memory_.data() + begin_, dtype, std::span<const std::int64_t>(shape));
  if (options.padding_elements > 0) {
    std::int64_t stride = columns + options.padding_elements;
    for (std::size_t i = shape.size() - 1; i-- > 0;) {
      view_.strides[i] = stride;
      stride *= shape[i];
    }
  }
  for (std::int64_t i = 0; i < num_rows_; ++i)
    std::fill_n(row(i), row_bytes_, options.poison);
  remember();
}

std::byte* Tensor::row(std::int64_t index) const {
  return static_cast<std::byte*>(view_.data) + index * stride_bytes_;
}

void Tensor::fill(std::span<const std::byte> bytes) {
  check_eq(static_cast<std::int64_t>(bytes.size()), num_rows_ * row_bytes_, "bytes for a test tensor");
  for (std::int64_t i = 0; i < num_rows_ && row_bytes_ > 0; ++i) {
    std::memcpy(row(i), bytes.data() + i * row_bytes_, static_cast<std::size_t>(row_bytes_));
  }
  remember();
}

std::vector<std::byte> Tensor::bytes() const {
  std::vector<std::byte> all;
  all.reserve(static_cast<std::size_t>(num_rows_ * row_bytes_));
  for (std::int64_t i = 0; i < num_rows_; ++i)
    all.insert(all.end(), row(i), row(i) + row_bytes_);
  return all;
}

void Tensor::check_unchanged(const std::string& what) const {
  check_bytes(memory_.data(), remembered_, what + " was written");
}

void Tensor::check_guards(const std::string& what) const {
  const auto is_element = [&](std::size_t at) {
    if (at < begin_ || stride_bytes_ == 0) return false;
    const auto offset = static_cast<std::int64_t>(at - begin_);
    return offset / stride_bytes_ < num_rows_ && offset % stride_bytes_ < row_bytes_;
  };
  for (std::size_t at = 0; at < memory_.size(); ++at) {
    if (memory_[at] == kCanary || is_element(at)) continue;
    throw CheckFailure(what + ": a byte outside the tensor was written, at offset " +
                       std::to_string(static_cast<std::int64_t>(at) - static_cast<std::int64_t>(begin_)));
  }
}

std::byte* row_of(const TensorView& view, std::int64_t index) {
  std::int64_t offset = 0;
  for (int dim = view.num_dims - 2; dim >= 0; --dim) {
    const auto at = static_cast<std::size_t>(dim);
    offset += (index % view.shape[at]) * view.strides[at];
    index /= view.shape[at];
  }
  return static_cast<std::byte*>(view.data) + offset * size_of(view.dtype);
}

std::int64_t last_dim_bytes(const TensorView& view) {
  return view.shape[static_cast<std::size_t>(view.num_dims - 1)] * size_of(view.dtype);
}

std::int64_t num_flat_rows(const TensorView& view) {
  std::int64_t rows = 1;
  for (int dim = 0; dim + 1 < view.num_dims; ++dim)
    rows *= view.shape[static_cast<std::size_t>(dim)];
  return rows;
}

}  // namespace tokenyard::support
