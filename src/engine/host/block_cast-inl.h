// SPDX-License-Identifier: Apache-2.0
// Vector form of protocol/block_cast.h: the largest magnitude of a block, and its codes. Included once per instruction
// set, like rows-inl.h. Thread rule: pure functions of the memory they are given.
#if defined(TOKENYARD_ENGINE_HOST_BLOCK_CAST_INL_H) == defined(HWY_TARGET_TOGGLE)
  #ifdef TOKENYARD_ENGINE_HOST_BLOCK_CAST_INL_H
    #undef TOKENYARD_ENGINE_HOST_BLOCK_CAST_INL_H
  #else
    #define TOKENYARD_ENGINE_HOST_BLOCK_CAST_INL_H
  #endif

  #include <hwy/highway.h>

  #include <cstddef>
  #include <cstdint>
  #include <type_traits>

  #include "engine/host/rows-inl.h"
  #include "protocol/block_cast.h"

HWY_BEFORE_NAMESPACE();

namespace tokenyard::engine::host::HWY_NAMESPACE {

  #if HWY_TARGET == HWY_SCALAR

template <class Format>
float cast_one_block(std::byte* values, const std::byte* from, std::size_t count, DispatchCast cast) {
  float decoded[protocol::kCastBlock];  // NOLINT(modernize-avoid-c-arrays): like the vector form's buffers
  for (std::size_t i = 0; i < count; ++i)
    decoded[i] = load_element<Format>(from, i);
  auto* codes = reinterpret_cast<std::uint8_t*>(values);
  return protocol::cast_block(codes, decoded, static_cast<std::int64_t>(count), cast);
}

  #else  // HWY_TARGET == HWY_SCALAR

using Integers = hn::Vec<SignedTag>;

// One vector of a row in memory holds one fp32 a lane, or two values of 16 bits, which stay together.
template <class Format>
inline constexpr std::size_t kValuesPerLane = sizeof(float) / sizeof(typename Format::Bits);

template <class Format>
HWY_INLINE Integers finite_magnitudes(Words codes) {
  const auto magnitude = hn::BitCast(SignedTag(), hn::And(codes, hn::Set(WordTag(), std::uint32_t{Format::kNan})));
  const auto largest = hn::Set(SignedTag(), std::int32_t{Format::kLargestFinite});
  return hn::IfThenZeroElse(hn::Gt(magnitude, largest), magnitude);
}

// Codes of a format order as the magnitudes that they stand for.
template <class Format>
HWY_INLINE Integers with_magnitudes(Integers largest, hn::Vec<ByteTag> bytes) {
  const auto words = hn::BitCast(WordTag(), bytes);
  largest = hn::Max(largest, finite_magnitudes<Format>(words));
  if constexpr (kValuesPerLane<Format> == 2) {
    largest = hn::Max(largest, finite_magnitudes<Format>(hn::ShiftRight<16>(words)));
  }
  return largest;
}

// The largest finite magnitude as fp32 bits.
template <class Format>
HWY_INLINE std::uint32_t largest_magnitude(const std::uint8_t* from, std::size_t bytes) {
  const ByteTag tag;
  const std::size_t step = hn::Lanes(tag);
  Integers largest = hn::Zero(SignedTag());
  std::size_t i = 0;
  for (; i + step <= bytes; i += step)
    largest = with_magnitudes<Format>(largest, hn::LoadU(tag, from + i));
  if (i < bytes) largest = with_magnitudes<Format>(largest, load_part(tag, from + i, bytes - i));
  const auto code = hn::GetLane(hn::MaxOfLanes(SignedTag(), largest));
  return protocol::cast_bits<std::uint32_t>(protocol::decode<Format>(static_cast<typename Format::Bits>(code)));
}

template <class Format>
HWY_INLINE Words cast_lanes(Words codes, Floats inverse) {
  return encode_lanes<protocol::F8e4m3>(hn::Mul(decode_lanes<Format>(codes), inverse));
}

// The codes of a vector, as many bytes as there are values.
template <class Format>
using BlockBytesTag =
    std::conditional_t<kValuesPerLane<Format> == 2, CodeBytesTag<protocol::Bf16>, CodeBytesTag<protocol::F8e4m3>>;

template <class Format>
HWY_INLINE hn::Vec<BlockBytesTag<Format>> cast_bytes(hn::Vec<ByteTag> bytes, Floats inverse) {
  const auto words = hn::BitCast(WordTag(), bytes);
  if constexpr (kValuesPerLane<Format> == 2) {
    const auto low = cast_lanes<Format>(hn::And(words, hn::Set(WordTag(), 0xFFFFu)), inverse);
    const auto high = cast_lanes<Format>(hn::ShiftRight<16>(words), inverse);
    return bytes_of_codes<protocol::Bf16>(hn::Or(low, hn::ShiftLeft<8>(high)));
  } else {
    return bytes_of_codes<protocol::F8e4m3>(cast_lanes<Format>(words, inverse));
  }
}

template <class Format>
HWY_INLINE float cast_one_block(std::byte* values, const std::byte* from_bytes, std::size_t count, DispatchCast cast) {
  const ByteTag from_tag;
  const BlockBytesTag<Format> to_tag;
  constexpr std::size_t kSize = sizeof(typename Format::Bits);
  const std::uint8_t* from = bytes_of(from_bytes);
  std::uint8_t* to = bytes_of(values);
  const float scale = protocol::block_scale(cast, largest_magnitude<Format>(from, count * kSize));
  const Floats inverse = hn::Set(FloatTag(), 1.0f / scale);
  const std::size_t step = num_lanes() * kValuesPerLane<Format>;
  std::size_t i = 0;
  for (; i + step <= count; i += step)
    hn::StoreU(cast_bytes<Format>(hn::LoadU(from_tag, from + i * kSize), inverse), to_tag, to + i);
  if (i < count) {
    const auto rest = load_part(from_tag, from + i * kSize, (count - i) * kSize);
    store_part(cast_bytes<Format>(rest, inverse), to_tag, to + i, count - i);
  }
  return scale;
}

  #endif  // HWY_TARGET == HWY_SCALAR

}  // namespace tokenyard::engine::host::HWY_NAMESPACE

HWY_AFTER_NAMESPACE();

#endif  // TOKENYARD_ENGINE_HOST_BLOCK_CAST_INL_H
