// SPDX-License-Identifier: Apache-2.0
// Rows of an expert-major dispatch on their way: as they are, or cast to blocks of fp8. A row is loaded before it is
// known where it goes, and then stored to all of its ranks.
#pragma once

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

template <class Value>
__device__ void store_to_all(
    const Common& common, const TokenOfBlock& to, std::int64_t place, int index, const Value& value) {
  for (int d = 0; d < to.num_destinations; ++d)
    reinterpret_cast<Value*>(window_of(common, to.destinations[d]) + place)[index] = value;
}

__device__ inline void send_lane(
    const ExpertDispatchTask& task, const Lane& lane, std::int64_t token, std::uint32_t epoch, const TokenOfBlock& to) {
  const std::int64_t place = place_of(task, lane, epoch, token);
  const Crew crew{static_cast<int>(threadIdx.x), kThreads};
  move_row(lane.from + token * lane.from_stride, lane.row_bytes, lane.unit, crew,
           [&](int i, auto value) { store_to_all(task.common, to, place, i, value); });
}

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

  __device__ void store(const ExpertDispatchTask& task,
                        std::int64_t token,
                        std::uint32_t epoch,
                        const TokenOfBlock& to) const {
    const Lane& lane = task.values;
    if (task.scales.row_bytes > 0) send_lane(task, task.scales, token, epoch, to);
    if (lane.unit != 16) return send_lane(task, lane, token, epoch, to);
    const std::int64_t place = place_of(task, lane, epoch, token);
    const auto* from = reinterpret_cast<const uint4*>(lane.from + token * lane.from_stride);
    const auto n = static_cast<int>(lane.row_bytes / 16);
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int i = static_cast<int>(threadIdx.x) + k * kThreads;
      if (i < n) store_to_all(task.common, to, place, i, units_[k]);
    }
    for (int i = static_cast<int>(threadIdx.x) + kAtOnce * kThreads; i < n; i += kThreads)
      store_to_all(task.common, to, place, i, from[i]);
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

  __device__ void store(const ExpertDispatchTask& task,
                        std::int64_t token,
                        std::uint32_t epoch,
                        const TokenOfBlock& to) const {
    const Target target{task, to, place_of(task, task.values, epoch, token),
                        place_of(task, task.scales, epoch, token)};
    const auto units = static_cast<int>(protocol::ceil_div(task.values.row_bytes, kValues));
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (k * kThreads < units) store_values(target, static_cast<int>(threadIdx.x) + k * kThreads, raw_[k]);
    }
    for (int first = kAtOnce * kThreads; first < units; first += kThreads) {
      Raw raw;
      load_values(task, token, first + static_cast<int>(threadIdx.x), raw);
      store_values(target, first + static_cast<int>(threadIdx.x), raw);
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

  struct Target {
    const ExpertDispatchTask& task;
    const TokenOfBlock& to;
    std::int64_t values;
    std::int64_t scales;
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
  static __device__ void store_values(const Target& target, int index, const Raw& raw) {
    std::uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kValues; ++i)
      largest = max(largest, protocol::finite_magnitude(protocol::decode<From>(raw.bits[i])));
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2)
      largest = max(largest, __shfl_xor_sync(kAllLanes, largest, step));
    const float scale = protocol::block_scale(target.task.cast, largest);
    const float inverse = 1.0F / scale;
    std::uint32_t words[4] = {};  // NOLINT(modernize-avoid-c-arrays): device code
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const std::uint32_t code = protocol::cast_to_block(protocol::decode<From>(raw.bits[i]), inverse);
      words[i / 4] |= code << (8 * (i % 4));
    }
    const bool there = index * kValues < static_cast<int>(target.task.values.row_bytes);
    // The stride of the wire's rows has room for whole units.
    if (there) {
      store_to_all(target.task.common, target.to, target.values, index,
                   make_uint4(words[0], words[1], words[2], words[3]));
    }
    store_scales(target, index, scale, there);
  }

  // A warp's four scales together.
  static __device__ void store_scales(const Target& target, int index, float scale, bool there) {
    const bool packed = target.task.cast == DispatchCast::kFp8Block128Ue8m0;
    const std::uint32_t own = packed ? protocol::encode_e8m0(scale) : __float_as_uint(scale);
    std::uint32_t all[kScales];  // NOLINT(modernize-avoid-c-arrays): device code
#pragma unroll
    for (int i = 0; i < kScales; ++i)
      all[i] = __shfl_sync(kAllLanes, there ? own : 0, i * kLanes);
    if (lane_index() != 0 || !there) return;
    const int at = index / kWarp;
    if (packed) {
      const std::uint32_t word = all[0] | all[1] << 8 | all[2] << 16 | all[3] << 24;
      store_to_all(target.task.common, target.to, target.scales, at, word);
    } else {
      store_to_all(target.task.common, target.to, target.scales, at, make_uint4(all[0], all[1], all[2], all[3]));
    }
  }

  Raw raw_[kAtOnce];  // NOLINT(modernize-avoid-c-arrays): device code
};

// A part of a row to all of its places. Units are loaded before the first is stored.
template <class Unit>
__device__ void copy_units(
    std::byte* const* to, int num_places, const std::byte* from, std::int64_t bytes, Crew crew) {
  constexpr int kAtOnce = 4;
  const auto* units = reinterpret_cast<const Unit*>(from);
  const auto n = static_cast<int>(bytes / static_cast<std::int64_t>(sizeof(Unit)));
  for (int first = crew.index; first < n; first += kAtOnce * crew.count) {
    Unit values[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (first + k * crew.count < n) values[k] = units[first + k * crew.count];
    }
    for (int place = 0; place < num_places; ++place) {
      auto* row = reinterpret_cast<Unit*>(to[place]);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (first + k * crew.count < n) row[first + k * crew.count] = values[k];
      }
    }
  }
}

__device__ inline void copy_to_places(
    std::byte* const* to, int num_places, const std::byte* from, const Copied& plane, Crew crew) {
  switch (plane.unit) {
    case 16:
      return copy_units<uint4>(to, num_places, from, plane.row_bytes, crew);
    case 8:
      return copy_units<uint2>(to, num_places, from, plane.row_bytes, crew);
    case 4:
      return copy_units<std::uint32_t>(to, num_places, from, plane.row_bytes, crew);
    case 2:
      return copy_units<std::uint16_t>(to, num_places, from, plane.row_bytes, crew);
    default:
      return copy_units<std::uint8_t>(to, num_places, from, plane.row_bytes, crew);
  }
}

}  // namespace tokenyard::engine::cuda
