// SPDX-License-Identifier: Apache-2.0
// Rows of an expert-major dispatch on their way: as they are, or cast to blocks of fp8. A row is loaded before it is
// known where it goes, and then stored to all of its ranks.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "engine/cuda/copies.cuh"
#include "engine/cuda/expert_state.cuh"
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
                          const std::uint32_t* ranks)
      : common_(task.common),
        ranks_(ranks),
        words_(task.route.words),
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
    RankWalk walk(ranks_, words_);
#pragma unroll 1
    for (int rank = walk.next(); rank >= 0; rank = walk.next())
      reinterpret_cast<Value*>(window_of(common_, rank) + place)[index] = value;
  }

  const Common& common_;
  const std::uint32_t* ranks_;
  int words_;
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
  __device__ __forceinline__ void load(const ExpertDispatchTask& task, std::int64_t token) {
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
  __device__ __forceinline__ void store(const ExpertDispatchTask& task, std::int64_t token, const Sink& sink) const {
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

// A thread casts 16 values at a time, so that eight of them share a scale and a warp has four. Rows of up to 16 values
// for each thread are loaded ahead.
template <class From>
class CastRow {
 public:
  __device__ __forceinline__ void load(const ExpertDispatchTask& task, std::int64_t token) {
    raw_ = load_values(task, token, static_cast<int>(threadIdx.x));
  }

  template <class Sink>
  __device__ __forceinline__ void store(const ExpertDispatchTask& task, std::int64_t token, const Sink& sink) const {
    const auto units = static_cast<int>(protocol::ceil_div(task.values.row_bytes, kValues));
    store_values(task, static_cast<int>(threadIdx.x), raw_, sink);
    if (units > kThreads) store_rest(task, token, units, sink);
  }

 private:
  using Bits = typename From::Bits;
  static constexpr int kValues = 16;
  static constexpr int kVectors = kValues * static_cast<int>(sizeof(Bits)) / 16;
  static constexpr int kLanes = static_cast<int>(protocol::kCastBlock) / kValues;  // that share a scale
  static constexpr int kScales = kWarp / kLanes;

  // Taken apart only when they are needed: until then they may be on their way.
  struct Raw {
    uint4 vectors[kVectors];  // NOLINT(modernize-avoid-c-arrays): device code
  };

  struct alignas(16) Values {
    Bits bits[kValues];  // NOLINT(modernize-avoid-c-arrays): device code
  };

  // Values behind the row's end are 0, which changes no scale.
  static __device__ __forceinline__ Raw load_values(const ExpertDispatchTask& task, std::int64_t token, int index) {
    const std::byte* row = task.values.from + token * task.values.from_stride;
    const auto n = static_cast<int>(task.values.row_bytes);
    const int first = index * kValues;
    if (first >= n) return {};
    if (task.values.unit == 16 && first + kValues <= n) return reinterpret_cast<const Raw*>(row)[index];
    return load_end(reinterpret_cast<const Bits*>(row) + first, n - first);
  }

  static __device__ __noinline__ Raw load_end(const Bits* from, int left) {
    Values values;
#pragma unroll
    for (int i = 0; i < kValues; ++i)
      values.bits[i] = i < left ? from[i] : Bits{0};
    return __builtin_bit_cast(Raw, values);
  }

  template <class Sink>
  static __device__ __noinline__ void store_rest(const ExpertDispatchTask& task,
                                                 std::int64_t token,
                                                 int units,
                                                 Sink sink) {
#pragma unroll 1
    for (int first = kThreads; first < units; first += kThreads) {
      const int index = first + static_cast<int>(threadIdx.x);
      store_values(task, index, load_values(task, token, index), sink);
    }
  }

  // By whole warps.
  template <class Sink>
  static __device__ __forceinline__ void store_values(const ExpertDispatchTask& task,
                                                      int index,
                                                      const Raw& raw,
                                                      const Sink& sink) {
    const auto values = __builtin_bit_cast(Values, raw);
    std::uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kValues; ++i)
      largest = max(largest, protocol::finite_magnitude(protocol::decode<From>(values.bits[i])));
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2)
      largest = max(largest, __shfl_xor_sync(kAllLanes, largest, step));
    const float scale = protocol::block_scale(task.cast, largest);
    const float inverse = 1.0F / scale;
    std::uint32_t words[4] = {};  // NOLINT(modernize-avoid-c-arrays): device code
#pragma unroll
    for (int i = 0; i < kValues; i += 2) {
      // As protocol::cast_to_block: the product is rounded, then saturates; NaN becomes 0x7F.
      const float2 pair = make_float2(__fmul_rn(protocol::decode<From>(values.bits[i]), inverse),
                                      __fmul_rn(protocol::decode<From>(values.bits[i + 1]), inverse));
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
  static __device__ __forceinline__ void store_scales(DispatchCast cast, int index, float scale, const Sink& sink) {
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

  Raw raw_;
};

// Where a row goes, in the lanes of a warp: each of those that are listed has an address.
struct PlacesOfLanes {
  std::byte* rows[kPicksOfLane];  // NOLINT(modernize-avoid-c-arrays): device code
  unsigned listed[kPicksOfLane];  // NOLINT(modernize-avoid-c-arrays): device code

  template <class Visit>
  __device__ void for_each(const Visit& visit) const {
#pragma unroll
    for (int i = 0; i < kPicksOfLane; ++i) {
#pragma unroll 1
      for (unsigned left = listed[i]; left != 0; left &= left - 1) {
        const auto row = reinterpret_cast<unsigned long long>(rows[i]);
        visit(reinterpret_cast<std::byte*>(__shfl_sync(kAllLanes, row, __ffs(static_cast<int>(left)) - 1)));
      }
    }
  }
};

// Bytes [begin, begin + bytes) of a row, which are at `from`.
struct PieceOfRow {
  const std::byte* from;
  int begin;
  int bytes;
};

// By one warp, which is one of several: units are loaded before the first is stored.
template <class Unit>
__device__ void copy_units(const PlacesOfLanes& to, const PieceOfRow& piece, Crew warps) {
  constexpr int kAtOnce = 2;
  const auto* units = reinterpret_cast<const Unit*>(piece.from);
  const int n = piece.bytes / static_cast<int>(sizeof(Unit));
#pragma unroll 1
  for (int first = warps.index * kWarp; first < n; first += kAtOnce * warps.count * kWarp) {
    const int index = first + lane_index();
    const int step = warps.count * kWarp;
    Unit values[kAtOnce];  // NOLINT(modernize-avoid-c-arrays): device code
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (index + k * step < n) values[k] = units[index + k * step];
    }
    to.for_each([&](std::byte* row) {
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (index + k * step < n) reinterpret_cast<Unit*>(row + piece.begin)[index + k * step] = values[k];
      }
    });
  }
}

__device__ __noinline__ inline void copy_small_units(PlacesOfLanes to, PieceOfRow piece, int unit, Crew warps) {
  switch (unit) {
    case 8:
      return copy_units<uint2>(to, piece, warps);
    case 4:
      return copy_units<std::uint32_t>(to, piece, warps);
    case 2:
      return copy_units<std::uint16_t>(to, piece, warps);
    default:
      return copy_units<std::uint8_t>(to, piece, warps);
  }
}

// `unit` bytes divide all of it.
__device__ __forceinline__ void copy_to_places(const PlacesOfLanes& to, const PieceOfRow& piece, int unit, Crew warps) {
  if (unit != 16) return copy_small_units(to, piece, unit, warps);
  copy_units<uint4>(to, piece, warps);
}

}  // namespace tokenyard::engine::cuda
