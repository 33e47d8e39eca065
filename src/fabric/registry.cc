// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>

#include "tokenyard/error.h"

#include "fabric/host/host_window.h"
#include "fabric/window.h"
#ifdef TOKENYARD_CUDA
  #include "fabric/cuda/cuda_window.h"
#endif

namespace tokenyard::fabric {

std::span<const FabricInfo> fabrics() {
  static constexpr std::array kFabrics{
      host::kHostFabric,
#ifdef TOKENYARD_CUDA
      cuda::kCudaFabric,
#endif
  };
  return kFabrics;
}

const FabricInfo& find_fabric(DeviceKind kind) {
  const auto found = std::ranges::find(fabrics(), kind, &FabricInfo::kind);
  if (found != fabrics().end()) return *found;
  throw Error(ErrorCode::kUnsupported,
              kind == DeviceKind::kCuda
                  ? "no windows in GPU memory, for this was built without CUDA: configure with TOKENYARD_CUDA=ON"
                  : "this build has no fabric for host memory; src/fabric/registry.cc lists those it has");
}

}  // namespace tokenyard::fabric
