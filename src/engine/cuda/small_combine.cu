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

template <class Wire>
__device__ int words_of_row(const CombineTask& task) {
  return static_cast<int>(words_of(task.hidden * static_cast<std::int64_t>(sizeof(typename Wire::Bits))));
}

// Word `index` of a row of expert output as it crosses.
template <class Wire>
__device__ std::uint64_t wire_word(const CombineTask& task, const std::byte* row, int index) {
  if (task.from_dtype == task.rows_dtype)
    return load_word(row, static_cast<int>(task.row_bytes), index, task.unit >= 8);
  constexpr int kElements = kPerWord<Wire>;
  const std::int64_t first = std::int64_t{index} * kElements;
  std::uint64_t word = 0;
  for (int k = 0; k < kElements && first + k < task.hidden; ++k)
    word |= encode_wire<Wire>(decode_output(task.from_dtype, row, first + k)) << (64 / kElements * k);
  return word;
}

template <class Wire>
__device__ Shares read_row(const CombineTask& task, int source, std::int64_t token, int first_line) {
  const std::byte* row = task.from + source * task.from_block_stride + token * task.from_row_stride;
  const int num_words = words_of_row<Wire>(task);
  Shares shares{};
  for_shares(shares, first_line, num_words, [&](Pair& pair, int word) {
    pair.first = wire_word<Wire>(task, row, word);
    if (!holds_flag() && word + 1 < num_words) pair.second = wire_word<Wire>(task, row, word + 1);
  });
  return shares;
}

// What a warp works on.
struct Place {
  std::uint32_t epoch;
  std::int64_t token;
  int line;  // the thread's first
};

__device__ std::uint64_t flag_of_rows(const CombineTask& task, std::uint32_t epoch) {
  return flag_of(epoch, static_cast<std::uint32_t>(task.hidden));
}

// By blocks: the rows that this rank owes others. A row is read before it is known whether it is owed.
template <class Wire>
__device__ void push(const CombineTask& task, std::uint32_t epoch) {
  const Common& common = task.common;
  const int num_words = words_of_row<Wire>(task);
  const std::uint64_t flag = flag_of_rows(task, epoch);
  const int others = common.num_ranks - 1;
  for (std::int64_t item = blockIdx.x; item < task.tokens_per_rank * others; item += gridDim.x) {
    const std::int64_t token = item / others;
    const auto origin = static_cast<int>((common.rank + 1 + item % others) % common.num_ranks);
    const std::uint32_t owed = __ldg(task.route.present + origin * task.small.tokens + token);
    std::byte* to = window_of(common, origin) + task.small.row(epoch, common.rank, token);
    for (int base = 0; base * kLineWords < num_words; base += kLinesAtOnce * kLinesOfBlock) {
      const int line = base + line_of_thread();
      const Shares shares = read_row<Wire>(task, origin, token, line);
      if (owed == 0) break;
      store_shares(to, shares, line, num_words, flag);
    }
  }
}

// Some of the ranks that owe a row of a token, ascending.
struct Owners {
  int ranks[kOwnersAtOnce];  // NOLINT(modernize-avoid-c-arrays): device code
  int count;
};

// Takes the lowest ranks out of `word`, which holds those from `base` on.
__device__ Owners take_owners(std::uint32_t& word, int base) {
  Owners owners{};
#pragma unroll
  for (int k = 0; k < kOwnersAtOnce; ++k) {
    if (word == 0) break;
    owners.ranks[k] = base + __ffs(static_cast<int>(word)) - 1;
    word &= word - 1;
    ++owners.count;
  }
  return owners;
}

struct SharesOfOwners {
  Shares of[kOwnersAtOnce];  // NOLINT(modernize-avoid-c-arrays): device code
};

// By one lane, when it waits long for one of the owners: whether the operation is given up.
__device__ bool any_gave_up(const CombineTask& task, const Owners& owners, const Place& place) {
  const Common& common = task.common;
  const std::uint64_t flag = flag_of_rows(task, place.epoch);
  std::uint32_t* state = task.route.state + kSmallCombineAborted;
  for (int k = 0; k < owners.count; ++k) {
    if (owners.ranks[k] == common.rank) continue;
    const Awaited awaited{owners.ranks[k], Phase::kCombine, place.epoch};
    if (given_up_plainly(common, state, awaited)) return true;
    const std::byte* row = window_of(common, common.rank) + task.small.row(place.epoch, awaited.peer, place.token);
    const std::uint64_t seen = load_pair_system(row + (kLineThreads - 1) * sizeof(Pair)).second;
    if (seen == flag || !same_epoch(seen, flag)) continue;
    give_up_small(common, state, NoticeKind::kMismatch, awaited);
    return true;
  }
  return false;
}

