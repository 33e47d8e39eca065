// SPDX-License-Identifier: Apache-2.0
// The arithmetic of combine: values in the formats of the wire and of tensors, their casts, and their sums, of which
// each addition is rounded on its own.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/cuda/copies.cuh"
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

// A row of n values, each rounded once.
template <class Wire, class From>
__device__ void cast_row(std::byte* to, const std::byte* from, std::int64_t n, Crew crew) {
  for (std::int64_t i = crew.index; i < n; i += crew.count) {
    const float value = protocol::decode<From>(reinterpret_cast<const typename From::Bits*>(from)[i]);
    reinterpret_cast<typename Wire::Bits*>(to)[i] = protocol::encode<Wire>(value);
  }
}

template <class Wire>
__device__ void cast_row_of(Dtype dtype, std::byte* to, const std::byte* from, std::int64_t n, Crew crew) {
  switch (dtype) {
    case Dtype::kBf16:
      return cast_row<Wire, protocol::Bf16>(to, from, n, crew);
    case Dtype::kF16:
      return cast_row<Wire, protocol::F16>(to, from, n, crew);
    default:
      return cast_row<Wire, protocol::F32>(to, from, n, crew);
  }
}

}  // namespace tokenyard::engine::cuda
