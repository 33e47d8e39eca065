// SPDX-License-Identifier: Apache-2.0
// Vector form of protocol/log_wire.h: the same operations in the same order on each lane. Included once per instruction
// set, like rows-inl.h. Thread rule: pure functions of the memory they are given.
#if defined(TOKENYARD_ENGINE_HOST_LOG_WIRE_INL_H) == defined(HWY_TARGET_TOGGLE)
  #ifdef TOKENYARD_ENGINE_HOST_LOG_WIRE_INL_H
    #undef TOKENYARD_ENGINE_HOST_LOG_WIRE_INL_H
  #else
    #define TOKENYARD_ENGINE_HOST_LOG_WIRE_INL_H
  #endif

  #include <hwy/highway.h>

  #include <bit>
  #include <cstddef>
  #include <cstdint>
  #include <cstring>

  #include "engine/host/rows-inl.h"
  #include "protocol/log_wire.h"

HWY_BEFORE_NAMESPACE();

namespace tokenyard::engine::host::HWY_NAMESPACE {

  #if HWY_TARGET != HWY_SCALAR

static_assert(std::endian::native == std::endian::little, "codes are packed in the order of memory");

inline constexpr std::size_t kLogValues = protocol::kLogBlock;
inline constexpr std::size_t kLogBlockBytes = protocol::log_block_bytes(protocol::kLogBlock);

// Four codes are five bytes: 16-bit lanes of a word come together in pairs, then pairs of pairs.
HWY_INLINE std::uint64_t pack_four(std::uint64_t lanes) {
  const std::uint64_t pairs = (lanes & 0x000003FF000003FFu) | ((lanes >> 6) & 0x000FFC00000FFC00u);
  return (pairs & 0xFFFFFu) | ((pairs >> 12) & 0xFFFFF00000u);
}

HWY_INLINE std::uint64_t unpack_four(std::uint64_t packed) {
  const std::uint64_t pairs = (packed & 0xFFFFFu) | ((packed & 0xFFFFF00000u) << 12);
  return (pairs & 0x000003FF000003FFu) | ((pairs & 0x000FFC00000FFC00u) << 6);
}

// Words of eight bytes overlap; only the last must end with its five.
HWY_INLINE void pack_codes(std::uint8_t* to, const std::uint16_t* codes) {
  for (std::size_t i = 0; i < kLogValues; i += 4, to += 5) {
    std::uint64_t lanes = 0;
    std::memcpy(&lanes, codes + i, sizeof(lanes));
    const std::uint64_t packed = pack_four(lanes);
    std::memcpy(to, &packed, i + 4 < kLogValues ? sizeof(packed) : 5);
  }
}

HWY_INLINE void unpack_codes(std::uint16_t* codes, const std::uint8_t* from) {
  for (std::size_t i = 0; i < kLogValues; i += 4, from += 5) {
    std::uint64_t packed = 0;
    std::memcpy(&packed, from, i + 4 < kLogValues ? sizeof(packed) : 5);
    const std::uint64_t lanes = unpack_four(packed);
    std::memcpy(codes + i, &lanes, sizeof(lanes));
  }
}

HWY_INLINE Floats horner(Floats /*x*/, float last) {
  return hn::Set(FloatTag(), last);
}

template <class... Terms>
HWY_INLINE Floats horner(Floats x, float first, Terms... rest) {
  return hn::Add(hn::Mul(horner(x, rest...), x), hn::Set(FloatTag(), first));
}

// protocol::log2_of on each lane; magnitudes that have no logarithm give something finite, and zero the least.
HWY_INLINE Floats log2_lanes(Words magnitude) {
  using T = protocol::Log2Terms;
  const FloatTag floats;
  const WordTag words;
  const SignedTag integers;
  const auto count = hn::BitCast(integers, magnitude);
  const auto denormal = hn::Lt(count, hn::Set(integers, 1 << 23));
  const auto normal =
      hn::IfThenElse(hn::RebindMask(floats, denormal), hn::ConvertTo(floats, count), hn::BitCast(floats, magnitude));
  const auto bits = hn::BitCast(words, normal);
  const auto exponent = hn::ShiftRight<23>(hn::BitCast(integers, hn::Sub(bits, hn::Set(words, protocol::kRootHalf))));
  const auto mantissa = hn::Sub(bits, hn::BitCast(words, hn::ShiftLeft<23>(exponent)));
  const Floats t = hn::Sub(hn::BitCast(floats, mantissa), hn::Set(floats, 1.0f));
  const auto lifted = hn::And(hn::VecFromMask(integers, denormal), hn::Set(integers, 149));
  const Floats terms = horner(t, T::k1, T::k2, T::k3, T::k4, T::k5, T::k6, T::k7, T::k8);
  return hn::Add(hn::ConvertTo(floats, hn::Sub(exponent, lifted)), hn::Mul(terms, t));
}

// protocol::exp2_of on each lane.
HWY_INLINE Floats exp2_lanes(Floats y) {
  using T = protocol::Exp2Terms;
  const FloatTag floats;
  const SignedTag integers;
  const auto rounder = hn::Set(floats, protocol::kRounder);
  const auto bias = hn::Set(integers, 127);
  const auto shifted = hn::Add(y, rounder);
  const auto exponent =
      hn::Sub(hn::BitCast(integers, shifted), hn::Set(integers, std::int32_t{protocol::kRounderBits}));
  const Floats f = hn::Sub(y, hn::Sub(shifted, rounder));
  const Floats mantissa = horner(f, 1.0f, T::k1, T::k2, T::k3, T::k4, T::k5);
  const auto half = hn::ShiftRight<1>(exponent);
  const auto first = hn::BitCast(floats, hn::ShiftLeft<23>(hn::Add(half, bias)));
  const auto second = hn::BitCast(floats, hn::ShiftLeft<23>(hn::Add(hn::Sub(exponent, half), bias)));
  const Floats power = hn::Mul(hn::Mul(mantissa, first), second);
  const auto largest = hn::Set(floats, protocol::kLargestFloat);
  return hn::IfThenElse(hn::Lt(power, largest), power, largest);
}

HWY_INLINE protocol::LogScale log_scale_of(const std::uint8_t* from) {
  const SignedTag integers;
  auto smallest = hn::Set(integers, std::int32_t{protocol::kFloatMagnitude});
  auto largest = hn::Zero(integers);
  const auto infinity = hn::Set(integers, std::int32_t{protocol::kFloatInfinity});
  const auto none = smallest;
  for (std::size_t i = 0; i < kLogValues; i += num_lanes()) {
    const auto bits = hn::BitCast(integers, hn::LoadU(ByteTag(), from + i * sizeof(float)));
    const auto magnitude = hn::And(bits, none);
    const auto finite = hn::IfThenElseZero(hn::Lt(magnitude, infinity), magnitude);
    largest = hn::Max(largest, finite);
    smallest = hn::Min(smallest, hn::IfThenElse(hn::Gt(finite, hn::Zero(integers)), finite, none));
  }
  return protocol::log_scale(static_cast<std::uint32_t>(hn::GetLane(hn::MinOfLanes(integers, smallest))),
                             static_cast<std::uint32_t>(hn::GetLane(hn::MaxOfLanes(integers, largest))));
}

// protocol::encode_log_code on each lane.
HWY_INLINE Words encode_log_lanes(Words bits, Floats lowest, Floats inverse) {
  const FloatTag floats;
  const WordTag words;
  const SignedTag integers;
  const auto magnitude = hn::And(bits, hn::Set(words, protocol::kFloatMagnitude));
  const auto sign = hn::And(hn::ShiftRight<22>(bits), hn::Set(words, protocol::kLogSign));
  const Floats above = hn::Sub(log2_lanes(magnitude), lowest);
  const auto rounded = hn::Add(hn::Mul(above, inverse), hn::Set(floats, protocol::kRounder));
  const auto steps = hn::Sub(hn::BitCast(integers, rounded), hn::Set(integers, std::int32_t{protocol::kRounderBits}));
  const auto limited = hn::Min(hn::Max(steps, hn::Zero(integers)), hn::Set(integers, protocol::kLogSteps));
  // Zero is far below every lowest.
  const auto is_zero = hn::RebindMask(integers, hn::Lt(above, hn::Set(floats, -1.0f)));
  auto level = hn::IfThenZeroElse(is_zero, hn::Add(limited, hn::Set(integers, 1)));
  const auto magnitude_count = hn::BitCast(integers, magnitude);
  const auto infinity = hn::Set(integers, std::int32_t{protocol::kFloatInfinity});
  level =
      hn::IfThenElse(hn::Eq(magnitude_count, infinity), hn::Set(integers, std::int32_t{protocol::kLogInfinity}), level);
  const auto nan = hn::RebindMask(words, hn::Gt(magnitude_count, infinity));
  return hn::IfThenElse(nan, hn::Set(words, protocol::kLogNan), hn::Or(sign, hn::BitCast(words, level)));
}

// protocol::decode_log_code on each lane.
HWY_INLINE Floats decode_log_lanes(Words codes, Floats lowest, Floats step) {
  const FloatTag floats;
  const WordTag words;
  const SignedTag integers;
  const auto level = hn::BitCast(integers, hn::And(codes, hn::Set(words, protocol::kLogLevelMask)));
  const auto sign = hn::ShiftLeft<22>(hn::And(codes, hn::Set(words, protocol::kLogSign)));
  const Floats steps = hn::ConvertTo(floats, hn::Sub(level, hn::Set(integers, 1)));
  const Floats power = exp2_lanes(hn::Add(lowest, hn::Mul(steps, step)));
  auto magnitude = hn::BitCast(integers, power);
  magnitude = hn::IfThenZeroElse(hn::Eq(level, hn::Zero(integers)), magnitude);
  magnitude = hn::IfThenElse(hn::Eq(level, hn::Set(integers, std::int32_t{protocol::kLogInfinity})),
                             hn::Set(integers, std::int32_t{protocol::kFloatInfinity}), magnitude);
  const auto nan = hn::RebindMask(words, hn::Eq(level, hn::Set(integers, std::int32_t{protocol::kLogNan})));
  const auto value = hn::Or(sign, hn::BitCast(words, magnitude));
  return hn::BitCast(floats, hn::IfThenElse(nan, hn::Set(words, protocol::kFloatNan), value));
}

// A whole block; `from` holds 128 floats.
HWY_INLINE void encode_full_log_block(std::uint8_t* to, const std::uint8_t* from) {
  const hn::Rebind<std::uint16_t, FloatTag> halves;
  HWY_ALIGN std::uint16_t codes[kLogValues];  // NOLINT(modernize-avoid-c-arrays): see rows-inl.h
  const protocol::LogScale scale = log_scale_of(from);
  const Floats lowest = hn::Set(FloatTag(), scale.lowest);
  const Floats inverse = hn::Set(FloatTag(), protocol::inverse_step(scale));
  for (std::size_t i = 0; i < kLogValues; i += num_lanes()) {
    const auto bits = hn::BitCast(WordTag(), hn::LoadU(ByteTag(), from + i * sizeof(float)));
    hn::StoreU(hn::TruncateTo(halves, encode_log_lanes(bits, lowest, inverse)), halves, codes + i);
  }
  std::memcpy(to, &scale.lowest, sizeof(float));
  std::memcpy(to + sizeof(float), &scale.step, sizeof(float));
  pack_codes(to + protocol::kLogHeaderBytes, codes);
}

HWY_INLINE void decode_full_log_block(std::uint8_t* to, const std::uint8_t* from) {
  const hn::Rebind<std::uint16_t, FloatTag> halves;
  HWY_ALIGN std::uint16_t codes[kLogValues];  // NOLINT(modernize-avoid-c-arrays): see rows-inl.h
  protocol::LogScale scale;
  std::memcpy(&scale.lowest, from, sizeof(float));
  std::memcpy(&scale.step, from + sizeof(float), sizeof(float));
  unpack_codes(codes, from + protocol::kLogHeaderBytes);
  const Floats lowest = hn::Set(FloatTag(), scale.lowest);
  const Floats step = hn::Set(FloatTag(), scale.step);
  for (std::size_t i = 0; i < kLogValues; i += num_lanes()) {
    const auto words = hn::PromoteTo(WordTag(), hn::LoadU(halves, codes + i));
    const Floats values = decode_log_lanes(words, lowest, step);
    hn::StoreU(hn::BitCast(ByteTag(), values), ByteTag(), to + i * sizeof(float));
  }
}

  #endif  // HWY_TARGET != HWY_SCALAR

}  // namespace tokenyard::engine::host::HWY_NAMESPACE

HWY_AFTER_NAMESPACE();

#endif  // TOKENYARD_ENGINE_HOST_LOG_WIRE_INL_H
