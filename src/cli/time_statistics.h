// SPDX-License-Identifier: Apache-2.0
// What `run` and `bench` say of many rounds. Thread rule: pure functions.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

namespace tokenyard::cli {

// The value at a share of the way through the sorted list (nearest rank): 0.5 is the median. The list is not empty.
[[nodiscard]] inline double quantile(std::vector<double> values, double share) {
  const double position = std::ceil(share * static_cast<double>(values.size())) - 1;
  const auto at = static_cast<std::ptrdiff_t>(std::max(position, 0.0));
  std::nth_element(values.begin(), values.begin() + at, values.end());
  return values[static_cast<std::size_t>(at)];
}

struct BenchTime {
  double median = 0;
  double p95 = 0;
};

[[nodiscard]] inline BenchTime summarise_times(const std::vector<double>& values) {
  return {.median = quantile(values, 0.5), .p95 = quantile(values, 0.95)};
}

}  // namespace tokenyard::cli
