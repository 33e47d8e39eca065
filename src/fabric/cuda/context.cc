// SPDX-License-Identifier: Apache-2.0
#include "fabric/cuda/context.h"

#include <array>

#include "tokenyard/error.h"

namespace tokenyard::fabric::cuda {
namespace {

bool has(const Driver& cu, CUdevice device, CUdevice_attribute attribute) {
  int value = 0;
  require(cu, cu.device_get_attribute(&value, attribute, device), "cuDeviceGetAttribute");
  return value != 0;
}

CUdevice device_of(const Driver& cu, int index) {
  const int count = device_count(cu);
  if (index < 0 || index >= count) {
    throw Error(ErrorCode::kInvalidArgument, "there is no CUDA device " + std::to_string(index) +
                                                 "; this process sees " + std::to_string(count) + ", counted from 0");
  }
  CUdevice device = 0;
  require(cu, cu.device_get(&device, index), "cuDeviceGet", "of device " + std::to_string(index));
  return device;
}

}  // namespace

int device_count(const Driver& cu) {
  int count = 0;
  require(cu, cu.device_get_count(&count), "cuDeviceGetCount");
  return count;
}

std::string bus_id(const Driver& cu, CUdevice device) {
  std::array<char, 32> text{};
  require(cu, cu.device_get_pci_bus_id(text.data(), static_cast<int>(text.size()), device), "cuDeviceGetPCIBusId");
  return text.data();
}

std::string missing_for_windows(const Driver& cu, CUdevice device) {
  if (!has(cu, device, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)) return "virtual memory management";
  if (!has(cu, device, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)) {
    return "sharing of memory by POSIX file descriptors";
  }
  if (!has(cu, device, CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING)) return "one address space with the host";
  return "";
}

Context::Context(int index) : driver_(&cuda::driver()), index_(index) {
  const CUdevice device = device_of(*driver_, index);
  require(*driver_, driver_->primary_ctx_retain(&native_, device), "cuDevicePrimaryCtxRetain",
          "of device " + std::to_string(index));
  retained_ = Owned<Retained>(*driver_, device);
}

std::string Context::name() const {
  return "device " + std::to_string(index_) + " (" + bus_id(*driver_, device()) + ")";
}

CurrentContext::CurrentContext(const Context& context) {
  const Driver& cu = context.driver();
  require(cu, cu.ctx_push_current(context.native()), "cuCtxPushCurrent");
  pushed_ = Owned<Pushed>(cu, context.native());
}

}  // namespace tokenyard::fabric::cuda
