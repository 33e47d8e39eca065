// SPDX-License-Identifier: Apache-2.0
// Units that tell of their own arrival, as kernels store and load them.
#pragma once

#include <cstdint>

#include "engine/cuda/tagged_units.h"
#include "engine/cuda/verbs.cuh"

namespace tokenyard::engine::cuda {

// 8 bytes are seen as a whole or not at all, 16 are not.
struct TaggedUnit {
  std::uint32_t words[kTaggedWords];  // NOLINT(modernize-avoid-c-arrays): device code
};

__device__ __forceinline__ void store_tagged(std::byte* to, const TaggedUnit& unit, std::uint32_t tag) {
  const std::uint64_t high = static_cast<std::uint64_t>(tag) << 32;
  store_pair_system(to, {high | unit.words[0], high | unit.words[1]});
}

// Whether the unit is there.
__device__ __forceinline__ bool load_tagged(const std::byte* from, std::uint32_t tag, TaggedUnit& unit) {
  const Pair pair = load_pair_system(from);
  unit = {{static_cast<std::uint32_t>(pair.first), static_cast<std::uint32_t>(pair.second)}};
  return static_cast<std::uint32_t>(pair.first >> 32) == tag && static_cast<std::uint32_t>(pair.second >> 32) == tag;
}

}  // namespace tokenyard::engine::cuda