// By one warp: its lines of the rows of these owners, waited for together; false when they do not come.
template <class Wire>
__device__ bool take_rows(const CombineTask& task, const Owners& owners, const Place& place, SharesOfOwners& rows) {
  const Common& common = task.common;
  const int num_words = words_of_row<Wire>(task);
  const std::uint64_t flag = flag_of_rows(task, place.epoch);
  const std::byte* window = window_of(common, common.rank);
#pragma unroll
  for (int k = 0; k < kOwnersAtOnce; ++k) {
    if (k < owners.count && owners.ranks[k] == common.rank)
      rows.of[k] = read_row<Wire>(task, common.rank, place.token, place.line);
  }
  Awaited awaited{common.rank, Phase::kCombine, place.epoch};
  const auto ready = [&] {
    std::uint32_t missing = 0;
#pragma unroll
    for (int k = 0; k < kOwnersAtOnce; ++k) {
      if (k >= owners.count || owners.ranks[k] == common.rank) continue;
      const std::byte* lines = window + task.small.row(place.epoch, owners.ranks[k], place.token);
      if (!load_shares(lines, rows.of[k], place.line, num_words, flag)) missing |= 1U << k;
    }
    missing = __reduce_or_sync(kAllLanes, missing);
    if (missing != 0) awaited.peer = owners.ranks[__ffs(static_cast<int>(missing)) - 1];
    return missing == 0;
  };
  return wait_as_warp(common, awaited, ready, [&] { return any_gave_up(task, owners, place); });
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

// The sums of one word's elements, with biases, to the output.
template <class Wire, class To>
__device__ void store_sums(const CombineTask& task, std::int64_t token, int word, float* sums) {
  constexpr int kElements = kPerWord<Wire>;
  using Elements = Pack<To, kElements>;
  const std::int64_t first = std::int64_t{word} * kElements;
  const bool whole = task.vectors && first + kElements <= task.hidden;
  const auto count = static_cast<int>(min(static_cast<std::int64_t>(kElements), task.hidden - first));
  for (unsigned b = 0; b < task.bias.size(); ++b) {
    if (task.bias[b] == nullptr) continue;
    const auto* bias = reinterpret_cast<const typename To::Bits*>(task.bias[b] + token * task.bias_stride[b]) + first;
    Elements elements{};
    if (whole) {
      elements = *reinterpret_cast<const Elements*>(bias);
    } else {
      for (int i = 0; i < count; ++i)
        elements.bits[i] = bias[i];
    }
#pragma unroll
    for (int i = 0; i < kElements; ++i)
      sums[i] = __fadd_rn(sums[i], protocol::decode<To>(elements.bits[i]));
  }
  Elements elements{};
#pragma unroll
  for (int i = 0; i < kElements; ++i)
    elements.bits[i] = protocol::encode<To>(sums[i]);
  auto* output = reinterpret_cast<typename To::Bits*>(task.output + token * task.output_stride) + first;
  if (whole) {
    *reinterpret_cast<Elements*>(output) = elements;
    return;
  }
  for (int i = 0; i < count; ++i)
    output[i] = elements.bits[i];
}

// By one warp: some lines of a token's sum; false when this rank does not go on with the operation.
template <class Wire, class To>
__device__ bool sum_lines(const CombineTask& task, const Place& place) {
  constexpr int kElements = kPerWord<Wire>;
  const int num_words = words_of_row<Wire>(task);
  float sums[kLinesAtOnce][2][kElements] = {};  // NOLINT(modernize-avoid-c-arrays): device code
  for (int w = 0; w < task.route.words; ++w) {
    std::uint32_t word = __ldg(task.route.ranks_of_token + place.token * task.route.words + w);
    while (word != 0) {
      const Owners owners = take_owners(word, w * kWordBits);
      SharesOfOwners rows{};
      if (!take_rows<Wire>(task, owners, place, rows)) return false;
#pragma unroll
      for (int k = 0; k < kOwnersAtOnce; ++k) {
        if (k >= owners.count) break;
#pragma unroll
        for (int i = 0; i < kLinesAtOnce; ++i) {
          add_word<Wire>(sums[i][0], rows.of[k].pairs[i].first);
          if (!holds_flag()) add_word<Wire>(sums[i][1], rows.of[k].pairs[i].second);
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kLinesAtOnce; ++i) {
    const int word = (place.line + i * kLinesOfBlock) * kLineWords + 2 * place_in_line();
    if (word < num_words) store_sums<Wire, To>(task, place.token, word, sums[i][0]);
    if (word + 1 < num_words && !holds_flag()) store_sums<Wire, To>(task, place.token, word + 1, sums[i][1]);
  }
  return true;
}

// Tokens from the last block on, so that with few of them nobody both pushes and sums.
template <class Wire, class To>
__device__ void sum(const CombineTask& task, std::uint32_t epoch) {
  const int num_words = words_of_row<Wire>(task);
  const std::int64_t tokens = task.route.state[kRouteTokens];
  for (std::int64_t token = gridDim.x - 1 - blockIdx.x; token < tokens; token += gridDim.x) {
    for (int base = 0; base * kLineWords < num_words; base += kLinesAtOnce * kLinesOfBlock) {
      if (!sum_lines<Wire, To>(task, {epoch, token, base + line_of_thread()})) return;
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
  const Start start = read_start(common, protocol::kCombinePhase);
  const std::uint32_t dispatch = read_start(common, protocol::kDispatchPhase).epoch;
  const bool aborted = load_relaxed_device(task.route.state + kSmallRouteAborted) == tag_of(dispatch);
  // No rank combines a round that was given up, so it uses up no epoch.
  if (start.failed != 0 || aborted) return;
  const std::uint32_t epoch = start.epoch + (task.sends ? 1U : 0U);
  if (task.sends) push<Wire>(task, epoch);
  if (task.receives) sum<Wire, To>(task, epoch);
  __syncthreads();
  if (task.sends) advance_block(common, protocol::kCombinePhase, epoch);
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
