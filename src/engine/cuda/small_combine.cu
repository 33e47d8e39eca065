// SPDX-License-Identifier: Apache-2.0
// Combine of a small round: each rank pushes the rows that it owes in lines that tell of their own arrival, and the
// origin sums them as they come, in the order of ranks. Its own rows it reads where they are.
#include <algorithm>

#include "engine/cuda/combine_kernels.cuh"
#include "engine/cuda/kernels.h"
#include "engine/cuda/overlap.cuh"
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
  if (task.casts) return cast_part<Wire>(task, row, line);
  return load_part(part_of(row, line, static_cast<unsigned>(task.row_bytes), task.words));
}

template <class Wire>
__device__ __forceinline__ Parts read_row(const CombineTask& task, int source, unsigned token, const Slice& slice) {
  const std::byte* row = task.from + source * task.from_block_stride + token * task.from_row_stride;
  Parts parts{};
  for_each_line(slice, task.row_lines, [&](int k, unsigned line) {
    if (line < static_cast<unsigned>(task.row_lines)) parts.pairs[k] = read_part<Wire>(task, row, line);
  });
  return parts;
}

// What a block reads first.
struct Words {
  Start start;
  std::uint32_t dispatch;  // its epoch
  std::uint32_t aborted;
};

struct Call {
  bool ends;     // nothing is to be done any more
  bool aborted;  // and no rank combines the round
  std::uint32_t epoch;
  std::uint64_t flag;
};

__device__ __forceinline__ Call call_of(const CombineTask& task, const Words& words) {
  const std::uint32_t epoch = used_from_here(words.start.epoch) + (task.sends ? 1U : 0U);
  const bool failed = used_from_here(words.start.failed) != 0;
  const bool aborted = used_from_here(words.aborted) == mark_of(used_from_here(words.dispatch));
  return {failed || aborted, aborted && !failed, epoch, flag_of(epoch, static_cast<std::uint32_t>(task.hidden))};
}

// By blocks: the rows that this rank owes others. A row is read before it is known whether it is owed.
template <class Wire>
__device__ __forceinline__ void push(const CombineTask& task, const Words& words) {
  const Common& common = task.common;
  const unsigned items = task.tokens_per_rank * task.work.peers.value() << task.work.slices_log2;
#pragma unroll 1
  for (unsigned at = blockIdx.x; at < items; at += gridDim.x) {
    Item item = item_of(task.work, at);
    int origin = common.rank + 1 + static_cast<int>(item.peer);
    if (origin >= common.num_ranks) origin -= common.num_ranks;
    const std::uint32_t owed =
        __ldg(task.route.present + origin * static_cast<unsigned>(task.small.tokens) + item.token);
    Parts parts = read_row<Wire>(task, origin, item.token, item.slice);
    const Call call = call_of(task, words);
    if (call.ends) return;
    if (owed == 0) continue;
    std::byte* to = window_of(common, origin) + task.small.row(call.epoch, common.rank, item.token);
    while (true) {
      store_lines(to, parts, item.slice, task.row_lines, call.flag);
      if (!advance(item.slice, task.row_lines)) break;
      parts = read_row<Wire>(task, origin, item.token, item.slice);
    }
  }
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
  if (task.biased) {
#pragma unroll 1
    for (unsigned b = 0; b < task.bias.size(); ++b) {
      if (task.bias[b] == nullptr) continue;
      const auto* bias = reinterpret_cast<const typename To::Bits*>(task.bias[b] + token * task.bias_stride[b]);
      const Elements elements = *reinterpret_cast<const Elements*>(bias + first);
#pragma unroll
      for (int i = 0; i < kElements; ++i)
        sums[i] = __fadd_rn(sums[i], protocol::decode<To>(elements.bits[i]));
    }
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
    const CombineTask& task, std::uint32_t ranks, unsigned token, const Slice& slice, const Call& call) {
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
    for_each_line(slice, task.row_lines, [&](int k, unsigned /*line*/) {
      add_word<Wire>(sums[k][0], parts.pairs[k].first);
      add_word<Wire>(sums[k][1], parts.pairs[k].second);  // of a flag's word nobody looks at the sum
    });
  }
  for_each_line(slice, task.row_lines, [&](int k, unsigned line) {
    const std::int64_t first = row_offset_of(line) / sizeof(typename Wire::Bits);
    store_sums<Wire, To>(task, token, first, sums[k][0]);
    if (!holds_flag()) store_sums<Wire, To>(task, token, first + kElements, sums[k][1]);
  });
  return true;
}

// Tokens from the last block on, so that with few of them nobody both pushes and sums.
template <class Wire, class To>
__device__ __forceinline__ void sum(const CombineTask& task, const Call& call) {
  const unsigned items = task.route.state[kRouteTokens] << task.work.slices_log2;
#pragma unroll 1
  for (unsigned at = gridDim.x - 1 - blockIdx.x; at < items; at += gridDim.x) {
    Item item = token_of(task.work, at);
    const std::uint32_t ranks = __ldg(task.route.ranks_of_token + item.token);
    do {
      if (!sum_lines<Wire, To>(task, ranks, item.token, item.slice, call)) return;
    } while (advance(item.slice, task.row_lines));
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
__global__ void __launch_bounds__(kThreads, 2) small_combine(const __grid_constant__ CombineTask task) {
  const Common& common = task.common;
  fetch_parameters(task);
  wait_for_kernels_before();
  const Words words{read_start(common, protocol::kCombinePhase), read_start(common, protocol::kDispatchPhase).epoch,
                    __ldcg(task.route.state + kSmallRouteAborted)};
  if (blocks_do_both(task.work, task.tokens_per_rank)) let_next_kernel_start();  // as in dispatch
  if (task.sends && common.num_ranks > 1) push<Wire>(task, words);
  const Call call = call_of(task, words);
  if (!call.ends) {
    let_next_kernel_start();
    __syncthreads();
    if (task.sends) advance_block(common, protocol::kCombinePhase, call.epoch);
    if (task.receives) sum<Wire, To>(task, call);
  }
  // No rank combines a round that was given up, so it uses up no epoch; but it ends here.
  if (task.receives && blockIdx.x == 0 && (call.aborted || !call.ends)) settle(task);
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
  const Launch launch{.blocks = blocks, .threads = task.work.threads, .overlaps = task.work.overlaps};
  launch_overlapping(combine_kernel<Kernels>(task.rows_dtype, task.output_dtype), launch, stream, task);
}

}  // namespace tokenyard::engine::cuda
