// SPDX-License-Identifier: Apache-2.0
// Rows of an expert-major dispatch on their way: as they are, or cast to blocks of fp8. A row is loaded before it is
// known where it goes, and then stored to all of its ranks.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "engine/cuda/copies.cuh"
#include "engine/cuda/expert_tasks.h"
#include "engine/cuda/routing.cuh"
#include "engine/cuda/windows.cuh"
#include "protocol/block_cast.h"

namespace tokenyard::engine::cuda {

// Where the token's row of a plane lies in each receiver's window.
__device__ __forceinline__ std::int64_t place_of(const ExpertDispatchTask& task,
                                                 const Lane& lane,
                                                 std::uint32_t epoch,
                                                 std::int64_t token) {
  const protocol::WindowLayout& layout = task.common.layout;
  return layout.payload(task.common.rank, protocol::slot_of(epoch, kExpertDepth)) + lane.offset + token * lane.stride;
}

// Where a sender's threads store the row of a token: to the window of every rank that it goes to,
class RowToWindows {
 public:
  __device__ RowToWindows(const ExpertDispatchTask& task,
                          std::int64_t token,
                          std::uint32_t epoch,
                          const TokenOfBlock& to)
      : common_(task.common),
        to_(to),
        values_(place_of(task, task.values, epoch, token)),
        scales_(place_of(task, task.scales, epoch, token)) {}

  template <class Value>
  __device__ void values(int index, const Value& value) const {
    store(values_, index, value);
  }

  template <class Value>
  __device__ void scales(int index, const Value& value) const {
    store(scales_, index, value);
  }

 private:
  template <class Value>
  __device__ void store(std::int64_t place, int index, const Value& value) const {
    for (int d = 0; d < to_.num_destinations; ++d)
      reinterpret_cast<Value*>(window_of(common_, to_.destinations[d]) + place)[index] = value;
  }

  const Common& common_;
  const TokenOfBlock& to_;
  std::int64_t values_;
  std::int64_t scales_;
};

// or to the block's shared memory, as it crosses in lines.
class RowToShared {
 public:
  __device__ RowToShared(const ExpertDispatchTask& task, std::byte* row)
      : values_(row), scales_(row + task.row.scales_at()) {}

  template <class Value>
  __device__ void values(int index, const Value& value) const {
    reinterpret_cast<Value*>(values_)[index] = value;
  }

  template <class Value>
  __device__ void scales(int index, const Value& value) const {
    reinterpret_cast<Value*>(scales_)[index] = value;
  }

 private:
  std::byte* values_;
  std::byte* scales_;
};

class PlainRow {
 public:
  __device__ void load(const ExpertDispatchTask& task, std::int64_t token) {
    const Lane& lane = task.values;
    if (lane.unit != 16) return;
    const auto* from = reinterpret_cast<const uint4*>(lane.from + token * lane.from_stride);
    const auto n = static_cast<int>(lane.row_bytes / 16);
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int i = static_cast<int>(threadIdx.x) + k * kThreads;
      if (i < n) units_[k] = from[i];
    }
  }

  template <class Sink>
  __device__ void store(const ExpertDispatchTask& task, std::int64_t token, const Sink& sink) const {
    const Lane& lane = task.values;
    const Lane& scales = task.scales;
    const Crew crew{static_cast<int>(threadIdx.x), kThreads};
    if (scales.row_bytes > 0) {
      move_row(scales.from + token * scales.from_stride, scales.row_bytes, scales.unit, crew,
               [&](int i, auto value) { sink.scales(i, value); });
    }
    const std::byte* row = lane.from + token * lane.from_stride;
    if (lane.unit != 16)
      return move_row(row, lane.row_bytes, lane.unit, crew, [&](int i, auto value) { sink.values(i, value); });
    const auto* from = reinterpret_cast<const uint4*>(row);
    const auto n = static_cast<int>(lane.row_bytes / 16);
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int i = static_cast<int>(threadIdx.x) + k * kThreads;
      if (i < n) sink.values(i, units_[k]);
    }
    for (int i = static_cast<int>(threadIdx.x) + kAtOnce * kThreads; i < n; i += kThreads)
      sink.values(i, from[i]);
  }

 private:
  static constexpr int kAtOnce = 4;

  uint4 units_[kAtOnce];  // NOLINT(modernize-avoid-c-arrays): device code
};

// A thread casts 16 values at a time, so that eight of them share a scale and a warp has four.
template <class From>
class CastRow {
 public:
  __device__ void load(const ExpertDispatchTask& task, std::int64_t token) {
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
      load_values(task, token, static_cast<int>(threadIdx.x) + k * kThreads, raw_[k]);
  }

