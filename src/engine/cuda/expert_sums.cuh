// SPDX-License-Identifier: Apache-2.0
// Weighted sums of what experts gave, and rows of combine's wire: values of a dtype, or logarithms.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "engine/cuda/copies.cuh"
#include "engine/cuda/routing.cuh"
#include "engine/cuda/sums.cuh"
#include "protocol/casts.h"
#include "protocol/log_wire.h"

namespace tokenyard::engine::cuda {

inline constexpr int kReturnedAtOnce = 8;

// Pack `index` of each row, in order.
template <class From, int N>
__device__ void add_rows(float (&sums)[N], const std::byte* const* rows, int count, int index) {
  for (int first = 0; first < count; first += kReturnedAtOnce) {
    Pack<From, N> packs[kReturnedAtOnce];
#pragma unroll
    for (int k = 0; k < kReturnedAtOnce; ++k) {
      if (first + k < count) packs[k] = reinterpret_cast<const Pack<From, N>*>(rows[first + k])[index];
    }
#pragma unroll
    for (int k = 0; k < kReturnedAtOnce; ++k) {
      if (first + k < count) add_pack<From, N>(sums, packs[k]);
    }
  }
}

// Rounds once.
template <class To, int N>
__device__ void store_pack(std::byte* row, int index, const float (&sums)[N]) {
  reinterpret_cast<Pack<To, N>*>(row)[index] = round_sums<To, N>(sums);
}

// Rows and what each weighs, in the order of a token's picks; in the shared memory of the threads that sum them.
struct WeighedRows {
  const std::byte* rows[kMaxTopK];  // NOLINT(modernize-avoid-c-arrays): device code
  float weights[kMaxTopK];          // NOLINT(modernize-avoid-c-arrays): device code
  int count;
};

// N values from element `first` on: sum = fma(weight, value, sum) for each row. Rows are accessed 16 bytes at a time
// where N values are as many.
template <class From, int N>
__device__ void add_weighed(float (&sums)[N], const WeighedRows& rows, std::int64_t first) {
  constexpr int kSize = static_cast<int>(sizeof(typename From::Bits));
  constexpr int kPack = N * kSize >= 16 ? 16 / kSize : N;
  constexpr int kPacks = N / kPack;
  constexpr int kAtOnce = kPacks >= 4 ? 2 : 8 / kPacks;
  for (int begin = 0; begin < rows.count; begin += kAtOnce) {
    Pack<From, kPack> packs[kAtOnce][kPacks];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (begin + k >= rows.count) continue;
      const auto* row = reinterpret_cast<const typename From::Bits*>(rows.rows[begin + k]) + first;
#pragma unroll
      for (int p = 0; p < kPacks; ++p)
        packs[k][p] = reinterpret_cast<const Pack<From, kPack>*>(row)[p];
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (begin + k >= rows.count) continue;
      const float weight = rows.weights[begin + k];
#pragma unroll
      for (int i = 0; i < N; ++i)
        sums[i] = __fmaf_rn(weight, protocol::decode<From>(packs[k][i / kPack].bits[i % kPack]), sums[i]);
    }
  }
}

// A row of combine as values of one dtype. `vectors`: all may be accessed by 16 bytes.
template <class Wire>
struct PlainWire {
  template <class From>
  static __device__ void reduce(std::byte* to, const WeighedRows& rows, std::int64_t hidden, bool vectors, Crew crew) {
    constexpr int kSize = static_cast<int>(std::max(sizeof(typename From::Bits), sizeof(typename Wire::Bits)));
    if (vectors && hidden % (16 / kSize) == 0) {
      reduce_packs<From, 16 / kSize>(to, rows, hidden, crew);
    } else {
      reduce_packs<From, 1>(to, rows, hidden, crew);
    }
  }

  template <class To>
  static __device__ void sum(
      std::byte* to, const std::byte* const* rows, int count, std::int64_t hidden, bool vectors) {
    constexpr int kSize = static_cast<int>(std::max(sizeof(typename To::Bits), sizeof(typename Wire::Bits)));
    if (vectors && hidden % (16 / kSize) == 0) {
      sum_packs<To, 16 / kSize>(to, rows, count, hidden);
    } else {
      sum_packs<To, 1>(to, rows, count, hidden);
    }
  }

 private:
  template <class From, int N>
  static __device__ void reduce_packs(std::byte* to, const WeighedRows& rows, std::int64_t hidden, Crew crew) {
    const auto packs = static_cast<int>(hidden / N);
    for (int i = crew.index; i < packs; i += crew.count) {
      float sums[N] = {};
      add_weighed<From, N>(sums, rows, std::int64_t{i} * N);
      store_pack<Wire, N>(to, i, sums);
    }
  }

  template <class To, int N>
  static __device__ void sum_packs(std::byte* to, const std::byte* const* rows, int count, std::int64_t hidden) {
    const auto packs = static_cast<int>(hidden / N);
    for (int i = static_cast<int>(threadIdx.x); i < packs; i += kThreads) {
      float sums[N] = {};
      add_rows<Wire, N>(sums, rows, count, i);
      store_pack<To, N>(to, i, sums);
    }
  }
};

// A row of combine as logarithms. A thread has 16 values, whose codes are 20 bytes; eight threads share a block.
struct LogWire {
  static constexpr int kValues = 16;
  static constexpr int kLanes = static_cast<int>(protocol::kLogBlock) / kValues;
  static constexpr int kWords = kValues * protocol::kLogCodeBits / 32;
  static constexpr int kCodeBytes = kWords * 4;

