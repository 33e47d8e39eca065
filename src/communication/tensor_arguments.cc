// SPDX-License-Identifier: Apache-2.0
// Checks of one tensor, whatever it is for.
#include <algorithm>
#include <cstdint>
#include <string>

#include "tokenyard/error.h"

#include "communication/arguments.h"

namespace tokenyard::communication {
namespace {

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

// All host memory is alike, whatever number a tensor gives its host.
bool is_on(Device device, const TensorView& tensor) {
  return device.kind == DeviceKind::kCpu ? tensor.device.kind == DeviceKind::kCpu : tensor.device == device;
}

std::string place_of(Device device) {
  return device.kind == DeviceKind::kCpu ? "in host memory" : "on cuda:" + std::to_string(device.index);
}

bool aligned(const TensorView& tensor) {
  return reinterpret_cast<std::uintptr_t>(tensor.data) % static_cast<std::uintptr_t>(size_of(tensor.dtype)) == 0;
}

}  // namespace

// A view is plain data, so any number may stand in it. The messages do without TensorView::describe, which multiplies.
void check_tensor(const TensorView& tensor, std::string_view what) {
  const auto refuse_tensor = [&](const std::string& reason) { refuse(std::string(what) + " has " + reason); };
  if (tensor.num_dims < 0 || tensor.num_dims > kMaxDims) {
    refuse_tensor(std::to_string(tensor.num_dims) + " dimensions; a tensor has 1 to " + std::to_string(kMaxDims));
  }
  if (tensor.dtype > Dtype::kI64) {
    refuse_tensor("dtype " + std::to_string(static_cast<int>(tensor.dtype)) + "; it must be one of Dtype's names");
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

void check_tensors(const DispatchInput& input) {
  check_tensor(input.hidden_states, "hidden_states");
  check_tensor(input.hidden_states_scale, "hidden_states_scale");
  check_tensor(input.topk_ids, "topk_ids");
  check_tensor(input.topk_weights, "topk_weights");
  check_tensor(input.router_logits, "router_logits");
  check_tensor(input.eplb_local_stats, "eplb_local_stats");
  for (const TensorView& extra : input.extra_payloads)
    check_tensor(extra, "one of extra_payloads");
}

namespace {

// Memory whose first `outer` dimensions (one or two) may have any strides that keep rows apart.
void check_memory(const Limits& limits, const TensorView& tensor, std::string_view what, int outer) {
  const auto refuse_tensor = [&](const std::string& reason) {
    refuse(std::string(what) + " is " + tensor.describe() + "; " + reason);
  };
  if (!is_on(limits.device, tensor)) refuse_tensor("it must be " + place_of(limits.device));
  std::int64_t covered = 1;
  for (int i = tensor.num_dims - 1; i >= outer; --i) {
    const auto at = static_cast<std::size_t>(i);
    if (tensor.shape[at] != 1 && tensor.strides[at] != covered) {
      refuse_tensor("the elements of a row must be contiguous");
    }
    covered *= tensor.shape[at];
  }
  if (tensor.num_elements() == 0) return;
  if (tensor.data == nullptr) refuse_tensor("it has no memory");
  // From the dimension with the shorter steps on, each must step over all that lies inside one of its steps.
  const bool blocks_first = outer == 2 && tensor.strides[0] < tensor.strides[1];
  for (int i = 0; i < outer; ++i) {
    const auto at = static_cast<std::size_t>(blocks_first ? i : outer - 1 - i);
    if (tensor.strides[at] < 0 || (tensor.shape[at] > 1 && tensor.strides[at] < covered)) {
      refuse_tensor("rows must not overlap or run backwards");
    }
    covered += (tensor.shape[at] - 1) * tensor.strides[at];
  }
  if (!aligned(tensor)) {
    refuse_tensor("it must start at a multiple of its element's " + std::to_string(size_of(tensor.dtype)) + " bytes");
  }
}

}  // namespace

void check_rows(const Limits& limits, const TensorView& tensor, std::string_view what, std::int64_t num_rows) {
  if (tensor.num_rows() != num_rows) {
    refuse(std::string(what) + " is " + tensor.describe() + "; it must have " + std::to_string(num_rows) + " rows");
  }
  check_memory(limits, tensor, what, 1);
}

void check_blocks(const Limits& limits, const TensorView& tensor, std::string_view what) {
  check_memory(limits, tensor, what, 2);
}

void check_list(
    const Limits& limits, const TensorView& tensor, std::string_view what, Dtype dtype, std::int64_t entries) {
  check_tensor(tensor, what);
  if (!tensor.defined()) return;
  const bool right = tensor.dtype == dtype && tensor.num_dims == 1 && tensor.shape[0] == entries &&
                     tensor.contiguous() && (tensor.data != nullptr || entries == 0) && aligned(tensor) &&
                     is_on(limits.device, tensor);
  if (right) return;
  std::string message(what);
  message.append(" is ").append(tensor.describe()).append("; it must be a contiguous ").append(name(dtype));
  refuse(message.append("[")
             .append(std::to_string(entries))
             .append("] ")
             .append(place_of(limits.device))
             .append(", aligned as its elements are"));
}

}  // namespace tokenyard::communication
