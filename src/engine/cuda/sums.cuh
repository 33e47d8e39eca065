// SPDX-License-Identifier: Apache-2.0
// Sums of rows in fp32, several values a thread, each addition rounded on its own.
#pragma once

#include <cstddef>
#include <cstdint>

#include "protocol/casts.h"

namespace tokenyard::engine::cuda {

inline constexpr int kRowsAtOnce = 8;

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

// Pack `index` of each row, in order.
template <class From, int N>
__device__ void add_rows(float (&sums)[N], const std::byte* const* rows, int count, int index) {
  for (int first = 0; first < count; first += kRowsAtOnce) {
    Pack<From, N> packs[kRowsAtOnce];
    // All loads before the first addition: they cross the link.
#pragma unroll
    for (int k = 0; k < kRowsAtOnce; ++k) {
      if (first + k < count) packs[k] = reinterpret_cast<const Pack<From, N>*>(rows[first + k])[index];
    }
#pragma unroll
    for (int k = 0; k < kRowsAtOnce; ++k) {
      if (first + k < count) add_pack<From, N>(sums, packs[k]);
    }
  }
}

// Rounds once.
template <class To, int N>
__device__ void store_pack(std::byte* row, int index, const float (&sums)[N]) {
  Pack<To, N> output;
#pragma unroll
  for (int i = 0; i < N; ++i)
    output.bits[i] = protocol::encode<To>(sums[i]);
  reinterpret_cast<Pack<To, N>*>(row)[index] = output;
}

}  // namespace tokenyard::engine::cuda
