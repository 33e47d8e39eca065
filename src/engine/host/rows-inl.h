// SPDX-License-Identifier: Apache-2.0
// Vector forms of protocol/casts.h: how a vector of codes is loaded, decoded to fp32, encoded and stored.
// Included once per instruction set by each source file that uses it, so it has a toggle where other headers have a
// guard, and it must be included after <hwy/foreach_target.h>. Thread rule: pure functions.
#if defined(TOKENYARD_ENGINE_HOST_ROWS_INL_H) == defined(HWY_TARGET_TOGGLE)
  #ifdef TOKENYARD_ENGINE_HOST_ROWS_INL_H
    #undef TOKENYARD_ENGINE_HOST_ROWS_INL_H
  #else
    #define TOKENYARD_ENGINE_HOST_ROWS_INL_H
  #endif

  #include <hwy/highway.h>

  #include <cstddef>
  #include <cstdint>
  #include <cstring>
  #include <type_traits>

  #include "tokenyard/tensor.h"

  #include "protocol/casts.h"

HWY_BEFORE_NAMESPACE();

namespace tokenyard::engine::host::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Calls function(Format()) for the dtype's format; the caller has checked that it has one.
template <class Function>
HWY_INLINE void with_format(Dtype dtype, const Function& function) {
  switch (dtype) {
    case Dtype::kBf16:
      return function(protocol::Bf16());
    case Dtype::kF16:
      return function(protocol::F16());
    case Dtype::kF32:
      return function(protocol::F32());
    case Dtype::kF8e4m3:
      return function(protocol::F8e4m3());
    default:
      return function(protocol::F8e5m2());
  }
}

  #if HWY_TARGET == HWY_SCALAR  // whose vectors of one lane cannot be taken apart into bytes

// Machines without vectors run the definition itself.
template <class Format>
float load_element(const std::byte* row, std::size_t i) {
  typename Format::Bits bits;
  std::memcpy(&bits, row + i * sizeof(bits), sizeof(bits));
  return protocol::decode<Format>(bits);
}

template <class Format>
void store_element(std::byte* row, std::size_t i, float value) {
  const typename Format::Bits bits = protocol::encode<Format>(value);
  std::memcpy(row + i * sizeof(bits), &bits, sizeof(bits));
}

  #else  // HWY_TARGET == HWY_SCALAR

using FloatTag = hn::ScalableTag<float>;
using WordTag = hn::RebindToUnsigned<FloatTag>;
using SignedTag = hn::RebindToSigned<FloatTag>;
using ByteTag = hn::Repartition<std::uint8_t, FloatTag>;
using Floats = hn::Vec<FloatTag>;
using Words = hn::Vec<WordTag>;  // one code per 32-bit lane, or two bf16

// As many codes of a format as there are fp32 lanes, and their bytes. Memory is loaded and stored as bytes, which is
// what makes any alignment right.
template <class Format>
using CodeTag = hn::Rebind<typename Format::Bits, FloatTag>;
template <class Format>
using CodeBytesTag = hn::Repartition<std::uint8_t, CodeTag<Format>>;

HWY_INLINE const std::uint8_t* bytes_of(const std::byte* from) {
  return reinterpret_cast<const std::uint8_t*>(from);
}

HWY_INLINE std::uint8_t* bytes_of(std::byte* to) {
  return reinterpret_cast<std::uint8_t*>(to);
}

HWY_INLINE std::size_t num_lanes() {
  return hn::Lanes(FloatTag());
}

// Bytes from `to` to the next boundary of a cache line and of a vector: streaming stores should fill whole lines.
HWY_INLINE std::size_t bytes_to_line(const std::byte* to) {
  const std::size_t line = HWY_MAX(std::size_t{64}, hn::Lanes(ByteTag()));
  return (line - reinterpret_cast<std::uintptr_t>(to) % line) % line;
}

// Stand in for a load or store that would reach past the end of a row. Their buffers are C arrays because the members
// of std::array are not compiled for the instruction set of these functions, so they could not be inlined here.
template <class ByteVectorTag>
HWY_INLINE hn::Vec<ByteVectorTag> load_part(ByteVectorTag tag, const std::uint8_t* from, std::size_t bytes) {
  HWY_ALIGN std::uint8_t buffer[HWY_MAX_BYTES] = {};  // NOLINT(modernize-avoid-c-arrays): see above
  std::memcpy(buffer, from, bytes);
  return hn::Load(tag, buffer);
}

