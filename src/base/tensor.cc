// SPDX-License-Identifier: Apache-2.0
#include "tokenyard/tensor.h"

#include <algorithm>

#include "tokenyard/error.h"

namespace tokenyard {

std::string_view name(Dtype dtype) {
  switch (dtype) {
    case Dtype::kBf16:
      return "bf16";
    case Dtype::kF16:
      return "f16";
    case Dtype::kF32:
      return "f32";
    case Dtype::kF8e4m3:
      return "f8e4m3";
    case Dtype::kF8e5m2:
      return "f8e5m2";
    case Dtype::kE8m0:
      return "e8m0";
    case Dtype::kU8:
      return "u8";
    case Dtype::kI32:
      return "i32";
    case Dtype::kI64:
      return "i64";
  }
  return "unknown";
}

std::int64_t size_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::kBf16:
    case Dtype::kF16:
      return 2;
    case Dtype::kF32:
    case Dtype::kI32:
      return 4;
    case Dtype::kI64:
      return 8;
    default:
      return 1;
  }
}

TensorView::TensorView(void* memory, Dtype element, std::span<const std::int64_t> extents)
    : data(memory), dtype(element), num_dims(static_cast<int>(extents.size())) {
  if (extents.empty() || extents.size() > static_cast<std::size_t>(kMaxDims)) {
    throw Error(ErrorCode::kInvalidArgument,
                "a tensor has 1 to " + std::to_string(kMaxDims) + " dimensions, not " + std::to_string(extents.size()));
  }
  std::int64_t stride = 1;
  for (int i = num_dims - 1; i >= 0; --i) {
    const auto at = static_cast<std::size_t>(i);
    if (extents[at] < 0) {
      throw Error(ErrorCode::kInvalidArgument, "dimension " + std::to_string(i) + " is " + std::to_string(extents[at]) +
                                                   "; it must not be negative");
    }
    shape[at] = extents[at];
    strides[at] = stride;
    if (extents[at] > kMaxTensorBytes / size_of(element) / std::max<std::int64_t>(stride, 1)) {
      throw Error(ErrorCode::kInvalidArgument, "dimension " + std::to_string(i) + " is " + std::to_string(extents[at]) +
                                                   "; the tensor would be larger than any memory");
    }
    stride *= extents[at];
  }
}

TensorView::TensorView(void* memory, Dtype element, std::initializer_list<std::int64_t> extents)
    : TensorView(memory, element, std::span<const std::int64_t>(extents.begin(), extents.size())) {}

TensorView TensorView::of_const(const void* memory, Dtype element, std::initializer_list<std::int64_t> extents) {
  // The library never writes inputs; see the header.
  return {const_cast<void*>(memory), element, extents};  // NOLINT(cppcoreguidelines-pro-type-const-cast)
}

std::int64_t TensorView::num_elements() const {
  std::int64_t count = num_dims > 0 ? 1 : 0;
  for (int i = 0; i < num_dims; ++i)
    count *= shape[static_cast<std::size_t>(i)];
  return count;
}

std::int64_t TensorView::row_bytes() const {
  std::int64_t bytes = num_dims > 0 ? size_of(dtype) : 0;
  for (int i = 1; i < num_dims; ++i)
    bytes *= shape[static_cast<std::size_t>(i)];
  return bytes;
}

std::int64_t TensorView::row_stride_bytes() const {
  return num_dims > 0 ? strides[0] * size_of(dtype) : 0;
}

bool TensorView::contiguous() const {
  std::int64_t stride = 1;
  for (int i = num_dims - 1; i >= 0; --i) {
    const auto at = static_cast<std::size_t>(i);
    if (shape[at] != 1 && strides[at] != stride) return false;
    stride *= shape[at];
  }
  return true;
}

TensorView TensorView::rows(std::int64_t first, std::int64_t count) const {
  if (num_dims < 1 || first < 0 || count < 0 || count > shape[0] - first) {
    throw Error(ErrorCode::kInvalidArgument,
                std::to_string(count) + " rows from " + std::to_string(first) + " on are not inside " + describe());
  }
  TensorView part = *this;
  part.shape[0] = count;
  if (data != nullptr) part.data = static_cast<std::byte*>(data) + first * row_stride_bytes();
  return part;
}

std::string TensorView::describe() const {
  if (!defined()) return "(not given)";
  const auto list = [this](const auto& values) {
    std::string text = "[";
    for (int i = 0; i < num_dims; ++i) {
      if (i > 0) text += ", ";
      text += std::to_string(values[static_cast<std::size_t>(i)]);
    }
    return text + "]";
  };
  std::string text = std::string(name(dtype)) + list(shape);
  if (!contiguous()) text += " with strides " + list(strides);
  return text;
}

}  // namespace tokenyard
