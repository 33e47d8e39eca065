// SPDX-License-Identifier: Apache-2.0
// The logarithmic wire by its definition (docs/formats.md): plain loops, the standard library's exact functions, and a
// list of bits where the code packs words. Thread rule: pure functions.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace tokenyard::reference {

// Terms of t, t^2, ... and of f, f^2, ...
inline constexpr std::array<float, 8> kLog2 = {0x1.715476p+0f, -0x1.71552cp-1f, 0x1.ec756ep-2f, -0x1.70dedep-2f,
                                               0x1.262f0ep-2f, -0x1.fe823ap-3f, 0x1.dc78f4p-3f, -0x1.245f38p-3f};
inline constexpr std::array<float, 5> kExp2 = {0x1.62e430p-1f, 0x1.ebfa4cp-3f, 0x1.c6afeep-5f, 0x1.3cbf60p-7f,
                                               0x1.5ec866p-10f};

// x * (c1 + x * (c2 + ...)), from the inside out.
template <std::size_t kTerms>
float polynomial(const std::array<float, kTerms>& terms, float x) {
  float sum = terms[kTerms - 1];
  for (std::size_t i = kTerms - 1; i-- > 0;) {
    const float product = sum * x;
    sum = product + terms[i];
  }
  return sum * x;
}

inline float log2_of(float magnitude) {
  int exponent = 0;
  float mantissa = std::frexp(magnitude, &exponent);
  if (mantissa < 0x1.6a09e6p-1f) {  // sqrt(1/2)
    mantissa *= 2;
    --exponent;
  }
  return float(exponent) + polynomial(kLog2, mantissa - 1.0f);
}

inline float exp2_of(float y) {
  const float whole = std::nearbyint(y);
  const float mantissa = polynomial(kExp2, y - whole) + 1.0f;
  return std::min(std::ldexp(mantissa, int(whole)), std::numeric_limits<float>::max());
}

struct LogBlock {
  float lowest = 0;
  float step = 0;
  std::vector<int> codes;
};

inline LogBlock log_block(const float* values, std::size_t count) {
  LogBlock block;
  float smallest = std::numeric_limits<float>::infinity();
  float largest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const float magnitude = std::abs(values[i]);
    if (!std::isfinite(magnitude) || magnitude == 0) continue;
    smallest = std::min(smallest, magnitude);
    largest = std::max(largest, magnitude);
  }
  if (largest > 0) {
    const float highest = log2_of(largest);
    block.lowest = std::max(log2_of(smallest), highest - 32.0f);
    block.step = (highest - block.lowest) / 508.0f;
  }
  const float inverse = block.step > 0 ? 1.0f / block.step : 0.0f;
  for (std::size_t i = 0; i < count; ++i) {
    const float magnitude = std::abs(values[i]);
    int level = 0;
    if (std::isnan(magnitude)) {
      block.codes.push_back(511);
      continue;
    }
    if (std::isinf(magnitude)) {
      level = 510;
    } else if (magnitude > 0) {
      const float above = log2_of(magnitude) - block.lowest;
      level = above < -1.0f ? 0 : 1 + int(std::clamp(std::nearbyint(above * inverse), 0.0f, 508.0f));
    }
    block.codes.push_back(level + (std::signbit(values[i]) ? 512 : 0));
  }
  return block;
}

inline float log_value(const LogBlock& block, int code) {
  const int level = code % 512;
  if (level == 511) return std::bit_cast<float>(0x7FFFFFFFu);
  float magnitude = 0;
  if (level == 510) magnitude = std::numeric_limits<float>::infinity();
  if (level > 0 && level < 510) {
    const float distance = float(level - 1) * block.step;
    magnitude = exp2_of(block.lowest + distance);
  }
  return code >= 512 ? -magnitude : magnitude;
}

inline std::vector<std::byte> log_bytes(const LogBlock& block) {
  std::vector<std::byte> bytes(8);
  std::memcpy(bytes.data(), &block.lowest, 4);
  std::memcpy(bytes.data() + 4, &block.step, 4);
  std::vector<bool> bits;
  for (const int code : block.codes)
    for (int bit = 0; bit < 10; ++bit)
      bits.push_back((code >> bit) % 2 == 1);
  while (bits.size() % 8 != 0)
    bits.push_back(false);
  for (std::size_t i = 0; i < bits.size(); i += 8) {
    int byte = 0;
    for (std::size_t bit = 0; bit < 8; ++bit)
      byte |= bits[i + bit] ? 1 << bit : 0;
    bytes.push_back(static_cast<std::byte>(byte));
  }
  return bytes;
}

struct LogRow {
  std::vector<std::byte> bytes;
  std::vector<float> decoded;
};

inline LogRow log_row(const std::vector<float>& row) {
  LogRow result;
  for (std::size_t first = 0; first < row.size(); first += 128) {
    const LogBlock block = log_block(row.data() + first, std::min<std::size_t>(128, row.size() - first));
    const std::vector<std::byte> bytes = log_bytes(block);
    result.bytes.insert(result.bytes.end(), bytes.begin(), bytes.end());
    for (const int code : block.codes)
      result.decoded.push_back(log_value(block, code));
  }
  return result;
}

}  // namespace tokenyard::reference
