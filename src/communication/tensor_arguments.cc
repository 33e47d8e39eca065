// SPDX-License-Identifier: Apache-2.0
// Checks of one tensor, whatever it is for.
#include <algorithm>
#include <string>

#include "tokenyard/error.h"

#include "communication/arguments.h"

namespace tokenyard::communication {
namespace {

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

}  // namespace

// A view is plain data, so any number may stand in it. The messages do without TensorView::describe, which multiplies.
void check_tensor(const TensorView& tensor, std::string_view what) {
  const auto refuse_tensor = [&](const std::string& reason) { refuse(std::string(what) + " has " + reason); };
  if (tensor.num_dims < 0 || tensor.num_dims > kMaxDims) {
    refuse_tensor(std::to_string(tensor.num_dims) + " dimensions; a tensor has 1 to " + std::to_string(kMaxDims));
  }
  const std::int64_t most = kMaxTensorBytes / size_of(tensor.dtype);
  std::int64_t elements = 1;
  for (int i = 0; i < tensor.num_dims; ++i) {
    const auto at = static_cast<std::size_t>(i);
    const std::int64_t extent = tensor.shape[at];
    const std::int64_t stride = tensor.strides[at];
    if (extent < 0) {
      refuse_tensor("a dimension " + std::to_string(i) + " of " + std::to_string(extent) + "; it must not be negative");
    }
    const std::int64_t counted = std::max<std::int64_t>(extent, 1);
    if (counted > most / elements || stride > most / counted || stride < -most / counted) {
      refuse_tensor("a dimension " + std::to_string(i) + " of " + std::to_string(extent) + " with stride " +
                    std::to_string(stride) + "; it would be larger than any memory");
    }
    elements *= counted;
  }
}

void check_rows(const TensorView& tensor, std::string_view what, std::int64_t num_rows) {
  const auto refuse_tensor = [&](const std::string& reason) {
    refuse(std::string(what) + " is " + tensor.describe() + "; " + reason);
  };
  if (tensor.device.kind != DeviceKind::kCpu) refuse_tensor("it must be in host memory");
  if (tensor.num_rows() != num_rows) refuse_tensor("it must have " + std::to_string(num_rows) + " rows");
  std::int64_t stride = 1;
  for (int i = tensor.num_dims - 1; i >= 1; --i) {
    const auto at = static_cast<std::size_t>(i);
    if (tensor.shape[at] != 1 && tensor.strides[at] != stride) {
      refuse_tensor("the elements of a row must be contiguous");
    }
    stride *= tensor.shape[at];
  }
  if (num_rows == 0 || tensor.row_bytes() == 0) return;
  if (tensor.data == nullptr) refuse_tensor("it has no memory");
  if (tensor.strides[0] < 0 || (num_rows > 1 && tensor.strides[0] < stride)) {
    refuse_tensor("rows must not overlap or run backwards");
  }
  if (reinterpret_cast<std::uintptr_t>(tensor.data) % static_cast<std::uintptr_t>(size_of(tensor.dtype)) != 0) {
    refuse_tensor("it must start at a multiple of its element's " + std::to_string(size_of(tensor.dtype)) + " bytes");
  }
}

}  // namespace tokenyard::communication