template <class ByteVectorTag>
HWY_INLINE void store_part(hn::Vec<ByteVectorTag> bytes_in, ByteVectorTag tag, std::uint8_t* to, std::size_t bytes) {
  HWY_ALIGN std::uint8_t buffer[HWY_MAX_BYTES];  // NOLINT(modernize-avoid-c-arrays): see above
  hn::Store(bytes_in, tag, buffer);
  std::memcpy(to, buffer, bytes);
}

template <class Format>
HWY_INLINE Words codes_of_bytes(hn::Vec<CodeBytesTag<Format>> bytes) {
  const auto codes = hn::BitCast(CodeTag<Format>(), bytes);
  if constexpr (sizeof(typename Format::Bits) == sizeof(float)) {
    return codes;
  } else {
    return hn::PromoteTo(WordTag(), codes);
  }
}

template <class Format>
HWY_INLINE hn::Vec<CodeBytesTag<Format>> bytes_of_codes(Words codes) {
  if constexpr (sizeof(typename Format::Bits) == sizeof(float)) {
    return hn::BitCast(CodeBytesTag<Format>(), codes);
  } else {
    return hn::BitCast(CodeBytesTag<Format>(), hn::TruncateTo(CodeTag<Format>(), codes));
  }
}

// protocol::decode on each lane; upper bits of a lane are 0.
template <class Format>
HWY_INLINE Floats decode_lanes(Words codes) {
  using C = protocol::CastConstants<Format>;
  const FloatTag floats;
  const WordTag words;
  const SignedTag signed_words;
  if constexpr (C::kShift == 0) {
    return hn::BitCast(floats, codes);
  } else if constexpr (C::kWideExponent) {
    return hn::BitCast(floats, hn::ShiftLeft<C::kShift>(codes));
  } else {
    const auto sign = hn::And(hn::ShiftLeft<31 - C::kSignBit>(codes), hn::Set(words, 0x80000000u));
    const auto magnitude_code = hn::And(codes, hn::Set(words, C::kMagnitude));
    const auto magnitude = hn::ShiftLeft<C::kShift>(magnitude_code);
    const auto raised = hn::Add(magnitude, hn::Set(words, C::kSmallestNormal));
    const auto smallest_normal = hn::BitCast(floats, hn::Set(words, C::kSmallestNormal));
    const auto denormal = hn::BitCast(words, hn::Sub(hn::BitCast(floats, raised), smallest_normal));
    auto value = hn::Add(magnitude, hn::Set(words, C::kRebias));
    const auto signed_magnitude = hn::BitCast(signed_words, magnitude);
    if constexpr (Format::kHasInfinity) {
      const auto last_finite = hn::Set(signed_words, std::int32_t((C::kMaxExponent << 23) - 1u));
      const auto special = hn::BitCast(words, hn::VecFromMask(signed_words, hn::Gt(signed_magnitude, last_finite)));
      value = hn::Add(value, hn::And(special, hn::Set(words, C::kInfinityRebias)));
    } else {
      const auto nan = hn::Eq(magnitude_code, hn::Set(words, C::kMagnitude));
      value = hn::IfThenElse(nan, hn::Set(words, protocol::kFloatNan), value);
    }
    const auto is_denormal = hn::Lt(signed_magnitude, hn::Set(signed_words, 1 << 23));
    value = hn::IfThenElse(hn::RebindMask(words, is_denormal), denormal, value);
    return hn::BitCast(floats, hn::Or(sign, value));
  }
}

// bf16 in the upper half of each lane, rounded; the lower half is left over from the rounding.
// A NaN may become anything.
HWY_INLINE Words round_number_to_upper_half(Floats value) {
  const WordTag words;
  const auto bits = hn::BitCast(words, value);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(words, 1u));
  return hn::Add(hn::Add(bits, hn::Set(words, 0x7FFFu)), odd);
}

HWY_INLINE Words round_to_upper_half(Floats value) {
  const WordTag words;
  const auto nan = hn::RebindMask(words, hn::IsNaN(value));
  return hn::IfThenElse(nan, hn::Set(words, protocol::kFloatNan), round_number_to_upper_half(value));
}

