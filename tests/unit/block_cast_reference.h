// SPDX-License-Identifier: Apache-2.0
// The casts to blocks of fp8 by their definition (docs/formats.md): tables, loops and double precision. A product or
// quotient of two floats, computed in double and rounded to float, is the float operation's result.
// Thread rule: pure functions.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "tokenyard/dispatch.h"

namespace tokenyard::reference {

inline constexpr DispatchCast kCasts[] = {DispatchCast::kFp8Block128, DispatchCast::kFp8Block128PowerOfTwo,
                                          DispatchCast::kFp8Block128Ue8m0};

// The 127 magnitudes of f8e4m3, by code: four bits of exponent with bias 7, three of mantissa, 448 the largest.
inline const std::array<double, 127>& fp8_magnitudes() {
  static const std::array<double, 127> kTable = [] {
    std::array<double, 127> table{};
    for (int code = 0; code < 127; ++code) {
      const int exponent = code / 8;
      const int mantissa = code % 8;
      table[static_cast<std::size_t>(code)] =
          exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
    }
    return table;
  }();
  return kTable;
}

inline double fp8_value(std::uint8_t code) {
  const int magnitude = code & 0x7F;
  if (magnitude == 0x7F) return std::nan("");
  const double value = fp8_magnitudes()[static_cast<std::size_t>(magnitude)];
  return code & 0x80 ? -value : value;
}

inline std::uint8_t nearest_fp8(double value) {
  if (std::isnan(value)) return 0x7F;
  const auto& table = fp8_magnitudes();
  const double magnitude = std::abs(value);
  const auto above = std::lower_bound(table.begin(), table.end(), magnitude);
  auto code = static_cast<int>(above - table.begin());
  if (code == 127) {
    code = 126;  // saturates
  } else if (code > 0) {
    const double up = *above - magnitude;
    const double down = magnitude - table[static_cast<std::size_t>(code - 1)];
    if (down < up || (down == up && code % 2 == 1)) --code;
  }
  return static_cast<std::uint8_t>(code | (std::signbit(value) ? 0x80 : 0));
}

inline double block_scale(std::span<const float> block, DispatchCast cast) {
  double largest = 0;
  for (const float value : block)
    if (std::isfinite(value)) largest = std::max(largest, std::abs(double(value)));
  if (largest == 0) return 1;
  if (cast == DispatchCast::kFp8Block128) return std::max(double(float(largest / 448)), 0x1p-126);
  double scale = 0x1p-126;
  while (448 * scale < largest)
    scale *= 2;
  return scale;
}

struct CastRow {
  std::vector<std::byte> values;
  std::vector<std::byte> scales;
};

inline CastRow cast_row(const std::vector<float>& row, DispatchCast cast) {
  CastRow result;
  for (std::size_t first = 0; first < row.size(); first += 128) {
    const std::span<const float> block(row.data() + first, std::min<std::size_t>(128, row.size() - first));
    const double scale = block_scale(block, cast);
    const double inverse = float(1 / scale);
    for (const float value : block)
      result.values.push_back(std::byte{nearest_fp8(float(value * inverse))});
    if (cast == DispatchCast::kFp8Block128Ue8m0) {
      result.scales.push_back(static_cast<std::byte>(std::ilogb(scale) + 127));
    } else {
      const auto bytes = std::bit_cast<std::array<std::byte, 4>>(float(scale));
      result.scales.insert(result.scales.end(), bytes.begin(), bytes.end());
    }
  }
  return result;
}

inline double scale_of(const std::byte* scales, std::size_t block, DispatchCast cast) {
  if (cast == DispatchCast::kFp8Block128Ue8m0) return std::ldexp(1.0, std::to_integer<int>(scales[block]) - 127);
  float scale = 0;
  std::memcpy(&scale, scales + 4 * block, sizeof(scale));
  return scale;
}

}  // namespace tokenyard::reference
