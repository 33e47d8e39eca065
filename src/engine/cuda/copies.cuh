// SPDX-License-Identifier: Apache-2.0
// Copies of rows by the threads of a warp or block, in units as wide as addresses allow.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/cuda/tasks.h"

namespace tokenyard::engine::cuda {

// The threads that share a row: `index` of `count`.
struct Crew {
  int index = 0;
  int count = 1;
};

template <class Unit, class Store>
__device__ void move_units(const std::byte* from, std::int64_t bytes, Crew crew, const Store& store) {
  constexpr int kAtOnce = 4;
  const auto* units = reinterpret_cast<const Unit*>(from);
  const auto n = static_cast<int>(bytes / static_cast<std::int64_t>(sizeof(Unit)));
  int i = crew.index;
  for (; i + (kAtOnce - 1) * crew.count < n; i += kAtOnce * crew.count) {
    Unit values[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
      values[k] = units[i + k * crew.count];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
      store(i + k * crew.count, values[k]);
  }
  for (; i < n; i += crew.count)
    store(i, units[i]);
}

// Calls store(index, value) for each unit of the row. `unit` bytes divide the row's address and size.
template <class Store>
__device__ void move_row(const std::byte* from, std::int64_t bytes, int unit, Crew crew, const Store& store) {
  switch (unit) {
    case 16:
      return move_units<uint4>(from, bytes, crew, store);
    case 8:
      return move_units<uint2>(from, bytes, crew, store);
    case 4:
      return move_units<std::uint32_t>(from, bytes, crew, store);
    case 2:
      return move_units<std::uint16_t>(from, bytes, crew, store);
    default:
      return move_units<std::uint8_t>(from, bytes, crew, store);
  }
}

__device__ inline void copy_row(std::byte* to, const std::byte* from, std::int64_t bytes, int unit, Crew crew) {
  move_row(from, bytes, unit, crew, [to](int i, auto value) { reinterpret_cast<decltype(value)*>(to)[i] = value; });
}

// Rows that lie `stride` apart.
template <class Byte>
struct RowsAt {
  Byte* first;
  std::int64_t stride;
};

// By one warp: those of up to 64 rows whose bit is set. Of narrow ones several at a time, for a row takes a round trip
// to memory.
__device__ inline void copy_rows(
    RowsAt<std::byte> to, RowsAt<const std::byte> from, std::int64_t row_bytes, int unit, std::uint64_t rows) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const auto share = static_cast<int>(min(row_bytes / unit, std::int64_t{kWarp}));  // lanes of a row
  const int at_once = kWarp / share;
  if (lane >= at_once * share) return;
  for (int row = lane / share; row < 64 && rows >> row != 0; row += at_once) {
    if ((rows >> row & 1U) == 0) continue;
    copy_row(to.first + row * to.stride, from.first + row * from.stride, row_bytes, unit, {lane % share, share});
  }
}

}  // namespace tokenyard::engine::cuda
