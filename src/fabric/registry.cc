// SPDX-License-Identifier: Apache-2.0
#include <array>

#include "fabric/host/host_window.h"
#include "fabric/window.h"

namespace tokenyard::fabric {

std::span<const FabricInfo> fabrics() {
  static constexpr std::array kFabrics{
      host::kHostFabric,
  };
  return kFabrics;
}

}  // namespace tokenyard::fabric
