// SPDX-License-Identifier: Apache-2.0
#include "cli/bench_rows.h"

#include <fmt/format.h>

#include <cstring>

#include "tokenyard/error.h"

#include "protocol/casts.h"

namespace tokenyard::cli {
namespace {

void store(Dtype dtype, std::byte* row, std::int64_t column, float value) {
  switch (dtype) {
    case Dtype::kF32:
      reinterpret_cast<float*>(row)[column] = value;
      break;
    case Dtype::kBf16:
      reinterpret_cast<std::uint16_t*>(row)[column] = protocol::encode<protocol::Bf16>(value);
      break;
    case Dtype::kF16:
      reinterpret_cast<std::uint16_t*>(row)[column] = protocol::encode<protocol::F16>(value);
      break;
    default:
      reinterpret_cast<std::uint8_t*>(row)[column] = protocol::encode<protocol::F8e4m3>(value);
  }
}

float load(Dtype dtype, const std::byte* row, std::int64_t column) {
  switch (dtype) {
    case Dtype::kF32:
      return reinterpret_cast<const float*>(row)[column];
    case Dtype::kBf16:
      return protocol::decode<protocol::Bf16>(reinterpret_cast<const std::uint16_t*>(row)[column]);
    case Dtype::kF16:
      return protocol::decode<protocol::F16>(reinterpret_cast<const std::uint16_t*>(row)[column]);
    default:
      return protocol::decode<protocol::F8e4m3>(reinterpret_cast<const std::uint8_t*>(row)[column]);
  }
}

}  // namespace

BenchRowBytes::BenchRowBytes(const BenchShape& shape, Dtype dtype) : shape_(shape), dtype_(dtype) {}

const std::vector<std::byte>& BenchRowBytes::long_row(float factor) {
  std::vector<std::byte>& bytes = long_rows_[factor];
  if (!bytes.empty()) return bytes;
  const std::int64_t length = bench_place(shape_.num_ranks - 1, shape_.num_tokens - 1) + shape_.hidden_size;
  bytes.resize(static_cast<std::size_t>(length * size_of(dtype_)));
  // Sums begin with +0, so no right answer is -0.
  for (std::int64_t place = 0; place < length; ++place)
    store(dtype_, bytes.data(), place, factor == 0 ? 0 : factor * bench_value(0, 0, place));
  return bytes;
}

std::span<const std::byte> BenchRowBytes::row(const BenchToken& token, float factor) {
  const std::int64_t element = size_of(dtype_);
  return std::span(long_row(factor))
      .subspan(static_cast<std::size_t>(bench_place(token.rank, token.token) * element),
               static_cast<std::size_t>(shape_.hidden_size * element));
}

void BenchRowBytes::require(const std::byte* got, const BenchToken& token, float factor, const char* what) {
  const std::span<const std::byte> right = row(token, factor);
  if (std::memcmp(got, right.data(), right.size()) == 0) return;
  const auto element = static_cast<std::size_t>(size_of(dtype_));
  std::int64_t column = 0;
  while (std::memcmp(got + static_cast<std::size_t>(column) * element,
                     right.data() + static_cast<std::size_t>(column) * element, element) == 0)
    ++column;
  throw Error(ErrorCode::kPeerFailed,
              fmt::format("{}: token {} of rank {}, column {}: {} instead of {}", what, token.token, token.rank, column,
                          load(dtype_, got, column), load(dtype_, right.data(), column)));
}

}  // namespace tokenyard::cli
