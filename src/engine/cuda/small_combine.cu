// SPDX-License-Identifier: Apache-2.0
// Combine of a small round: each rank pushes the rows that it owes in units that tell of their own arrival, and the
// origin sums units as they come, in the order of ranks. Its own rows it reads where they are.
#include <algorithm>

#include "engine/cuda/combine_kernels.cuh"
#include "engine/cuda/kernels.h"
#include "engine/cuda/routes.cuh"
#include "engine/cuda/routing.cuh"
#include "engine/cuda/waits.cuh"
#include "protocol/casts.h"

namespace tokenyard::engine::cuda {
namespace {

template <class Format>
inline constexpr int kPerWord = 4 / static_cast<int>(sizeof(typename Format::Bits));

__device__ std::uint32_t encode_wire(Dtype wire, float value) {
  switch (wire) {
    case Dtype::kBf16:
      return protocol::encode<protocol::Bf16>(value);
    case Dtype::kF16:
      return protocol::encode<protocol::F16>(value);
    case Dtype::kF8e4m3:
      return protocol::encode<protocol::F8e4m3>(value);
    default:
      return protocol::encode<protocol::F32>(value);
  }
}

__device__ float decode_output(Dtype dtype, const std::byte* row, std::int64_t i) {
  switch (dtype) {
    case Dtype::kBf16:
      return protocol::decode<protocol::Bf16>(reinterpret_cast<const std::uint16_t*>(row)[i]);
    case Dtype::kF16:
      return protocol::decode<protocol::F16>(reinterpret_cast<const std::uint16_t*>(row)[i]);
    default:
      return reinterpret_cast<const float*>(row)[i];
  }
}

// Word `index` of a row of expert output as it crosses.
template <class Wire>
__device__ std::uint32_t wire_word(const CombineTask& task, const std::byte* row, std::int64_t index) {
  constexpr int kElements = kPerWord<Wire>;
  constexpr int kBits = 32 / kElements;
  const std::int64_t first = index * kElements;
  if (task.from_dtype == task.rows_dtype && task.unit >= 4 && first + kElements <= task.hidden) {
    return reinterpret_cast<const std::uint32_t*>(row)[index];
  }
  std::uint32_t word = 0;
  for (int k = 0; k < kElements && first + k < task.hidden; ++k) {
    const std::uint32_t code = task.from_dtype == task.rows_dtype
                                   ? reinterpret_cast<const typename Wire::Bits*>(row)[first + k]
                                   : encode_wire(task.rows_dtype, decode_output(task.from_dtype, row, first + k));
    if constexpr (kBits == 32) {
      word = code;
    } else {
      word |= code << (kBits * k);
    }
  }
  return word;
}

template <class Wire>
__device__ Unit wire_unit(const CombineTask& task, const std::byte* row, std::int64_t unit, std::uint32_t flag) {
  Unit result{};
  result.flag = flag;
  for (int w = 0; w < kUnitWords; ++w) {
    const std::int64_t index = unit * kUnitWords + w;
    if (index * kPerWord<Wire> < task.hidden) result.words[w] = wire_word<Wire>(task, row, index);
  }
  return result;
}

__device__ const std::byte* output_row(const CombineTask& task, int source, std::int64_t token) {
  return task.from + source * task.from_block_stride + token * task.from_row_stride;
}

__device__ bool is_present(const CombineTask& task, int source, std::int64_t token) {
  const int size = task.common.layout.shape().tokens_per_chunk;
  const std::uint64_t mask = task.route.masks[source * task.common.layout.max_chunks() + token / size];
  return (mask >> (token % size) & 1U) != 0;
}

// By blocks: the rows that this rank owes others.
template <class Wire>
__device__ void push(const CombineTask& task, std::uint32_t epoch) {
  const Common& common = task.common;
  const auto units = static_cast<int>(units_of(task.hidden * static_cast<std::int64_t>(sizeof(typename Wire::Bits))));
  const std::uint32_t flag = flag_of(epoch);
  const std::int64_t items = task.small.tokens * (common.num_ranks - 1);
  for (std::int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const std::int64_t token = item / (common.num_ranks - 1);
    const int origin = static_cast<int>((common.rank + 1 + item % (common.num_ranks - 1)) % common.num_ranks);
    if (!is_present(task, origin, token)) continue;
    const std::byte* row = output_row(task, origin, token);
    std::byte* to = window_of(common, origin) + task.small.row(epoch, common.rank, token);
    for (int first = static_cast<int>(threadIdx.x); first < units; first += kUnitsAtOnce * kThreads) {
      Unit values[kUnitsAtOnce];
#pragma unroll
      for (int k = 0; k < kUnitsAtOnce; ++k) {
        if (first + k * kThreads < units) values[k] = wire_unit<Wire>(task, row, first + k * kThreads, flag);
      }
#pragma unroll
      for (int k = 0; k < kUnitsAtOnce; ++k) {
        const std::int64_t unit = first + k * kThreads;
        if (unit < units) store_unit_system(to + unit * kUnitBytes, values[k]);
      }
    }
  }
}

template <class Wire>
__device__ void add_unit(float* sums, const Unit& unit) {
  constexpr int kElements = kPerWord<Wire>;
  constexpr int kBits = 32 / kElements;
#pragma unroll
  for (int i = 0; i < kUnitWords * kElements; ++i) {
    const std::uint32_t code = unit.words[i / kElements] >> (kBits * (i % kElements) % 32);
    sums[i] = __fadd_rn(sums[i], protocol::decode<Wire>(static_cast<typename Wire::Bits>(code)));
  }
}

// Unit `index` of the token's row from `owner`, waited for; false when it does not come.
template <class Wire>
__device__ bool take_unit(
    const CombineTask& task, int owner, std::int64_t token, std::int64_t index, std::uint32_t epoch, Unit& unit) {
  const Common& common = task.common;
  if (owner == common.rank) {
    unit = wire_unit<Wire>(task, output_row(task, owner, token), index, 0);
    return true;
  }
  const std::byte* at = window_of(common, common.rank) + task.small.row(epoch, owner, token) + index * kUnitBytes;
  return wait_until(common, {owner, Phase::kCombine, epoch}, [&] {
    unit = load_unit_system(at);
    return unit.flag == flag_of(epoch);
  });
}

template <class Wire, class To>
__device__ void store_sums(const CombineTask& task, std::int64_t token, std::int64_t first, float* sums) {
  constexpr int kElements = kUnitWords * kPerWord<Wire>;
  auto* output = reinterpret_cast<typename To::Bits*>(task.output + token * task.output_stride);
  for (unsigned b = 0; b < task.bias.size(); ++b) {
    if (task.bias[b] == nullptr) continue;
    const auto* bias = reinterpret_cast<const typename To::Bits*>(task.bias[b] + token * task.bias_stride[b]);
    for (int i = 0; i < kElements && first + i < task.hidden; ++i)
      sums[i] = __fadd_rn(sums[i], protocol::decode<To>(bias[first + i]));
  }
  if constexpr (sizeof(typename To::Bits) == 2) {
    if (task.vectors && first + kElements <= task.hidden) {
#pragma unroll
      for (int i = 0; i < kElements; i += 2) {
        const std::uint32_t pair = protocol::encode<To>(sums[i]) |
                                   static_cast<std::uint32_t>(protocol::encode<To>(sums[i + 1 < kElements ? i + 1 : i]))
                                       << 16;
        if (i + 1 < kElements) {
          reinterpret_cast<std::uint32_t*>(output + first)[i / 2] = pair;
        } else {
          output[first + i] = static_cast<typename To::Bits>(pair);
        }
      }
      return;
    }
  }
  for (int i = 0; i < kElements && first + i < task.hidden; ++i)
    output[first + i] = protocol::encode<To>(sums[i]);
}

template <class Wire, class To>
__device__ void sum(const CombineTask& task, std::uint32_t epoch) {
  constexpr int kElements = kUnitWords * kPerWord<Wire>;
  const auto units = static_cast<int>(units_of(task.hidden * static_cast<std::int64_t>(sizeof(typename Wire::Bits))));
  const std::int64_t tokens = task.route.state[kRouteTokens];
  for (std::int64_t token = blockIdx.x; token < tokens; token += gridDim.x) {
    for (int index = static_cast<int>(threadIdx.x); index < units; index += kThreads) {
      float sums[kElements] = {};
      for (int w = 0; w < task.route.words; ++w) {
        for (std::uint32_t word = task.route.ranks_of_token[token * task.route.words + w]; word != 0;
             word &= word - 1) {
          Unit unit{};
          const int owner = w * kWordBits + __ffs(static_cast<int>(word)) - 1;
          if (!take_unit<Wire>(task, owner, token, index, epoch, unit)) return;
          add_unit<Wire>(sums, unit);
        }
      }
      store_sums<Wire, To>(task, token, std::int64_t{index} * kElements, sums);
    }
  }
}

template <class Wire, class To>
__global__ void __launch_bounds__(kThreads, 1) small_combine(const __grid_constant__ CombineTask task) {
  const Common& common = task.common;
  const Start start = read_start(common);
  const bool aborted = load_relaxed_device(task.route.state + kRouteAborted) != 0;
  if (start.failed != 0) return;
  // No rank combines a round that was given up, so it uses up no epoch.
  const std::uint32_t epoch = start.epochs[protocol::kCombinePhase] + (aborted ? 0U : 1U);
  if (!aborted) {
    if (task.ends_views && blockIdx.x == gridDim.x - 1) {
      release_views(common, start.epochs[protocol::kDispatchPhase]);
    }
    push<Wire>(task, epoch);
    sum<Wire, To>(task, epoch);
  }
  if (!last_block(&common.board->blocks_done)) return;
  if (threadIdx.x == 0) {
    common.board->blocks_done = 0;
    common.board->epochs[protocol::kCombinePhase] = epoch;
  }
  if (task.reads_views) release_views(common, common.board->epochs[protocol::kDispatchPhase]);
  clear_route(task.route, common.num_ranks);
}

struct Kernels {
  template <class Wire, class To>
  static CombineKernel get() {
    return small_combine<Wire, To>;
  }
};

}  // namespace

void load_small_combine() {
  load_combine_kernels<Kernels>();
}

void launch_small_combine(const CombineTask& task, int blocks, cudaStream_t stream) {
  combine_kernel<Kernels>(task.rows_dtype, task.output_dtype)<<<blocks, kThreads, 0, stream>>>(task);
  check(cudaGetLastError(), "launching a small combine");
}

}  // namespace tokenyard::engine::cuda
