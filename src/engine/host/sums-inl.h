// SPDX-License-Identifier: Apache-2.0
// Sums of rows, plain and weighted: blocks of columns in registers. Included once per instruction set, like rows-inl.h.
// Thread rule: pure functions of the memory they are given.
#if defined(TOKENYARD_ENGINE_HOST_SUMS_INL_H) == defined(HWY_TARGET_TOGGLE)
  #ifdef TOKENYARD_ENGINE_HOST_SUMS_INL_H
    #undef TOKENYARD_ENGINE_HOST_SUMS_INL_H
  #else
    #define TOKENYARD_ENGINE_HOST_SUMS_INL_H
  #endif

  #include <hwy/highway.h>

  #include <algorithm>
  #include <cmath>
  #include <cstddef>
  #include <cstdint>
  #include <type_traits>

  #include "engine/host/plain_stores.h"
  #include "engine/host/rows-inl.h"
  #include "engine/host/rows.h"
  #include "engine/host/wire_rows.h"

HWY_BEFORE_NAMESPACE();

namespace tokenyard::engine::host::HWY_NAMESPACE {

// Calls add(row, format, weight) for each term of a sum, in order.
struct Unweighted {};

template <class From, class To, class Add>
HWY_INLINE void for_each_term(const RowSum& sum, const Add& add) {
  for (const std::byte* row : sum.rows)
    add(row, From(), Unweighted());
  for (const std::byte* bias : sum.biases)
    add(bias, To(), Unweighted());
}

template <class From, class To, class Add>
HWY_INLINE void for_each_term(const WeightedSum& sum, const Add& add) {
  for (std::size_t r = 0; r < sum.rows.size(); ++r)
    add(sum.rows[r], From(), sum.weights[r]);
}

  #if HWY_TARGET == HWY_SCALAR

HWY_INLINE float with_term(float total, float value, Unweighted /*weight*/) {
  return total + value;
}

HWY_INLINE float with_term(float total, float value, float weight) {
  return std::fma(weight, value, total);
}

template <class From, class To, class Sum>
void sum_elements(const Sum& sum) {
  for (std::size_t i = 0; i < static_cast<std::size_t>(sum.n); ++i) {
    float total = 0.0f;
    for_each_term<From, To>(sum, [&](const std::byte* row, auto format, auto weight) {
      total = with_term(total, load_element<decltype(format)>(row, i), weight);
    });
    store_element<To>(sum.output, i, total);
  }
}

  #else  // HWY_TARGET == HWY_SCALAR

    #if (HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2 && !defined(HWY_DISABLE_BMI2_FMA)) || HWY_ARCH_ARM_A64
inline constexpr bool kFusesMulAdd = true;
    #else
inline constexpr bool kFusesMulAdd = false;
    #endif

// x * y + z with one rounding. What Highway's MulAdd does without an instruction for it rounds twice.
HWY_INLINE Floats fused(Floats x, Floats y, Floats z) {
  if constexpr (kFusesMulAdd) {
    return hn::MulAdd(x, y, z);
  } else {
    constexpr std::size_t kLanes = HWY_MAX_BYTES / sizeof(float);
    HWY_ALIGN float xs[kLanes];  // NOLINT(modernize-avoid-c-arrays): see rows-inl.h
    HWY_ALIGN float ys[kLanes];  // NOLINT(modernize-avoid-c-arrays): see rows-inl.h
    HWY_ALIGN float zs[kLanes];  // NOLINT(modernize-avoid-c-arrays): see rows-inl.h
    hn::Store(x, FloatTag(), xs);
    hn::Store(y, FloatTag(), ys);
    hn::Store(z, FloatTag(), zs);
    for (std::size_t i = 0; i < num_lanes(); ++i)
      zs[i] = std::fma(xs[i], ys[i], zs[i]);
    return hn::Load(FloatTag(), zs);
  }
}

HWY_INLINE Floats with_term(Floats total, Floats value, Unweighted /*weight*/) {
  return hn::Add(total, value);
}

HWY_INLINE Floats with_term(Floats total, Floats value, float weight) {
  return fused(hn::Set(FloatTag(), weight), value, total);
}

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

  template <bool kStream, class Sum>
  static HWY_INLINE void sum_block(const Sum& sum, std::size_t first) {
    const ByteTag tag;
    const std::size_t step = hn::Lanes(tag);
    Floats low0 = hn::Zero(FloatTag());
    Floats low1 = low0, low2 = low0, low3 = low0, high0 = low0, high1 = low0, high2 = low0, high3 = low0;
    const auto add = [&](const std::byte* row, auto /*format*/, auto weight) HWY_ATTR {
      const std::uint8_t* from = bytes_of(row) + first * kSize;
      const auto v0 = hn::BitCast(WordTag(), hn::LoadU(tag, from));
      const auto v1 = hn::BitCast(WordTag(), hn::LoadU(tag, from + step));
      const auto v2 = hn::BitCast(WordTag(), hn::LoadU(tag, from + 2 * step));
      const auto v3 = hn::BitCast(WordTag(), hn::LoadU(tag, from + 3 * step));
      low0 = with_term(low0, decode_low(v0), weight);
      high0 = with_term(high0, decode_high(v0), weight);
      low1 = with_term(low1, decode_low(v1), weight);
      high1 = with_term(high1, decode_high(v1), weight);
      low2 = with_term(low2, decode_low(v2), weight);
      high2 = with_term(high2, decode_high(v2), weight);
      low3 = with_term(low3, decode_low(v3), weight);
      high3 = with_term(high3, decode_high(v3), weight);
    };
    for_each_term<protocol::Bf16, protocol::Bf16>(sum, add);
    std::uint8_t* to = bytes_of(sum.output) + first * kSize;
    store_bytes<kStream>(hn::BitCast(tag, encode_pairs(low0, high0)), to);
    store_bytes<kStream>(hn::BitCast(tag, encode_pairs(low1, high1)), to + step);
    store_bytes<kStream>(hn::BitCast(tag, encode_pairs(low2, high2)), to + 2 * step);
    store_bytes<kStream>(hn::BitCast(tag, encode_pairs(low3, high3)), to + 3 * step);
  }

