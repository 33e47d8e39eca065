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

constexpr int kOwnersAtOnce = 4;  // whose rows are polled together

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
__device__ __forceinline__ Parts read_row(const CombineTask& task, int source, unsigned token, unsigned first) {
  const std::byte* row = task.from + source * task.from_block_stride + token * task.from_row_stride;
  Parts parts{};
#pragma unroll
  for (int k = 0; k < kLinesAtOnce; ++k) {
    const unsigned line = first + k * kLinesOfBlock;
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
  const unsigned others = common.num_ranks - 1;
  const unsigned items = task.tokens_per_rank * others;
#pragma unroll 1
  for (unsigned item = blockIdx.x; item < items; item += gridDim.x) {
    const unsigned token = item / others;
    int origin = common.rank + 1 + static_cast<int>(item % others);
    if (origin >= common.num_ranks) origin -= common.num_ranks;
    const std::uint32_t owed = __ldg(task.route.present + origin * static_cast<unsigned>(task.small.tokens) + token);
    std::byte* to = window_of(common, origin) + task.small.row(call.epoch, common.rank, token);
#pragma unroll 1
    for (unsigned base = 0; base < static_cast<unsigned>(task.row_lines); base += kLinesAtOnce * kLinesOfBlock) {
      const unsigned line = base + line_of_thread();
      const Parts parts = read_row<Wire>(task, origin, token, line);
      if (call.start.failed != 0 || call.aborted) return false;
      if (owed == 0) break;
      store_lines(to, parts, line, task.row_lines, call.flag);
    }
  }
  return true;
}

// What a warp works on.
struct Place {
  unsigned token;
  unsigned line;  // the thread's first
};

// Some of the ranks that owe a row of a token, ascending.
struct Owners {
  int ranks[kOwnersAtOnce];  // NOLINT(modernize-avoid-c-arrays): device code
  int count;
};

// Takes the lowest ranks out.
__device__ __forceinline__ Owners take_owners(std::uint32_t& left) {
  Owners owners{};
#pragma unroll
  for (int k = 0; k < kOwnersAtOnce; ++k) {
    if (left == 0) break;
    owners.ranks[k] = __ffs(static_cast<int>(left)) - 1;
    left &= left - 1;
    ++owners.count;
  }
  return owners;
}

struct PartsOfOwners {
  Parts of[kOwnersAtOnce];  // NOLINT(modernize-avoid-c-arrays): device code
};

// By one lane, when it waits long for one of the owners: whether the operation is given up.
__device__ __noinline__ bool any_gave_up(const CombineTask& task,
                                         const Owners& owners,
                                         unsigned token,
                                         const Call& call) {
  const Common& common = task.common;
  std::uint32_t* state = task.route.state + kSmallCombineAborted;
  for (int k = 0; k < owners.count; ++k) {
    if (owners.ranks[k] == common.rank) continue;
    const Awaited awaited{owners.ranks[k], Phase::kCombine, call.epoch};
    if (given_up_plainly(common, state, awaited)) return true;
    const std::byte* row = window_of(common, common.rank) + task.small.row(call.epoch, awaited.peer, token);
    const std::uint64_t seen = load_pair_system(row + (kLineThreads - 1) * sizeof(Pair)).second;
    if (seen == call.flag || !same_epoch(seen, call.flag)) continue;
    give_up_small(common, state, NoticeKind::kMismatch, awaited);
    return true;
  }
  return false;
}

// By one warp: its lines of the rows of these owners, waited for together; false when they do not come.
template <class Wire>
__device__ __forceinline__ bool take_rows(
    const CombineTask& task, const Owners& owners, const Place& place, const Call& call, PartsOfOwners& rows) {
  const Common& common = task.common;
  const std::byte* window = window_of(common, common.rank);
#pragma unroll
  for (int k = 0; k < kOwnersAtOnce; ++k) {
    if (k < owners.count && owners.ranks[k] == common.rank)
      rows.of[k] = read_row<Wire>(task, common.rank, place.token, place.line);
  }
  Awaited awaited{common.rank, Phase::kCombine, call.epoch};
  const auto ready = [&] {
    std::uint32_t missing = 0;
#pragma unroll
    for (int k = 0; k < kOwnersAtOnce; ++k) {
      if (k >= owners.count || owners.ranks[k] == common.rank) continue;
      const std::byte* lines = window + task.small.row(call.epoch, owners.ranks[k], place.token);
      if (!load_lines(lines, rows.of[k], place.line, task.row_lines, call.flag)) missing |= 1U << k;
    }
    missing = __reduce_or_sync(kAllLanes, missing);
#pragma unroll
    for (int k = 0; k < kOwnersAtOnce; ++k) {
      if ((missing >> k & 1U) != 0) awaited.peer = owners.ranks[k];
    }
    return missing == 0;
  };
  return wait_as_warp(common, awaited, ready, [&] { return any_gave_up(task, owners, place.token, call); });
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

// By one warp: some lines of a token's sum; false when this rank does not go on with the operation.
template <class Wire, class To>
__device__ __forceinline__ bool sum_lines(const CombineTask& task,
                                          std::uint32_t ranks,
                                          const Place& place,
                                          const Call& call) {
  constexpr int kElements = kPerWord<Wire>;
  float sums[kLinesAtOnce][2][kElements] = {};  // NOLINT(modernize-avoid-c-arrays): device code
#pragma unroll 1
  while (ranks != 0) {
    const Owners owners = take_owners(ranks);
    PartsOfOwners rows{};
    if (!take_rows<Wire>(task, owners, place, call, rows)) return false;
#pragma unroll
    for (int k = 0; k < kOwnersAtOnce; ++k) {
      if (k >= owners.count) break;
#pragma unroll
      for (int i = 0; i < kLinesAtOnce; ++i) {
        add_word<Wire>(sums[i][0], rows.of[k].pairs[i].first);
        add_word<Wire>(sums[i][1], rows.of[k].pairs[i].second);  // of a flag's word nobody looks at the sum
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kLinesAtOnce; ++i) {
    const unsigned line = place.line + i * kLinesOfBlock;
    if (line >= static_cast<unsigned>(task.row_lines)) break;
    const std::int64_t first = row_offset_of(line) / sizeof(typename Wire::Bits);
    store_sums<Wire, To>(task, place.token, first, sums[i][0]);
    if (!holds_flag()) store_sums<Wire, To>(task, place.token, first + kElements, sums[i][1]);
  }
  return true;
}

// Tokens from the last block on, so that with few of them nobody both pushes and sums.
template <class Wire, class To>
__device__ __forceinline__ void sum(const CombineTask& task, const Call& call) {
  const std::uint32_t tokens = task.route.state[kRouteTokens];
#pragma unroll 1
  for (unsigned token = gridDim.x - 1 - blockIdx.x; token < tokens; token += gridDim.x) {
    const std::uint32_t ranks = __ldg(task.route.ranks_of_token + token);
#pragma unroll 1
    for (unsigned base = 0; base < static_cast<unsigned>(task.row_lines); base += kLinesAtOnce * kLinesOfBlock) {
      if (!sum_lines<Wire, To>(task, ranks, {token, base + line_of_thread()}, call)) return;
    }
  }
}

// By one block, for the rounds that follow; no other one looks at any of it.
__device__ void settle(const CombineTask& task) {
  const Common& common = task.common;
  for (int rank = static_cast<int>(threadIdx.x); rank < common.num_ranks; rank += kThreads)
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
  combine_kernel<Kernels>(task.rows_dtype, task.output_dtype)<<<blocks, kThreads, 0, stream>>>(task);
  check(cudaGetLastError(), "launching a small combine");
}

}  // namespace tokenyard::engine::cuda