// protocol::encode on each lane; upper bits of a lane become 0.
template <class Format>
HWY_INLINE Words encode_lanes(Floats value) {
  using C = protocol::CastConstants<Format>;
  const FloatTag floats;
  const WordTag words;
  const SignedTag signed_words;
  const auto bits = hn::BitCast(words, value);
  if constexpr (C::kShift == 0) {
    const auto nan = hn::RebindMask(words, hn::IsNaN(value));
    return hn::IfThenElse(nan, hn::Set(words, Format::kNan), bits);
  } else if constexpr (C::kWideExponent) {
    return hn::ShiftRight<C::kShift>(round_to_upper_half(value));
  } else {
    const auto magnitude = hn::And(bits, hn::Set(words, protocol::kFloatMagnitude));
    const auto sign = hn::ShiftLeft<C::kSignBit>(hn::ShiftRight<31>(bits));
    const auto magic = hn::Set(words, C::kDenormalMagic);
    const auto sum = hn::Add(hn::BitCast(floats, magnitude), hn::BitCast(floats, magic));
    const auto denormal = hn::Sub(hn::BitCast(words, sum), magic);
    const auto odd = hn::And(hn::ShiftRight<C::kShift>(magnitude), hn::Set(words, 1u));
    const auto bias = hn::Set(words, (1u << (C::kShift - 1)) - 1u - C::kRebias);
    const auto normal = hn::ShiftRight<C::kShift>(hn::Add(hn::Add(magnitude, bias), odd));
    const auto signed_magnitude = hn::BitCast(signed_words, magnitude);
    const auto is_denormal = hn::Lt(signed_magnitude, hn::Set(signed_words, std::int32_t(C::kSmallestNormal)));
    const auto code = hn::IfThenElse(hn::RebindMask(words, is_denormal), denormal, normal);
    const auto largest = hn::Set(signed_words, std::int32_t(C::kOverflow));
    const auto finite = hn::BitCast(words, hn::Min(hn::BitCast(signed_words, code), largest));
    const auto nan = hn::RebindMask(words, hn::IsNaN(value));
    return hn::IfThenElse(nan, hn::Set(words, Format::kNan), hn::Or(sign, finite));
  }
}

    // x86 has exact f16 conversions from AVX2 on, which no mode of the thread disturbs. What Highway does elsewhere is
    // not always rounded right, so other machines take the integer path.
    // Better targets have smaller numbers.
    #if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2 && !defined(HWY_DISABLE_F16C)
inline constexpr bool kHasF16Casts = true;
    #else
inline constexpr bool kHasF16Casts = false;
    #endif

// A vector's worth of codes as they lie in memory, to and from fp32.
template <class Format>
HWY_INLINE Floats decode_bytes(hn::Vec<CodeBytesTag<Format>> bytes) {
  if constexpr (kHasF16Casts && std::is_same_v<Format, protocol::F16>) {
    return hn::PromoteTo(FloatTag(), hn::BitCast(hn::Rebind<hwy::float16_t, FloatTag>(), bytes));
  } else {
    return decode_lanes<Format>(codes_of_bytes<Format>(bytes));
  }
}

template <class Format>
HWY_INLINE hn::Vec<CodeBytesTag<Format>> encode_bytes(Floats value) {
  if constexpr (kHasF16Casts && std::is_same_v<Format, protocol::F16>) {
    const auto nan = hn::BitCast(FloatTag(), hn::Set(WordTag(), protocol::kFloatNan));  // becomes f16's
    const auto canonical = hn::IfThenElse(hn::IsNaN(value), nan, value);
    const hn::Rebind<hwy::float16_t, FloatTag> halves;
    return hn::BitCast(CodeBytesTag<Format>(), hn::DemoteTo(halves, canonical));
  } else {
    return bytes_of_codes<Format>(encode_lanes<Format>(value));
  }
}

// Two bf16 of a lane: neighbours in memory stay neighbours, so sums of bf16 rows shuffle nothing.
HWY_INLINE Floats decode_low(Words pairs) {
  return hn::BitCast(FloatTag(), hn::ShiftLeft<16>(pairs));
}

HWY_INLINE Floats decode_high(Words pairs) {
  return hn::BitCast(FloatTag(), hn::And(pairs, hn::Set(WordTag(), 0xFFFF0000u)));
}

HWY_INLINE Words encode_pairs(Floats low, Floats high) {
  const hn::Repartition<std::uint16_t, FloatTag> halves;
  Words low_rounded = round_number_to_upper_half(low);
  Words high_rounded = round_number_to_upper_half(high);
  // One branch that is never taken is cheaper than two choices in each vector: these roundings bound the sums.
  if (HWY_UNLIKELY(!hn::AllFalse(FloatTag(), hn::Or(hn::IsNaN(low), hn::IsNaN(high))))) {
    low_rounded = round_to_upper_half(low);
    high_rounded = round_to_upper_half(high);
  }
  const auto low_half = hn::BitCast(halves, hn::ShiftRight<16>(low_rounded));
  return hn::BitCast(WordTag(), hn::OddEven(hn::BitCast(halves, high_rounded), low_half));
}

  #endif  // HWY_TARGET == HWY_SCALAR

}  // namespace tokenyard::engine::host::HWY_NAMESPACE

HWY_AFTER_NAMESPACE();

#endif  // TOKENYARD_ENGINE_HOST_ROWS_INL_H
