// SPDX-License-Identifier: Apache-2.0
// Bytes of a dispatched row in each format. Source: contracts.md part 1 (FlashInfer's QuantFormat).
#pragma once

#include <cstdint>

#include "tokenyard/params.h"

#include "protocol/host_device.h"

namespace tokenyard::protocol {

TOKENYARD_HD constexpr std::int64_t ceil_div(std::int64_t value, std::int64_t divisor) {
  return (value + divisor - 1) / divisor;
}

TOKENYARD_HD constexpr std::int64_t align_up(std::int64_t value, std::int64_t alignment) {
  return ceil_div(value, alignment) * alignment;
}

// The dtypes of rows that are not quantised, of expert output and of sums.
TOKENYARD_HD constexpr bool is_wide_float(Dtype dtype) {
  return dtype == Dtype::kBf16 || dtype == Dtype::kF16 || dtype == Dtype::kF32;
}

// The dtypes of quantised rows, one byte an element.
TOKENYARD_HD constexpr bool is_quantised(Dtype dtype) {
  return dtype == Dtype::kF8e4m3 || dtype == Dtype::kF8e5m2 || dtype == Dtype::kU8;
}

struct RowBytes {
  std::int64_t values = 0;
  std::int64_t scales = 0;
};

TOKENYARD_HD constexpr RowBytes row_bytes(DispatchFormat format, std::int64_t hidden_size, std::int64_t dtype_bytes) {
  switch (format) {
    case DispatchFormat::kNone:
      return {hidden_size * dtype_bytes, 0};
    case DispatchFormat::kFp8PerTensor:
      return {hidden_size, 0};
    case DispatchFormat::kFp8Block128:
      return {hidden_size, 4 * ceil_div(hidden_size, 128)};
    case DispatchFormat::kMxfp8:
      return {hidden_size, ceil_div(hidden_size, 32)};
    case DispatchFormat::kNvfp4:
      return {ceil_div(hidden_size, 2), ceil_div(hidden_size, 16)};
    case DispatchFormat::kMxfp4:
      return {ceil_div(hidden_size, 2), ceil_div(hidden_size, 32)};
  }
  return {};
}

static_assert(row_bytes(DispatchFormat::kNone, 7168, 2).values == 14336);
static_assert(row_bytes(DispatchFormat::kFp8Block128, 7168, 2).scales == 7392 - 7168);
static_assert(row_bytes(DispatchFormat::kNvfp4, 7168, 2).values + row_bytes(DispatchFormat::kNvfp4, 7168, 2).scales ==
              4032);
static_assert(row_bytes(DispatchFormat::kMxfp4, 7168, 2).values + row_bytes(DispatchFormat::kMxfp4, 7168, 2).scales ==
              3808);

}  // namespace tokenyard::protocol
