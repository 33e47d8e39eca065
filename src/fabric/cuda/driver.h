// SPDX-License-Identifier: Apache-2.0
// The CUDA driver's functions, looked up at run time so that a program starts on machines without a driver, and CUDA's
// error codes as Errors that hold the call's name and CUDA's own words.
// Thread rule: callable from any thread. Nothing is initialised before the first call of `driver`.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>
#include <sys/types.h>

#include <string>
#include <string_view>

namespace tokenyard::fabric::cuda {

// Each in the version whose signature its type has; the headers' own names are macros for versions of their choice.
struct Driver {
  PFN_cuInit_v2000 init = nullptr;
  PFN_cuDeviceGetCount_v2000 device_get_count = nullptr;
  PFN_cuDeviceGet_v2000 device_get = nullptr;
  PFN_cuDeviceGetName_v2000 device_get_name = nullptr;
  PFN_cuDeviceGetUuid_v11040 device_get_uuid = nullptr;  // tells instances of a divided device apart
  PFN_cuDeviceGetPCIBusId_v4010 device_get_pci_bus_id = nullptr;
  PFN_cuDeviceGetAttribute_v2000 device_get_attribute = nullptr;
  PFN_cuDeviceTotalMem_v3020 device_total_mem = nullptr;
  PFN_cuDeviceCanAccessPeer_v4000 device_can_access_peer = nullptr;
  PFN_cuDevicePrimaryCtxRetain_v7000 primary_ctx_retain = nullptr;
  PFN_cuDevicePrimaryCtxRelease_v11000 primary_ctx_release = nullptr;
  PFN_cuCtxPushCurrent_v4000 ctx_push_current = nullptr;
  PFN_cuCtxPopCurrent_v4000 ctx_pop_current = nullptr;
  PFN_cuStreamCreate_v2000 stream_create = nullptr;
  PFN_cuStreamDestroy_v4000 stream_destroy = nullptr;
  PFN_cuStreamSynchronize_v2000 stream_synchronize = nullptr;
  PFN_cuMemsetD8Async_v3020 memset_d8_async = nullptr;
  PFN_cuMemGetAllocationGranularity_v10020 mem_get_allocation_granularity = nullptr;
  PFN_cuMemCreate_v10020 mem_create = nullptr;
  PFN_cuMemRelease_v10020 mem_release = nullptr;
  PFN_cuMemAddressReserve_v10020 mem_address_reserve = nullptr;
  PFN_cuMemAddressFree_v10020 mem_address_free = nullptr;
  PFN_cuMemMap_v10020 mem_map = nullptr;
  PFN_cuMemUnmap_v10020 mem_unmap = nullptr;
  PFN_cuMemSetAccess_v10020 mem_set_access = nullptr;
  PFN_cuMemExportToShareableHandle_v10020 mem_export_to_shareable_handle = nullptr;
  PFN_cuMemImportFromShareableHandle_v10020 mem_import_from_shareable_handle = nullptr;
  PFN_cuMemHostRegister_v6050 mem_host_register = nullptr;
  PFN_cuMemHostUnregister_v4000 mem_host_unregister = nullptr;
  PFN_cuMemHostGetDevicePointer_v3020 mem_host_get_device_pointer = nullptr;
  PFN_cuGetErrorName_v6000 get_error_name = nullptr;
  PFN_cuGetErrorString_v6000 get_error_string = nullptr;

  pid_t process = 0;  // CUDA does not survive fork()
};

// Loads and initialises the driver at the first call. Throws kUnsupported when there is none that this build can use,
// and in a process that was forked after another had called it.
[[nodiscard]] const Driver& driver();

// "CUDA_ERROR_OUT_OF_MEMORY (2): out of memory".
[[nodiscard]] std::string error_text(const Driver& cu, CUresult result);
[[nodiscard]] std::string error_text(cudaError_t error);

// Throws unless `result` is success: "cuMemCreate of 4096 bytes failed: CUDA_ERROR_...". kUnsupported when that is what
// CUDA says, kInvalidState when a stream capture is in the way, else kSystem. `about` tells more of the call: "of 4096
// bytes".
void require(const Driver& cu, CUresult result, std::string_view call, std::string_view about = {});
void require(cudaError_t error, std::string_view call, std::string_view about = {});

}  // namespace tokenyard::fabric::cuda
