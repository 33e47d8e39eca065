// SPDX-License-Identifier: Apache-2.0
#include "cli/bench_routing.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <random>
#include <stdexcept>
#include <system_error>

#include "protocol/owner.h"

namespace tokenyard::cli {
namespace {

// Draws from cumulative likelihoods with a generator whose numbers are the same everywhere (distributions of the
// standard library are not).
int draw(const std::vector<double>& cumulative, std::mt19937_64& random) {
  const double at = static_cast<double>(random() >> 11) * 0x1p-53 * cumulative.back();
  const auto found = std::ranges::upper_bound(cumulative, at);
  return static_cast<int>(std::min(found, cumulative.end() - 1) - cumulative.begin());
}

std::vector<double> likelihoods(const BenchShape& shape) {
  std::vector<double> cumulative;
  double sum = 0;
  for (int expert = 0; expert < shape.num_experts; ++expert) {
    sum += shape.skew == BenchSkew::kZipf ? std::pow(expert + 1.0, -shape.zipf_exponent) : 1.0;
    cumulative.push_back(sum);
  }
  return cumulative;
}

}  // namespace

std::vector<std::int32_t> bench_ids(const BenchShape& shape, int rank) {
  const std::vector<double> cumulative = likelihoods(shape);
  std::mt19937_64 random(shape.seed * 1'000'003 + static_cast<std::uint64_t>(rank));
  std::vector<std::int32_t> ids;
  ids.reserve(static_cast<std::size_t>(shape.num_tokens * shape.top_k));
  for (std::int64_t token = 0; token < shape.num_tokens; ++token) {
    const auto first = static_cast<std::ptrdiff_t>(ids.size());
    if (shape.skew == BenchSkew::kOne) ids.push_back(0);
    while (std::ssize(ids) - first < shape.top_k) {
      const int expert = draw(cumulative, random);
      if (std::find(ids.begin() + first, ids.end(), expert) == ids.end()) ids.push_back(expert);
    }
  }
  return ids;
}

int bench_owner(const BenchShape& shape, int expert) {
  return protocol::owner_of(shape.num_experts, shape.num_ranks, expert);
}

float bench_total_factor(const std::vector<std::int32_t>& ids, int top_k, std::int64_t token) {
  float factor = 0;
  for (int slot = 0; slot < top_k; ++slot)
    factor += bench_factor(ids[static_cast<std::size_t>(token * top_k + slot)]);
  return factor;
}

std::string parse_bench_skew(const std::string& text, BenchShape& shape) {
  const std::size_t colon = text.find(':');
  const std::string kind = text.substr(0, colon);
  std::string rest = colon == std::string::npos ? "" : text.substr(colon + 1);
  if (kind == "uniform" && rest.empty()) {
    shape.skew = BenchSkew::kUniform;
  } else if (kind == "one" && rest.empty()) {
    shape.skew = BenchSkew::kOne;
  } else if (kind == "zipf") {
    double exponent = -1;
    const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), exponent);
    if (error != std::errc() || end != rest.data() + rest.size() || !(exponent >= 0))
      throw std::invalid_argument("zipf needs an exponent, as in zipf:1.0");
    shape.skew = BenchSkew::kZipf;
    shape.zipf_exponent = exponent;
  } else if (kind == "trace" && !rest.empty()) {
    shape.skew = BenchSkew::kTrace;
    return rest;
  } else {
    throw std::invalid_argument("the skew is `" + text + "`; uniform, zipf:A, one and trace:FILE are known");
  }
  return {};
}

}  // namespace tokenyard::cli
