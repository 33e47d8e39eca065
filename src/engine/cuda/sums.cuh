// SPDX-License-Identifier: Apache-2.0
// The arithmetic of combine: values in the formats of the wire and of tensors, their casts, and their sums, of which
// each addition is rounded on its own.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "engine/cuda/copies.cuh"
#include "protocol/casts.h"

namespace tokenyard::engine::cuda {

// As many values as make 16 bytes of the wider of the two formats.
template <class From, class To>
inline constexpr int kPackOf = 16 / static_cast<int>(std::max(sizeof(typename From::Bits), sizeof(typename To::Bits)));

// N values of consecutive elements, at most 16 bytes of the wire.
template <class Format, int N>
struct alignas(sizeof(typename Format::Bits) * N) Pack {
  typename Format::Bits bits[N];
};

// The two values in a word are fp32's upper halves: one instruction each.
template <int N>
__device__ void add_halves(float (&sums)[N], const Pack<protocol::Bf16, N>& pack) {
  struct Words {
    std::uint32_t of[N / 2];
  };

  const auto words = protocol::cast_bits<Words>(pack);
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    sums[2 * i] = __fadd_rn(sums[2 * i], protocol::cast_bits<float>(words.of[i] << 16));
    sums[2 * i + 1] = __fadd_rn(sums[2 * i + 1], protocol::cast_bits<float>(words.of[i] & 0xFFFF0000U));
  }
}

template <class Format, int N>
__device__ void add_pack(float (&sums)[N], Pack<Format, N> pack) {
  if constexpr (std::is_same_v<Format, protocol::Bf16> && N % 2 == 0) {
    add_halves<N>(sums, pack);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i)
      sums[i] = __fadd_rn(sums[i], protocol::decode<Format>(pack.bits[i]));
  }
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
