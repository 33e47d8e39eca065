// SPDX-License-Identifier: Apache-2.0
// Combine of a small round: each rank pushes the rows that it owes in lines that tell of their own arrival, and the
// origin sums them as they come, in the order of ranks. Its own rows it reads where they are.
#include <algorithm>

#include "engine/cuda/combine_kernels.cuh"
#include "engine/cuda/kernels.h"
#include "engine/cuda/plain_headers.cuh"
#include "engine/cuda/small_lines.cuh"
#include "protocol/casts.h"

namespace tokenyard::engine::cuda {
namespace {

template <class Format>
inline constexpr int kPerWord = 8 / static_cast<int>(sizeof(typename Format::Bits));

template <class Wire>
__device__ std::uint64_t encode_wire(float value) {
  return static_cast<std::uint64_t>(protocol::encode<Wire>(value));
}

template <>
__device__ std::uint64_t encode_wire<protocol::F32>(float value) {
  return __float_as_uint(value);
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

// This thread's part of a line of expert output that has to be cast to the wire's dtype.
template <class Wire>
__device__ __noinline__ Pair cast_part(const CombineTask& task, const std::byte* row, unsigned line) {
  constexpr int kElements = kPerWord<Wire>;
  const std::int64_t first = row_offset_of(line) / sizeof(typename Wire::Bits);
  std::uint64_t words[2] = {};  // NOLINT(modernize-avoid-c-arrays): device code
#pragma unroll 1
  for (int i = 0; i < 2 * kElements && first + i < task.hidden; ++i) {
    const std::uint64_t code = encode_wire<Wire>(decode_output(task.from_dtype, row, first + i));
    words[i / kElements] |= code << (64 / kElements * (i % kElements));
  }
  return {words[0], words[1]};
}

template <class Wire>
__device__ __forceinline__ Pair read_part(const CombineTask& task, const std::byte* row, unsigned line) {
  if (task.from_dtype != task.rows_dtype) return cast_part<Wire>(task, row, line);
  return load_part(row, line, static_cast<unsigned>(task.row_bytes), task.unit >= 8);
}

template <class Wire>
__device__ __forceinline__ Parts read_row(const CombineTask& task, int source, unsigned token, Slice slice) {
  const std::byte* row = task.from + source * task.from_block_stride + token * task.from_row_stride;
  Parts parts{};
#pragma unroll
  for (int k = 0; k < kLinesAtOnce; ++k) {
    const unsigned line = slice.first + k * slice.step;
    if (line < static_cast<unsigned>(task.row_lines)) parts.pairs[k] = read_part<Wire>(task, row, line);
  }
  return parts;
}

struct Call {
  Start start;
  bool aborted;
  std::uint32_t epoch;
  std::uint64_t flag;
};

// By blocks: the rows that this rank owes others. A row is read before it is known whether it is owed.
template <class Wire>
__device__ __forceinline__ bool push(const CombineTask& task, const Call& call) {
  const Common& common = task.common;
  const unsigned items = task.tokens_per_rank * task.work.peers.value() * task.work.slices.value();
  if (common.num_ranks == 1) return true;
#pragma unroll 1
  for (unsigned at = blockIdx.x; at < items; at += gridDim.x) {
    const Item item = item_of(task.work, at);
    int origin = common.rank + 1 + static_cast<int>(item.peer);
    if (origin >= common.num_ranks) origin -= common.num_ranks;
    const std::uint32_t owed =
        __ldg(task.route.present + origin * static_cast<unsigned>(task.small.tokens) + item.token);
    std::byte* to = window_of(common, origin) + task.small.row(call.epoch, common.rank, item.token);
    Slice slice = slice_of(task.work, item.slice);
    do {
      const Parts parts = read_row<Wire>(task, origin, item.token, slice);
      if (call.start.failed != 0 || call.aborted) return false;
      if (owed == 0) break;
      store_lines(to, parts, slice, task.row_lines, call.flag);
      slice.first += kLinesAtOnce * slice.step;
    } while (slice.first < static_cast<unsigned>(task.row_lines));
  }
  return true;
}

// By one lane, when it waits long: whether the operation is given up.
__device__ __noinline__ bool gave_up(const CombineTask& task, int owner, unsigned token, Call call) {
  const Common& common = task.common;
  std::uint32_t* state = task.route.state + kSmallCombineAborted;
  const Awaited awaited{owner, Phase::kCombine, call.epoch};
  if (given_up_plainly(common, state, awaited)) return true;
  const std::byte* row = window_of(common, common.rank) + task.small.row(call.epoch, owner, token);
  const std::uint64_t seen = load_pair_system(row + (kLineThreads - 1) * sizeof(Pair)).second;
  if (seen == call.flag || !same_epoch(seen, call.flag)) return false;
  give_up_small(common, state, NoticeKind::kMismatch, awaited);
  return true;
}

template <class Wire>
__device__ void add_word(float* sums, std::uint64_t word) {
  constexpr int kElements = kPerWord<Wire>;
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    const auto code = static_cast<typename Wire::Bits>(word >> (64 / kElements * i));
    sums[i] = __fadd_rn(sums[i], protocol::decode<Wire>(code));
  }
}

template <>
__device__ void add_word<protocol::F32>(float* sums, std::uint64_t word) {
  sums[0] = __fadd_rn(sums[0], __uint_as_float(static_cast<std::uint32_t>(word)));
  sums[1] = __fadd_rn(sums[1], __uint_as_float(static_cast<std::uint32_t>(word >> 32)));
}

// N elements of an output or bias, in accesses of at most 8 bytes.
template <class To, int N>
struct alignas(sizeof(typename To::Bits) * N < 8 ? sizeof(typename To::Bits) * N : 8) Pack {
  typename To::Bits bits[N];  // NOLINT(modernize-avoid-c-arrays): device code
};

// As store_sums, where a word is not wholly in the row or not at its own alignment.
template <class To>
__device__ __noinline__ void store_elements(
    const CombineTask& task, unsigned token, std::int64_t first, float* sums, int count) {
#pragma unroll 1
  for (int i = 0; i < count && first + i < task.hidden; ++i) {
    float sum = sums[i];
    for (unsigned b = 0; b < task.bias.size(); ++b) {
      if (task.bias[b] == nullptr) continue;
      const auto* bias = reinterpret_cast<const typename To::Bits*>(task.bias[b] + token * task.bias_stride[b]);
      sum = __fadd_rn(sum, protocol::decode<To>(bias[first + i]));
    }
    auto* output = reinterpret_cast<typename To::Bits*>(task.output + token * task.output_stride);
    output[first + i] = protocol::encode<To>(sum);
  }
}

// The sums of one word's elements, with biases, to the output.
template <class Wire, class To>
__device__ __forceinline__ void store_sums(const CombineTask& task, unsigned token, std::int64_t first, float* sums) {
  constexpr int kElements = kPerWord<Wire>;
  using Elements = Pack<To, kElements>;
  if (first >= task.hidden) return;
  if (!task.vectors || first + kElements > task.hidden) {
    float values[kElements];  // NOLINT(modernize-avoid-c-arrays): device code; `sums` stay in registers
#pragma unroll
    for (int i = 0; i < kElements; ++i)
      values[i] = sums[i];
    return store_elements<To>(task, token, first, values, kElements);
  }
#pragma unroll 1
  for (unsigned b = 0; b < task.bias.size(); ++b) {
    if (task.bias[b] == nullptr) continue;
    const auto* bias = reinterpret_cast<const typename To::Bits*>(task.bias[b] + token * task.bias_stride[b]);
    const Elements elements = *reinterpret_cast<const Elements*>(bias + first);
#pragma unroll
    for (int i = 0; i < kElements; ++i)
      sums[i] = __fadd_rn(sums[i], protocol::decode<To>(elements.bits[i]));
  }
  Elements elements{};
#pragma unroll
  for (int i = 0; i < kElements; ++i)
    elements.bits[i] = protocol::encode<To>(sums[i]);
  auto* output = reinterpret_cast<typename To::Bits*>(task.output + token * task.output_stride);
  *reinterpret_cast<Elements*>(output + first) = elements;
}

// A slice of a token's sum, by one warp; false when this rank does not go on with the operation. While it waits for the
// rows of one owner, those of the next are on their way from memory.
template <class Wire, class To>
__device__ __forceinline__ bool sum_lines(
    const CombineTask& task, std::uint32_t ranks, unsigned token, Slice slice, const Call& call) {
  constexpr int kElements = kPerWord<Wire>;
  const Common& common = task.common;
  const std::byte* window = window_of(common, common.rank);
  const auto load = [&](int owner) {
    return owner == common.rank ? read_row<Wire>(task, owner, token, slice)
                                : load_lines(window + task.small.row(call.epoch, owner, token), slice, task.row_lines);
  };
  float sums[kLinesAtOnce][2][kElements] = {};  // NOLINT(modernize-avoid-c-arrays): device code
  int owner = __ffs(static_cast<int>(ranks)) - 1;
  Parts next{};
  if (ranks != 0) next = load(owner);
#pragma unroll 1
  while (ranks != 0) {
    Parts parts = next;
    const int current = owner;
    ranks &= ranks - 1;
    owner = __ffs(static_cast<int>(ranks)) - 1;
    if (ranks != 0) next = load(owner);
    if (current != common.rank) {
      const auto here = [&] {
        return __all_sync(kAllLanes, static_cast<int>(are_there(parts, slice, task.row_lines, call.flag))) != 0;
      };
      const auto ready = [&] {
        parts = load_lines(window + task.small.row(call.epoch, current, token), slice, task.row_lines);
        return here();
      };
      if (!here() && !wait_as_warp(common, {current, Phase::kCombine, call.epoch}, ready,
                                   [&] { return gave_up(task, current, token, call); })) {
        return false;
      }
    }
#pragma unroll
    for (int i = 0; i < kLinesAtOnce; ++i) {
      add_word<Wire>(sums[i][0], parts.pairs[i].first);
      add_word<Wire>(sums[i][1], parts.pairs[i].second);  // of a flag's word nobody looks at the sum
    }
  }
#pragma unroll
  for (int i = 0; i < kLinesAtOnce; ++i) {
    const unsigned line = slice.first + i * slice.step;
    if (line >= static_cast<unsigned>(task.row_lines)) break;
    const std::int64_t first = row_offset_of(line) / sizeof(typename Wire::Bits);
    store_sums<Wire, To>(task, token, first, sums[i][0]);
    if (!holds_flag()) store_sums<Wire, To>(task, token, first + kElements, sums[i][1]);
  }
  return true;
}

// Tokens from the last block on, so that with few of them nobody both pushes and sums.
template <class Wire, class To>
__device__ __forceinline__ void sum(const CombineTask& task, const Call& call) {
  const unsigned items = task.route.state[kRouteTokens] * task.work.slices.value();
#pragma unroll 1
  for (unsigned item = gridDim.x - 1 - blockIdx.x; item < items; item += gridDim.x) {
    const unsigned token = task.work.slices.divide(item);
    Slice slice = slice_of(task.work, item - token * task.work.slices.value());
    const std::uint32_t ranks = __ldg(task.route.ranks_of_token + token);
    do {
      if (!sum_lines<Wire, To>(task, ranks, token, slice, call)) return;
      slice.first += kLinesAtOnce * slice.step;
    } while (__any_sync(kAllLanes, static_cast<int>(slice.first < static_cast<unsigned>(task.row_lines))) != 0);
  }
}

// By one block, for the rounds that follow; no other one looks at any of it.
__device__ void settle(const CombineTask& task) {
  const Common& common = task.common;
  for (int rank = static_cast<int>(threadIdx.x); rank < common.num_ranks; rank += blockDim.x)
    task.route.rows_received[rank] = 0;
  Board& board = *common.board;
  if (threadIdx.x == 0 && board.invalid_told != board.invalid_ids)
    common.host->invalid_ids = board.invalid_told = board.invalid_ids;
}

template <class Wire, class To>
__global__ void __launch_bounds__(kThreads, 1) small_combine(const __grid_constant__ CombineTask task) {
  const Common& common = task.common;
  Call call{read_start(common, protocol::kCombinePhase), false, 0, 0};
  const std::uint32_t dispatch = read_start(common, protocol::kDispatchPhase).epoch;
  call.aborted = __ldcg(task.route.state + kSmallRouteAborted) == tag_of(dispatch);
  call.epoch = call.start.epoch + (task.sends ? 1U : 0U);
  call.flag = flag_of(call.epoch, static_cast<std::uint32_t>(task.hidden));
  if (task.sends && !push<Wire>(task, call)) return;
  // No rank combines a round that was given up, so it uses up no epoch.
  if (call.start.failed != 0 || call.aborted) return;
  if (task.receives) sum<Wire, To>(task, call);
  __syncthreads();
  if (task.sends) advance_block(common, protocol::kCombinePhase, call.epoch);
  if (task.receives && blockIdx.x == 0) settle(task);
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
  combine_kernel<Kernels>(task.rows_dtype, task.output_dtype)<<<blocks, task.work.threads, 0, stream>>>(task);
  check(cudaGetLastError(), "launching a small combine");
}

}  // namespace tokenyard::engine::cuda
