// SPDX-License-Identifier: Apache-2.0
// How one block of columns of a row sum is computed in registers. Included once per instruction set by rows.cc, like
// rows-inl.h. Thread rule: pure functions of the memory they are given.
#if defined(TOKENYARD_ENGINE_HOST_SUMS_INL_H) == defined(HWY_TARGET_TOGGLE)
  #ifdef TOKENYARD_ENGINE_HOST_SUMS_INL_H
    #undef TOKENYARD_ENGINE_HOST_SUMS_INL_H
  #else
    #define TOKENYARD_ENGINE_HOST_SUMS_INL_H
  #endif

  #include <hwy/highway.h>

  #include <cstddef>
  #include <cstdint>

  #include "engine/host/rows-inl.h"
  #include "engine/host/rows.h"

HWY_BEFORE_NAMESPACE();

namespace tokenyard::engine::host::HWY_NAMESPACE {

  #if HWY_TARGET != HWY_SCALAR

template <bool kStream>
HWY_INLINE void store_bytes(hn::Vec<ByteTag> bytes, std::uint8_t* to) {
  if constexpr (kStream) {
    hn::Stream(bytes, ByteTag(), to);
  } else {
    hn::StoreU(bytes, ByteTag(), to);
  }
}

// Sums of bf16 rows to bf16. A vector holds pairs, which are summed apart and put together again.
struct PairSum {
  static constexpr std::size_t kSize = 2;

  static HWY_INLINE std::size_t block() { return 8 * num_lanes(); }

  static HWY_INLINE std::size_t unit() { return 2 * num_lanes(); }

  template <bool kStream>
  static HWY_INLINE void sum_block(const RowSum& sum, std::size_t first) {
    const ByteTag tag;
    const std::size_t step = hn::Lanes(tag);
    Floats low0 = hn::Zero(FloatTag());
    Floats low1 = low0, low2 = low0, low3 = low0, high0 = low0, high1 = low0, high2 = low0, high3 = low0;
    const auto add = [&](const std::byte* row) HWY_ATTR {
      const std::uint8_t* from = bytes_of(row) + first * kSize;
      const auto v0 = hn::BitCast(WordTag(), hn::LoadU(tag, from));
      const auto v1 = hn::BitCast(WordTag(), hn::LoadU(tag, from + step));
      const auto v2 = hn::BitCast(WordTag(), hn::LoadU(tag, from + 2 * step));
      const auto v3 = hn::BitCast(WordTag(), hn::LoadU(tag, from + 3 * step));
      low0 = hn::Add(low0, decode_low(v0));
      high0 = hn::Add(high0, decode_high(v0));
      low1 = hn::Add(low1, decode_low(v1));
      high1 = hn::Add(high1, decode_high(v1));
      low2 = hn::Add(low2, decode_low(v2));
      high2 = hn::Add(high2, decode_high(v2));
      low3 = hn::Add(low3, decode_low(v3));
      high3 = hn::Add(high3, decode_high(v3));
    };
    for (const std::byte* row : sum.rows)
      add(row);
    for (const std::byte* bias : sum.biases)
      add(bias);
    std::uint8_t* to = bytes_of(sum.output) + first * kSize;
    store_bytes<kStream>(hn::BitCast(tag, encode_pairs(low0, high0)), to);
    store_bytes<kStream>(hn::BitCast(tag, encode_pairs(low1, high1)), to + step);
    store_bytes<kStream>(hn::BitCast(tag, encode_pairs(low2, high2)), to + 2 * step);
    store_bytes<kStream>(hn::BitCast(tag, encode_pairs(low3, high3)), to + 3 * step);
  }