  template <class Sink>
  __device__ void store(const ExpertDispatchTask& task, std::int64_t token, const Sink& sink) const {
    const auto units = static_cast<int>(protocol::ceil_div(task.values.row_bytes, kValues));
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (k * kThreads < units) store_values(task, static_cast<int>(threadIdx.x) + k * kThreads, raw_[k], sink);
    }
    for (int first = kAtOnce * kThreads; first < units; first += kThreads) {
      Raw raw;
      load_values(task, token, first + static_cast<int>(threadIdx.x), raw);
      store_values(task, first + static_cast<int>(threadIdx.x), raw, sink);
    }
  }

 private:
  using Bits = typename From::Bits;
  static constexpr int kValues = 16;
  static constexpr int kVectors = kValues * static_cast<int>(sizeof(Bits)) / 16;
  static constexpr int kAtOnce = 4 / kVectors;
  static constexpr int kLanes = static_cast<int>(protocol::kCastBlock) / kValues;  // that share a scale
  static constexpr int kScales = kWarp / kLanes;

  struct alignas(16) Raw {
    Bits bits[kValues];  // NOLINT(modernize-avoid-c-arrays): device code
  };

  // Values behind the row's end are 0, which changes no scale.
  static __device__ void load_values(const ExpertDispatchTask& task, std::int64_t token, int index, Raw& raw) {
    const std::byte* row = task.values.from + token * task.values.from_stride;
    const auto n = static_cast<int>(task.values.row_bytes);
    const int first = index * kValues;
    if (task.values.unit == 16 && first + kValues <= n) {
      raw = reinterpret_cast<const Raw*>(row)[index];
      return;
    }
#pragma unroll
    for (int i = 0; i < kValues; ++i)
      raw.bits[i] = first + i < n ? reinterpret_cast<const Bits*>(row)[first + i] : Bits{0};
  }

  // By whole warps.
  template <class Sink>
  static __device__ void store_values(const ExpertDispatchTask& task, int index, const Raw& raw, const Sink& sink) {
    std::uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kValues; ++i)
      largest = max(largest, protocol::finite_magnitude(protocol::decode<From>(raw.bits[i])));
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2)
      largest = max(largest, __shfl_xor_sync(kAllLanes, largest, step));
    const float scale = protocol::block_scale(task.cast, largest);
    const float inverse = 1.0F / scale;
    std::uint32_t words[4] = {};  // NOLINT(modernize-avoid-c-arrays): device code
#pragma unroll
    for (int i = 0; i < kValues; i += 2) {
      // As protocol::cast_to_block: the product is rounded, then saturates; NaN becomes 0x7F.
      const float2 pair = make_float2(__fmul_rn(protocol::decode<From>(raw.bits[i]), inverse),
                                      __fmul_rn(protocol::decode<From>(raw.bits[i + 1]), inverse));
      const std::uint32_t codes = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
      words[i / 4] |= codes << (8 * (i % 4));
    }
    const bool there = index * kValues < static_cast<int>(task.values.row_bytes);
    // The stride of the wire's rows has room for whole units.
    if (there) sink.values(index, make_uint4(words[0], words[1], words[2], words[3]));
    store_scales(task.cast, index, there ? scale : 0.0F, sink);
  }

  // A warp's four scales together; 0 behind the row's end.
  template <class Sink>
  static __device__ void store_scales(DispatchCast cast, int index, float scale, const Sink& sink) {
    const bool packed = cast == DispatchCast::kFp8Block128Ue8m0;
    const std::uint32_t own = packed ? protocol::encode_e8m0(scale) : __float_as_uint(scale);
    std::uint32_t all[kScales];  // NOLINT(modernize-avoid-c-arrays): device code
#pragma unroll
    for (int i = 0; i < kScales; ++i)
      all[i] = __shfl_sync(kAllLanes, own, i * kLanes);
    if (lane_index() != 0 || scale == 0.0F) return;
    if (packed) {
      sink.scales(index / kWarp, all[0] | all[1] << 8 | all[2] << 16 | all[3] << 24);
    } else {
      sink.scales(index / kWarp, make_uint4(all[0], all[1], all[2], all[3]));
    }
  }

  Raw raw_[kAtOnce];  // NOLINT(modernize-avoid-c-arrays): device code
};

// Where a part of a row goes: `offset` bytes into the row at each place.
struct Places {
  std::byte* const* rows = nullptr;
  int count = 0;
  int offset = 0;
};

// Units are loaded before the first is stored.
template <class Unit>
__device__ void copy_units(const Places& to, const std::byte* from, int bytes, Crew crew) {
  constexpr int kAtOnce = 4;
  const auto* units = reinterpret_cast<const Unit*>(from);
  const int n = bytes / static_cast<int>(sizeof(Unit));
  for (int first = crew.index; first < n; first += kAtOnce * crew.count) {
    Unit values[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (first + k * crew.count < n) values[k] = units[first + k * crew.count];
    }
    for (int place = 0; place < to.count; ++place) {
      auto* row = reinterpret_cast<Unit*>(to.rows[place] + to.offset);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (first + k * crew.count < n) row[first + k * crew.count] = values[k];
      }
    }
  }
}

// `unit` bytes divide all of it.
__device__ inline void copy_to_places(const Places& to, const std::byte* from, int bytes, int unit, Crew crew) {
  switch (unit) {
    case 16:
      return copy_units<uint4>(to, from, bytes, crew);
    case 8:
      return copy_units<uint2>(to, from, bytes, crew);
    case 4:
      return copy_units<std::uint32_t>(to, from, bytes, crew);
    case 2:
      return copy_units<std::uint16_t>(to, from, bytes, crew);
    default:
      return copy_units<std::uint8_t>(to, from, bytes, crew);
  }
}

}  // namespace tokenyard::engine::cuda