  // By whole warps.
  template <class From>
  static __device__ void reduce(std::byte* to, const WeighedRows& rows, std::int64_t hidden, bool vectors, Crew crew) {
    const auto n = static_cast<int>(hidden);
    const int units = (n + kValues - 1) / kValues;
    for (int first = 0; first < units; first += crew.count) {
      const int unit = first + crew.index;
      float sums[kValues] = {};
      if (vectors && (unit + 1) * kValues <= n) {
        add_weighed<From, kValues>(sums, rows, std::int64_t{unit} * kValues);
      } else {
        add_single_values<From>(sums, rows, unit * kValues, n);
      }
      store_codes(to, unit, n, sums);
    }
  }

  template <class To>
  static __device__ void sum(
      std::byte* to, const std::byte* const* rows, int count, std::int64_t hidden, bool vectors) {
    const auto n = static_cast<int>(hidden);
    for (int unit = static_cast<int>(threadIdx.x); unit * kValues < n; unit += kThreads) {
      float sums[kValues] = {};
      for (int i = 0; i < count; ++i)
        add_codes(sums, rows[i], unit, n);
      store_values<To>(to, unit, n, vectors, sums);
    }
  }

 private:
  template <class From>
  static __device__ void add_single_values(float (&sums)[kValues], const WeighedRows& rows, int first, int n) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      float one[1] = {};
      if (first + i < n) add_weighed<From, 1>(one, rows, first + i);
      sums[i] = one[0];
    }
  }

  static __device__ std::byte* code_at(std::byte* row, int unit) {
    return row + unit / kLanes * protocol::log_block_bytes(protocol::kLogBlock) + protocol::kLogHeaderBytes +
           unit % kLanes * kCodeBytes;
  }

  // Values behind the row's end are 0, and count for no scale.
  static __device__ void store_codes(std::byte* row, int unit, int n, const float (&values)[kValues]) {
    std::uint32_t smallest = protocol::kFloatMagnitude;
    std::uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const std::uint32_t magnitude = __float_as_uint(values[i]) & protocol::kFloatMagnitude;
      if (magnitude == 0 || magnitude >= protocol::kFloatInfinity) continue;
      smallest = min(smallest, magnitude);
      largest = max(largest, magnitude);
    }
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) {
      smallest = min(smallest, __shfl_xor_sync(kAllLanes, smallest, step));
      largest = max(largest, __shfl_xor_sync(kAllLanes, largest, step));
    }
    if (unit * kValues >= n) return;
    const protocol::LogScale scale = protocol::log_scale(smallest, largest);
    const float inverse = protocol::inverse_step(scale);
    std::uint32_t words[kWords] = {};
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const std::uint64_t code = protocol::encode_log_code(values[i], scale.lowest, inverse);
      const std::uint64_t placed = code << (i * protocol::kLogCodeBits % 32);
      const int word = i * protocol::kLogCodeBits / 32;
      words[word] |= static_cast<std::uint32_t>(placed);
      if (word + 1 < kWords) words[word + 1] |= static_cast<std::uint32_t>(placed >> 32);
    }
    std::byte* to = code_at(row, unit);
    if (unit % kLanes == 0) {
      reinterpret_cast<float*>(to)[-2] = scale.lowest;
      reinterpret_cast<float*>(to)[-1] = scale.step;
    }
    store_words(to, words, n - unit * kValues);
  }

  // The codes of at most `left` values, of a row that may end within them.
  static __device__ void store_words(std::byte* to, const std::uint32_t (&words)[kWords], int left) {
    const int bytes = left >= kValues ? kCodeBytes : (left * protocol::kLogCodeBits + 7) / 8;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      if (4 * w + 4 <= bytes) {
        reinterpret_cast<std::uint32_t*>(to)[w] = words[w];
        continue;
      }
      for (int b = 4 * w; b < bytes; ++b)
        to[b] = static_cast<std::byte>(words[w] >> (8 * (b - 4 * w)));
    }
  }

  // Rows on the wire have strides of 16 bytes, so a whole unit can be read also where the row ends within it.
  static __device__ void add_codes(float (&sums)[kValues], const std::byte* row, int unit, int n) {
    const std::byte* at = code_at(const_cast<std::byte*>(row), unit);
    const auto* header = reinterpret_cast<const float*>(at - unit % kLanes * kCodeBytes);
    const protocol::LogScale scale{.lowest = header[-2], .step = header[-1]};
    const int left = n - unit * kValues;
    const int bytes = left >= kValues ? kCodeBytes : (left * protocol::kLogCodeBits + 7) / 8;
    std::uint32_t words[kWords + 1] = {};
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      if (4 * w < bytes) words[w] = reinterpret_cast<const std::uint32_t*>(at)[w];
    }
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int bit = i * protocol::kLogCodeBits;
      const std::uint64_t both = static_cast<std::uint64_t>(words[bit / 32 + 1]) << 32 | words[bit / 32];
      const auto code = static_cast<std::uint32_t>(both >> (bit % 32)) & 0x3FFU;
      if (i < left) sums[i] = __fadd_rn(sums[i], protocol::decode_log_code(code, scale));
    }
  }

  template <class To>
  static __device__ void store_values(std::byte* row, int unit, int n, bool vectors, const float (&sums)[kValues]) {
    constexpr int kPack = 16 / static_cast<int>(sizeof(typename To::Bits));
    if (vectors && (unit + 1) * kValues <= n) {
#pragma unroll
      for (int p = 0; p < kValues / kPack; ++p) {
        float pack[kPack];
#pragma unroll
        for (int i = 0; i < kPack; ++i)
          pack[i] = sums[p * kPack + i];
        store_pack<To, kPack>(row, unit * (kValues / kPack) + p, pack);
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (unit * kValues + i < n)
        reinterpret_cast<typename To::Bits*>(row)[unit * kValues + i] = protocol::encode<To>(sums[i]);
    }
  }
};

}  // namespace tokenyard::engine::cuda