  // At most unit() elements.
  static HWY_INLINE void sum_part(const RowSum& sum, std::size_t first, std::size_t count) {
    const ByteTag tag;
    const std::size_t bytes = count * kSize;
    Floats low = hn::Zero(FloatTag());
    Floats high = low;
    const auto add = [&](const std::byte* row) HWY_ATTR {
      const std::uint8_t* from = bytes_of(row) + first * kSize;
      const auto loaded = count == unit() ? hn::LoadU(tag, from) : load_part(tag, from, bytes);
      const auto pairs = hn::BitCast(WordTag(), loaded);
      low = hn::Add(low, decode_low(pairs));
      high = hn::Add(high, decode_high(pairs));
    };
    for (const std::byte* row : sum.rows)
      add(row);
    for (const std::byte* bias : sum.biases)
      add(bias);
    store_part(hn::BitCast(tag, encode_pairs(low, high)), tag, bytes_of(sum.output) + first * kSize, bytes);
  }
};

// All other sums, one code per lane.
template <class From, class To>
struct LaneSum {
  static constexpr std::size_t kSize = sizeof(typename To::Bits);

  static HWY_INLINE std::size_t block() { return 4 * num_lanes(); }

  static HWY_INLINE std::size_t unit() { return num_lanes(); }

  template <class Format>
  static HWY_INLINE Floats load(const std::byte* row, std::size_t first) {
    const std::uint8_t* from = bytes_of(row) + first * sizeof(typename Format::Bits);
    return decode_bytes<Format>(hn::LoadU(CodeBytesTag<Format>(), from));
  }

  // Stores as whole vectors, because only those can be streamed on every machine.
  template <bool kStream>
  static HWY_INLINE void store_two(Floats v0, Floats v1, std::uint8_t* to) {
    const ByteTag tag;
    const auto b0 = encode_bytes<To>(v0);
    const auto b1 = encode_bytes<To>(v1);
    if constexpr (kSize == sizeof(float)) {
      store_bytes<kStream>(b0, to);
      store_bytes<kStream>(b1, to + hn::Lanes(tag));
    } else {
      store_bytes<kStream>(hn::Combine(tag, b1, b0), to);
    }
  }

  template <bool kStream>
  static HWY_INLINE void sum_block(const RowSum& sum, std::size_t first) {
    const std::size_t lanes = num_lanes();
    Floats sum0 = hn::Zero(FloatTag());
    Floats sum1 = sum0, sum2 = sum0, sum3 = sum0;
    const auto add = [&](const std::byte* row, auto format) HWY_ATTR {
      using Format = decltype(format);
      sum0 = hn::Add(sum0, load<Format>(row, first));
      sum1 = hn::Add(sum1, load<Format>(row, first + lanes));
      sum2 = hn::Add(sum2, load<Format>(row, first + 2 * lanes));
      sum3 = hn::Add(sum3, load<Format>(row, first + 3 * lanes));
    };
    for (const std::byte* row : sum.rows)
      add(row, From());
    for (const std::byte* bias : sum.biases)
      add(bias, To());
    std::uint8_t* to = bytes_of(sum.output) + first * kSize;
    store_two<kStream>(sum0, sum1, to);
    store_two<kStream>(sum2, sum3, to + 2 * lanes * kSize);
  }

  // At most unit() elements.
  static HWY_INLINE void sum_part(const RowSum& sum, std::size_t first, std::size_t count) {
    Floats total = hn::Zero(FloatTag());
    const auto add = [&](const std::byte* row, auto format) HWY_ATTR {
      using Format = decltype(format);
      constexpr std::size_t kFormatSize = sizeof(typename Format::Bits);
      const auto bytes = load_part(CodeBytesTag<Format>(), bytes_of(row) + first * kFormatSize, count * kFormatSize);
      total = hn::Add(total, decode_bytes<Format>(bytes));
    };
    for (const std::byte* row : sum.rows)
      add(row, From());
    for (const std::byte* bias : sum.biases)
      add(bias, To());
    const auto bytes = encode_bytes<To>(total);
    store_part(bytes, CodeBytesTag<To>(), bytes_of(sum.output) + first * kSize, count * kSize);
  }
};

  #endif  // HWY_TARGET != HWY_SCALAR

}  // namespace tokenyard::engine::host::HWY_NAMESPACE

HWY_AFTER_NAMESPACE();

#endif  // TOKENYARD_ENGINE_HOST_SUMS_INL_H
