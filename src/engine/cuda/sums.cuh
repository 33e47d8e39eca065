// SPDX-License-Identifier: Apache-2.0
// The arithmetic of combine: values in the formats of the wire and of tensors, and their sums, of which each addition
// is rounded on its own.
#pragma once

#include "protocol/casts.h"

namespace tokenyard::engine::cuda {

// N values of consecutive elements, at most 16 bytes of the wire.
template <class Format, int N>
struct alignas(sizeof(typename Format::Bits) * N) Pack {
  typename Format::Bits bits[N];
};

template <class Format, int N>
__device__ void add_pack(float (&sums)[N], const Pack<Format, N>& pack) {
#pragma unroll
  for (int i = 0; i < N; ++i)
    sums[i] = __fadd_rn(sums[i], protocol::decode<Format>(pack.bits[i]));
}

template <class Format, int N>
__device__ Pack<Format, N> round_sums(const float (&sums)[N]) {
  Pack<Format, N> pack;
#pragma unroll
  for (int i = 0; i < N; ++i)
    pack.bits[i] = protocol::encode<Format>(sums[i]);
  return pack;
}

}  // namespace tokenyard::engine::cuda
