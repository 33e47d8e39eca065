// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>

#include "tokenyard/error.h"

#include "engine/engine.h"
#include "engine/host/host_engine.h"
#ifdef TOKENYARD_CUDA
  #include "engine/cuda/cuda_engine.h"
#endif

namespace tokenyard::engine {

std::span<const EngineInfo> engines() {
  static constexpr std::array kEngines{
      host::kHostEngine,
#ifdef TOKENYARD_CUDA
      cuda::kCudaEngine,
#endif
  };
  return kEngines;
}

const EngineInfo& find_engine(EngineKind kind) {
  if (kind == EngineKind::kAutomatic) return engines().front();
  const auto found = std::ranges::find(engines(), kind, &EngineInfo::kind);
  if (found != engines().end()) return *found;
  throw Error(ErrorCode::kUnsupported, "this build has no such engine; the CUDA engine needs TOKENYARD_CUDA=ON");
}

}  // namespace tokenyard::engine
