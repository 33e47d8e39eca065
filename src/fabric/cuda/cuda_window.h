// SPDX-License-Identifier: Apache-2.0
// Windows in GPU memory, reached by loads and stores over NVLink or PCIe: memory of the driver's virtual memory API,
// mapped by each rank for its own device, from handles between ranks of one process and from descriptors between
// processes of one host. Several ranks may share a device. With WindowRequest::allow_mapped_host the windows lie in
// pinned host memory instead. A window's memory lives until the last rank that maps it lets go.
// `own` and `peer` are addresses for the device's loads and stores, also in copies by the CUDA runtime.
#pragma once

#include <memory>

#include "fabric/window.h"

namespace tokenyard::fabric::cuda {

// Leaves the calling thread's current device and context as they are.
std::unique_ptr<Window> allocate_cuda_window(const WindowRequest& request);
// Initialises the driver, after which this process must not fork ranks that use CUDA.
Support probe_cuda_fabric();

inline constexpr FabricInfo kCudaFabric{
    .name = "cuda",
    .description = "GPU memory of one host, by peer access over NVLink or PCIe",
    .kind = DeviceKind::kCuda,
    .probe = probe_cuda_fabric,
    .allocate = allocate_cuda_window,
};

}  // namespace tokenyard::fabric::cuda