  // At most unit() elements.
  template <class Sum>
  static HWY_INLINE void sum_part(const Sum& sum, std::size_t first, std::size_t count) {
    const ByteTag tag;
    const std::size_t bytes = count * kSize;
    Floats low = hn::Zero(FloatTag());
    Floats high = low;
    const auto add = [&](const std::byte* row, auto /*format*/, auto weight) HWY_ATTR {
      const std::uint8_t* from = bytes_of(row) + first * kSize;
      const auto loaded = count == unit() ? hn::LoadU(tag, from) : load_part(tag, from, bytes);
      const auto pairs = hn::BitCast(WordTag(), loaded);
      low = with_term(low, decode_low(pairs), weight);
      high = with_term(high, decode_high(pairs), weight);
    };
    for_each_term<protocol::Bf16, protocol::Bf16>(sum, add);
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

  template <bool kStream, class Sum>
  static HWY_INLINE void sum_block(const Sum& sum, std::size_t first) {
    const std::size_t lanes = num_lanes();
    Floats sum0 = hn::Zero(FloatTag());
    Floats sum1 = sum0, sum2 = sum0, sum3 = sum0;
    const auto add = [&](const std::byte* row, auto format, auto weight) HWY_ATTR {
      using Format = decltype(format);
      sum0 = with_term(sum0, load<Format>(row, first), weight);
      sum1 = with_term(sum1, load<Format>(row, first + lanes), weight);
      sum2 = with_term(sum2, load<Format>(row, first + 2 * lanes), weight);
      sum3 = with_term(sum3, load<Format>(row, first + 3 * lanes), weight);
    };
    for_each_term<From, To>(sum, add);
    std::uint8_t* to = bytes_of(sum.output) + first * kSize;
    store_two<kStream>(sum0, sum1, to);
    store_two<kStream>(sum2, sum3, to + 2 * lanes * kSize);
  }

  // At most unit() elements.
  template <class Sum>
  static HWY_INLINE void sum_part(const Sum& sum, std::size_t first, std::size_t count) {
    Floats total = hn::Zero(FloatTag());
    const auto add = [&](const std::byte* row, auto format, auto weight) HWY_ATTR {
      using Format = decltype(format);
      constexpr std::size_t kFormatSize = sizeof(typename Format::Bits);
      const auto bytes = load_part(CodeBytesTag<Format>(), bytes_of(row) + first * kFormatSize, count * kFormatSize);
      total = with_term(total, decode_bytes<Format>(bytes), weight);
    };
    for_each_term<From, To>(sum, add);
    const auto bytes = encode_bytes<To>(total);
    store_part(bytes, CodeBytesTag<To>(), bytes_of(sum.output) + first * kSize, count * kSize);
  }
};

template <class Kind, bool kStream, class Sum>
HWY_INLINE void sum_range(const Sum& sum, std::size_t first, std::size_t end) {
  for (; first + Kind::block() <= end; first += Kind::block())
    Kind::template sum_block<kStream>(sum, first);
  for (; first < end; first += Kind::unit())
    Kind::sum_part(sum, first, std::min(Kind::unit(), end - first));
}

template <class From, class To, class Sum>
HWY_INLINE void sum_elements(const Sum& sum) {
  constexpr bool kBf16Only = std::is_same_v<From, protocol::Bf16> && std::is_same_v<To, protocol::Bf16>;
  using Kind = std::conditional_t<kBf16Only, PairSum, LaneSum<From, To>>;
  const auto n = static_cast<std::size_t>(sum.n);
  const std::size_t head = bytes_to_line(sum.output);
  if (kPlainStores || !sum.stream || head % Kind::kSize != 0 || head / Kind::kSize >= n) {
    return sum_range<Kind, false>(sum, 0, n);
  }
  sum_range<Kind, false>(sum, 0, head / Kind::kSize);
  sum_range<Kind, true>(sum, head / Kind::kSize, n);
}

  #endif  // HWY_TARGET == HWY_SCALAR

}  // namespace tokenyard::engine::host::HWY_NAMESPACE

HWY_AFTER_NAMESPACE();

#endif  // TOKENYARD_ENGINE_HOST_SUMS_INL_H
