// SPDX-License-Identifier: Apache-2.0
#include <charconv>
#include <cstdlib>
#include <limits>
#include <string>
#include <string_view>

#include "tokenyard/error.h"
#include "tokenyard/manager.h"

namespace tokenyard {
namespace {

struct Range {
  std::int64_t least = 0;
  std::int64_t most = 1;
};

std::int64_t number_from(const char* variable, std::int64_t otherwise, const Range& range) {
  const char* value = std::getenv(variable);
  if (value == nullptr) return otherwise;
  const std::string_view text(value);
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error == std::errc{} && end == text.data() + text.size() && number >= range.least && number <= range.most) {
    return number;
  }
  throw Error(ErrorCode::kInvalidArgument, std::string(variable) + " is `" + value + "`; it must be a number in [" +
                                               std::to_string(range.least) + ", " + std::to_string(range.most) + "]");
}

bool switch_from(const char* variable, bool otherwise) {
  return number_from(variable, otherwise ? 1 : 0, {}) != 0;
}

}  // namespace

ManagerKnobs knobs_from_environment() {
  ManagerKnobs knobs;
  // So that the same number of bytes fits 64 bits.
  constexpr Range kMebibytes{.least = 1, .most = std::numeric_limits<std::int64_t>::max() >> 20};
  knobs.high_throughput_buffer_mebibytes =
      number_from("VLLM_DEEPEP_BUFFER_SIZE_MB", knobs.high_throughput_buffer_mebibytes, kMebibytes);
  knobs.high_throughput_intra_host_only =
      switch_from("VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE", knobs.high_throughput_intra_host_only);
  knobs.one_sided_low_precision_combine =
      switch_from("VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE", knobs.one_sided_low_precision_combine);
  return knobs;
}

}  // namespace tokenyard
