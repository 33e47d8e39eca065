// SPDX-License-Identifier: Apache-2.0
// Checks that more than one kind of call makes.
#include <cstdint>
#include <string>

#include "tokenyard/error.h"

#include "communication/arguments.h"

namespace tokenyard::communication {

void check_num_experts(const Limits& limits, int given) {
  if (given == 0 || given == limits.params.num_experts) return;
  throw Error(ErrorCode::kInvalidArgument, "num_experts is " + std::to_string(given) +
                                               " and this communication was made for " +
                                               std::to_string(limits.params.num_experts) + "; leave it out");
}

void check_rows(const TensorView& tensor, std::string_view what, std::int64_t num_rows) {
  const auto refuse_tensor = [&](const std::string& reason) {
    throw Error(ErrorCode::kInvalidArgument, std::string(what) + " is " + tensor.describe() + "; " + reason);
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
