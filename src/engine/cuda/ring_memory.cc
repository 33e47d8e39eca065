// SPDX-License-Identifier: Apache-2.0
#include "engine/cuda/kernels.h"

namespace tokenyard::engine::cuda {

bool make_room_for_ring(const void* kernel, int bytes) {
  int device = 0;
  int major = 0;
  int most_shared = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  check(cudaDeviceGetAttribute(&most_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
        "cudaDeviceGetAttribute");
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, kernel), "loading a kernel");
  if (major < 9 || static_cast<int>(attributes.sharedSizeBytes) + bytes > most_shared) return false;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "loading a kernel");
  return true;
}

}  // namespace tokenyard::engine::cuda
