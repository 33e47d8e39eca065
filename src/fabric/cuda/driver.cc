// SPDX-License-Identifier: Apache-2.0
#include "fabric/cuda/driver.h"

#include <unistd.h>

#include "tokenyard/error.h"

namespace tokenyard::fabric::cuda {
namespace {

std::string failure_text(std::string_view call, std::string_view about, const std::string& reason) {
  return std::string(call).append(about.empty() ? "" : " ").append(about).append(" failed: ").append(reason);
}

// Versions are CUDA's own numbers: 11.4 is 11040.
template <class Function>
void load(Function& function, const char* symbol, unsigned version) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(symbol, &address, version, cudaEnableDefault, &found);
  if (error != cudaSuccess) {
    static_cast<void>(cudaGetLastError());  // else the caller's next check would find it
    throw Error(ErrorCode::kUnsupported, "there is no CUDA driver, or none that a runtime of CUDA " +
                                             std::to_string(CUDART_VERSION / 1000) + "." +
                                             std::to_string(CUDART_VERSION % 1000 / 10) +
                                             " can use: " + failure_text("looking up", symbol, error_text(error)));
  }
  if (found != cudaDriverEntryPointSuccess || address == nullptr) {
    throw Error(ErrorCode::kUnsupported, "the CUDA driver has no " + std::string(symbol) + " of version " +
                                             std::to_string(version) + " or newer; it is too old");
  }
  function = reinterpret_cast<Function>(address);
}

void load_devices(Driver& cu) {
  load(cu.init, "cuInit", 2000);
  load(cu.device_get_count, "cuDeviceGetCount", 2000);
  load(cu.device_get, "cuDeviceGet", 2000);
  load(cu.device_get_name, "cuDeviceGetName", 2000);
  load(cu.device_get_uuid, "cuDeviceGetUuid", 11040);
  load(cu.device_get_pci_bus_id, "cuDeviceGetPCIBusId", 4010);
  load(cu.device_get_attribute, "cuDeviceGetAttribute", 2000);
  load(cu.device_total_mem, "cuDeviceTotalMem", 3020);
  load(cu.device_can_access_peer, "cuDeviceCanAccessPeer", 4000);
  load(cu.primary_ctx_retain, "cuDevicePrimaryCtxRetain", 7000);
  load(cu.primary_ctx_release, "cuDevicePrimaryCtxRelease", 11000);
  load(cu.ctx_push_current, "cuCtxPushCurrent", 4000);
  load(cu.ctx_pop_current, "cuCtxPopCurrent", 4000);
  load(cu.stream_create, "cuStreamCreate", 2000);
  load(cu.stream_destroy, "cuStreamDestroy", 4000);
  load(cu.stream_synchronize, "cuStreamSynchronize", 2000);
}

void load_memory(Driver& cu) {
  load(cu.memset_d8_async, "cuMemsetD8Async", 3020);
  load(cu.mem_get_allocation_granularity, "cuMemGetAllocationGranularity", 10020);
  load(cu.mem_create, "cuMemCreate", 10020);
  load(cu.mem_release, "cuMemRelease", 10020);
  load(cu.mem_address_reserve, "cuMemAddressReserve", 10020);
  load(cu.mem_address_free, "cuMemAddressFree", 10020);
  load(cu.mem_map, "cuMemMap", 10020);
  load(cu.mem_unmap, "cuMemUnmap", 10020);
  load(cu.mem_set_access, "cuMemSetAccess", 10020);
  load(cu.mem_export_to_shareable_handle, "cuMemExportToShareableHandle", 10020);
  load(cu.mem_import_from_shareable_handle, "cuMemImportFromShareableHandle", 10020);
  load(cu.mem_host_register, "cuMemHostRegister", 6050);
  load(cu.mem_host_unregister, "cuMemHostUnregister", 4000);
  load(cu.mem_host_get_device_pointer, "cuMemHostGetDevicePointer", 3020);
}

Driver load_driver() {
  Driver cu;
  load(cu.get_error_name, "cuGetErrorName", 6000);
  load(cu.get_error_string, "cuGetErrorString", 6000);
  load_devices(cu);
  load_memory(cu);
  const CUresult started = cu.init(0);
  if (started != CUDA_SUCCESS) {
    throw Error(ErrorCode::kUnsupported, failure_text("cuInit", {}, error_text(cu, started)));
  }
  cu.process = ::getpid();
  return cu;
}

}  // namespace

const Driver& driver() {
  static const Driver cu = load_driver();  // tried again by the next call when it throws
  if (cu.process != ::getpid()) {
    throw Error(ErrorCode::kUnsupported, "CUDA was initialised in process " + std::to_string(cu.process) +
                                             " before that forked this one, " + std::to_string(::getpid()) +
                                             ", where it cannot be used; fork first");
  }
  return cu;
}

std::string error_text(const Driver& cu, CUresult result) {
  const char* name = nullptr;
  const char* text = nullptr;
  const bool known =
      cu.get_error_name(result, &name) == CUDA_SUCCESS && cu.get_error_string(result, &text) == CUDA_SUCCESS;
  const std::string number = std::to_string(static_cast<int>(result));
  if (!known || name == nullptr || text == nullptr) return "CUDA error " + number;
  return std::string(name).append(" (").append(number).append("): ").append(text);
}

std::string error_text(cudaError_t error) {
  return std::string(cudaGetErrorName(error)) + " (" + std::to_string(static_cast<int>(error)) +
         "): " + cudaGetErrorString(error);
}

namespace {

// The driver's and the runtime's numbers are the same.
[[noreturn]] void fail(int number, const std::string& text) {
  if (number >= cudaErrorStreamCaptureUnsupported && number <= cudaErrorStreamCaptureWrongThread) {
    throw Error(ErrorCode::kInvalidState,
                text +
                    "; inside a stream capture only rounds can be recorded: make, grow, reset and destroy a "
                    "communication outside of it");
  }
  throw Error(number == cudaErrorNotSupported ? ErrorCode::kUnsupported : ErrorCode::kSystem, text);
}

}  // namespace

void require(const Driver& cu, CUresult result, std::string_view call, std::string_view about) {
  if (result != CUDA_SUCCESS) fail(static_cast<int>(result), failure_text(call, about, error_text(cu, result)));
}

void require(cudaError_t error, std::string_view call, std::string_view about) {
  if (error != cudaSuccess) fail(static_cast<int>(error), failure_text(call, about, error_text(error)));
}

}  // namespace tokenyard::fabric::cuda
