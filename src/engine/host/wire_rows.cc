// SPDX-License-Identifier: Apache-2.0
#include "engine/host/wire_rows.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "tokenyard/error.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "engine/host/wire_rows.cc"
// These come first: they repeat this file once per instruction set.
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "engine/host/block_cast-inl.h"
#include "engine/host/log_wire-inl.h"
#include "engine/host/rows-inl.h"
#include "engine/host/sums-inl.h"
#include "protocol/block_cast.h"
#include "protocol/log_wire.h"

HWY_BEFORE_NAMESPACE();

namespace tokenyard::engine::host::HWY_NAMESPACE {

template <class Format>
HWY_INLINE void cast_blocks(const BlockCast& row) {
  constexpr std::size_t kBlock = protocol::kCastBlock;
  const auto n = static_cast<std::size_t>(row.n);
  std::byte* scales = row.scales;
  for (std::size_t first = 0; first < n; first += kBlock) {
    const std::size_t count = std::min(kBlock, n - first);
    const std::byte* from = row.from + first * sizeof(typename Format::Bits);
    const float scale = cast_one_block<Format>(row.values + first, from, count, row.cast);
    if (row.cast == DispatchCast::kFp8Block128Ue8m0) {
      *scales++ = std::byte{protocol::encode_e8m0(scale)};
    } else {
      std::memcpy(scales, &scale, sizeof(scale));
      scales += sizeof(scale);
    }
  }
}

void cast_blocks_of_any(const BlockCast& row) {
  with_format(row.from_dtype, [&](auto format) HWY_ATTR {
    using Format = decltype(format);
    if constexpr (sizeof(typename Format::Bits) > 1) cast_blocks<Format>(row);
  });
}

void weighted_sum_any(const WeightedSum& sum) {
  with_format(sum.rows_dtype, [&](auto from) HWY_ATTR {
    with_format(sum.output_dtype, [&](auto to) HWY_ATTR {
      using From = decltype(from);
      using To = decltype(to);
      if constexpr (sizeof(typename From::Bits) > 1 && sizeof(typename To::Bits) > 1) sum_elements<From, To>(sum);
    });
  });
}

#if HWY_TARGET == HWY_SCALAR

void encode_log_blocks(std::byte* to, const std::byte* from, std::size_t n) {
  constexpr std::size_t kBlock = protocol::kLogBlock;
  float values[kBlock];  // NOLINT(modernize-avoid-c-arrays): like the vector form's buffers
  for (std::size_t first = 0; first < n; first += kBlock) {
    const std::size_t count = std::min(kBlock, n - first);
    std::memcpy(values, from + first * sizeof(float), count * sizeof(float));
    protocol::encode_log_block(to, values, static_cast<std::int64_t>(count));
    to += protocol::log_block_bytes(static_cast<std::int64_t>(count));
  }
}

void decode_log_blocks(std::byte* to, const std::byte* from, std::size_t n) {
  constexpr std::size_t kBlock = protocol::kLogBlock;
  float values[kBlock];  // NOLINT(modernize-avoid-c-arrays): like the vector form's buffers
  for (std::size_t first = 0; first < n; first += kBlock) {
    const std::size_t count = std::min(kBlock, n - first);
    protocol::decode_log_block(values, from, static_cast<std::int64_t>(count));
    std::memcpy(to + first * sizeof(float), values, count * sizeof(float));
    from += protocol::log_block_bytes(static_cast<std::int64_t>(count));
  }
}

#else  // HWY_TARGET == HWY_SCALAR

// The last, shorter block is a whole one with zeros behind: they change neither its scale nor its padding.
void encode_log_blocks(std::byte* to_row, const std::byte* from_row, std::size_t n) {
  std::uint8_t* to = bytes_of(to_row);
  const std::uint8_t* from = bytes_of(from_row);
  for (; n >= kLogValues; n -= kLogValues, from += kLogValues * sizeof(float), to += kLogBlockBytes)
    encode_full_log_block(to, from);
  if (n == 0) return;
  std::uint8_t values[kLogValues * sizeof(float)] = {};  // NOLINT(modernize-avoid-c-arrays): see rows-inl.h
  std::uint8_t block[kLogBlockBytes];                    // NOLINT(modernize-avoid-c-arrays): see rows-inl.h
  std::memcpy(values, from, n * sizeof(float));
  encode_full_log_block(block, values);
  std::memcpy(to, block, static_cast<std::size_t>(protocol::log_block_bytes(static_cast<std::int64_t>(n))));
}

void decode_log_blocks(std::byte* to_row, const std::byte* from_row, std::size_t n) {
  std::uint8_t* to = bytes_of(to_row);
  const std::uint8_t* from = bytes_of(from_row);
  for (; n >= kLogValues; n -= kLogValues, from += kLogBlockBytes, to += kLogValues * sizeof(float))
    decode_full_log_block(to, from);
  if (n == 0) return;
  std::uint8_t values[kLogValues * sizeof(float)];  // NOLINT(modernize-avoid-c-arrays): see rows-inl.h
  std::uint8_t block[kLogBlockBytes] = {};          // NOLINT(modernize-avoid-c-arrays): see rows-inl.h
  std::memcpy(block, from, static_cast<std::size_t>(protocol::log_block_bytes(static_cast<std::int64_t>(n))));
  decode_full_log_block(values, block);
  std::memcpy(to, values, n * sizeof(float));
}

#endif  // HWY_TARGET == HWY_SCALAR

}  // namespace tokenyard::engine::host::HWY_NAMESPACE

HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace tokenyard::engine::host {
namespace {

HWY_EXPORT(cast_blocks_of_any);
HWY_EXPORT(encode_log_blocks);
HWY_EXPORT(decode_log_blocks);
HWY_EXPORT(weighted_sum_any);

[[noreturn]] void refuse(const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, what);
}

}  // namespace

void cast_row_to_fp8_blocks(const BlockCast& row) {
  if (!protocol::is_wide_float(row.from_dtype)) {
    refuse("a cast to blocks of fp8 from " + std::string(name(row.from_dtype)) +
           " is not defined; it takes bf16, f16 or f32");
  }
  if (row.cast == DispatchCast::kNone) {
    refuse("DispatchCast::kNone has no blocks of fp8; copy the row, or give one of the other casts");
  }
  if (row.n > 0) HWY_DYNAMIC_DISPATCH(cast_blocks_of_any)(row);
}

void encode_log_row(std::byte* to, const float* from, std::int64_t n) {
  if (n <= 0) return;
  HWY_DYNAMIC_DISPATCH(encode_log_blocks)(to, reinterpret_cast<const std::byte*>(from), static_cast<std::size_t>(n));
}

void decode_log_row(float* to, const std::byte* from, std::int64_t n) {
  if (n <= 0) return;
  HWY_DYNAMIC_DISPATCH(decode_log_blocks)(reinterpret_cast<std::byte*>(to), from, static_cast<std::size_t>(n));
}

void weighted_sum_rows(const WeightedSum& sum) {
  if (!protocol::is_wide_float(sum.rows_dtype) || !protocol::is_wide_float(sum.output_dtype)) {
    refuse("a weighted sum from " + std::string(name(sum.rows_dtype)) + " to " + std::string(name(sum.output_dtype)) +
           " is not defined; rows and outputs are bf16, f16 or f32");
  }
  if (sum.rows.size() != sum.weights.size()) {
    refuse("a weighted sum has " + std::to_string(sum.rows.size()) + " rows and " + std::to_string(sum.weights.size()) +
           " weights; give one weight for each row");
  }
  if (sum.n > 0) HWY_DYNAMIC_DISPATCH(weighted_sum_any)(sum);
}

}  // namespace tokenyard::engine::host

#endif  // HWY_ONCE
