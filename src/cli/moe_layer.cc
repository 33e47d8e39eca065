// SPDX-License-Identifier: Apache-2.0
#include "cli/moe_layer.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>

#include "tokenyard/error.h"

#include "cli/fp8_rows.h"
#include "cli/row_access.h"
#include "protocol/casts.h"

namespace tokenyard::cli {
namespace {

using protocol::decode;
using protocol::encode;

constexpr const char* kTokensFile = "tokens.safetensors";
constexpr const char* kExpertsFile = "experts.safetensors";
constexpr const char* kExpectedFile = "expected.safetensors";

struct Wanted {
  const char* file;
  const char* tensor;
  Dtype dtype;
  std::vector<std::int64_t> shape;
};

void check(const Safetensors& file, const Wanted& wanted) {
  const StoredTensor& tensor = file.at(wanted.tensor);
  if (tensor.dtype != wanted.dtype || tensor.shape != wanted.shape) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("{}: tensor \"{}\" is {}[{}]; {}[{}] is right", wanted.file, wanted.tensor, name(tensor.dtype),
                    fmt::join(tensor.shape, ", "), name(wanted.dtype), fmt::join(wanted.shape, ", ")));
  }
}

// The shape of a tensor that gives the others theirs.
const std::vector<std::int64_t>& leading_shape(const Safetensors& file, const char* label, const char* tensor) {
  const auto& shape = file.at(tensor).shape;
  const auto fits_int = [](std::int64_t extent) { return extent > 0 && extent <= std::numeric_limits<int>::max(); };
  if (shape.size() < 2 || !fits_int(shape.back()) || !fits_int(shape.front())) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: tensor \"{}\" has shape [{}]; at least two dimensions of 1 or more are right", label,
                            tensor, fmt::join(shape, ", ")));
  }
  return shape;
}

std::vector<std::int64_t> with_last(std::vector<std::int64_t> shape, std::int64_t last) {
  shape.push_back(last);
  return shape;
}

void require(bool right, const std::string& what) {
  if (!right) throw Error(ErrorCode::kInvalidArgument, what);
}

}  // namespace

MoeLayer::MoeLayer(Safetensors tokens, Safetensors experts, Safetensors expected)
    : tokens_(std::move(tokens)), experts_(std::move(experts)), expected_(std::move(expected)) {
  const auto& hidden_shape = leading_shape(tokens_, kTokensFile, "hidden_states");
  const auto& ids_shape = leading_shape(tokens_, kTokensFile, "topk_ids");
  const auto& gate_shape = leading_shape(experts_, kExpertsFile, "w_gate");
  token_shape_.assign(hidden_shape.begin(), hidden_shape.end() - 1);
  hidden_size_ = static_cast<int>(hidden_shape.back());
  top_k_ = static_cast<int>(ids_shape.back());
  num_experts_ = static_cast<int>(gate_shape.front());
  require(gate_shape.size() == 3,
          fmt::format("{}: tensor \"w_gate\" has {} dimensions; 3 are right", kExpertsFile, gate_shape.size()));
  expert_hidden_size_ = static_cast<int>(gate_shape[1]);

  check(tokens_, {kTokensFile, "hidden_states", Dtype::kBf16, with_last(token_shape_, hidden_size_)});
  check(tokens_, {kTokensFile, "topk_ids", Dtype::kI64, with_last(token_shape_, top_k_)});
  check(tokens_, {kTokensFile, "topk_weights", Dtype::kF32, with_last(token_shape_, top_k_)});
  const std::vector<std::int64_t> inner{num_experts_, expert_hidden_size_, hidden_size_};
  check(experts_, {kExpertsFile, "w_gate", Dtype::kBf16, inner});
  check(experts_, {kExpertsFile, "w_up", Dtype::kBf16, inner});
  check(experts_, {kExpertsFile, "w_down", Dtype::kBf16, {num_experts_, hidden_size_, expert_hidden_size_}});
  check(expected_, {kExpectedFile, "expected_output", Dtype::kF32, with_last(token_shape_, hidden_size_)});
}

MoeLayer MoeLayer::load(const std::filesystem::path& folder) {
  return {Safetensors::load(folder / kTokensFile), Safetensors::load(folder / kExpertsFile),
          Safetensors::load(folder / kExpectedFile)};
}

TensorView MoeLayer::rows(const char* name, std::int64_t row_size) const {
  const StoredTensor& tensor = tokens_.at(name);
  const auto elements = static_cast<std::int64_t>(tensor.bytes.size()) / size_of(tensor.dtype);
  return TensorView::of_const(tensor.bytes.data(), tensor.dtype, {elements / row_size, row_size});
}

std::span<const float> MoeLayer::expected_output() const {
  const StoredTensor& tensor = expected_.at("expected_output");
  return {reinterpret_cast<const float*>(tensor.bytes.data()), tensor.bytes.size() / sizeof(float)};
}

std::span<const std::uint16_t> MoeLayer::expert_matrix(const char* name, int expert) const {
  const StoredTensor& tensor = experts_.at(name);
  const std::size_t elements = static_cast<std::size_t>(expert_hidden_size_) * static_cast<std::size_t>(hidden_size_);
  const auto* data = reinterpret_cast<const std::uint16_t*>(tensor.bytes.data());
  return {data + elements * static_cast<std::size_t>(expert), elements};
}

TokenRange tokens_of_rank(std::int64_t num_tokens, int rank, int num_ranks) {
  const std::int64_t small = num_tokens / num_ranks;
  const std::int64_t larger = num_tokens % num_ranks;
  return {.first = rank * small + std::min<std::int64_t>(rank, larger), .count = small + (rank < larger ? 1 : 0)};
}

LocalExperts::LocalExperts(const MoeLayer& layer, int first_expert, int num_experts)
    : hidden_size_(layer.hidden_size()),
      expert_hidden_size_(layer.expert_hidden_size()),
      experts_(static_cast<std::size_t>(num_experts)),
      routes_(experts_.size()) {
  for (int i = 0; i < num_experts; ++i) {
    Expert& expert = experts_[static_cast<std::size_t>(i)];
    expert.gate_and_up.resize(Eigen::Index{2} * expert_hidden_size_, hidden_size_);
    expert.down.resize(hidden_size_, expert_hidden_size_);
    const auto gate = layer.expert_matrix("w_gate", first_expert + i);
    const auto up = layer.expert_matrix("w_up", first_expert + i);
    const auto down = layer.expert_matrix("w_down", first_expert + i);
    float* inner = std::ranges::transform(gate, expert.gate_and_up.data(), decode<protocol::Bf16>).out;
    std::ranges::transform(up, inner, decode<protocol::Bf16>);
    std::ranges::transform(down, expert.down.data(), decode<protocol::Bf16>);
  }
}

void LocalExperts::collect_routes(const ExpertInput& input) {
  for (auto& routes : routes_)
    routes.clear();
  const RowAccess ids(input.topk_ids);
  const RowAccess weights(input.topk_weights);
  const auto top_k = input.topk_ids.shape[static_cast<std::size_t>(input.topk_ids.num_dims - 1)];
  const auto num_experts = static_cast<std::int64_t>(experts_.size());
  for (std::int64_t row = 0; row < ids.num_rows(); ++row) {
    const auto* row_ids = ids.row<const std::int64_t>(row);
    const auto* row_weights = weights.row<const float>(row);
    for (std::int64_t k = 0; k < top_k; ++k) {
      const std::int64_t expert = row_ids[k] - input.first_id;
      if (expert < 0 || expert >= num_experts) continue;
      routes_[static_cast<std::size_t>(expert)].push_back({.row = row, .weight = row_weights[k]});
    }
  }
}

// Leaves the expert's output for the rows in expert_output_.
void LocalExperts::run_expert(const ExpertInput& input, const Expert& expert, std::span<const RoutedRow> routes) {
  const RowAccess hidden_states(input.hidden_states);
  const bool quantised = input.hidden_states_scale.defined();
  const RowAccess scales(quantised ? input.hidden_states_scale : input.hidden_states);
  const auto count = static_cast<Eigen::Index>(routes.size());
  const auto hidden = static_cast<std::size_t>(hidden_size_);
  rows_.resize(count, hidden_size_);
  for (Eigen::Index i = 0; i < count; ++i) {
    const std::int64_t row = routes[static_cast<std::size_t>(i)].row;
    float* values = rows_.row(i).data();
    if (quantised) {
      dequantise_fp8_row({hidden_states.row<const std::uint8_t>(row), hidden}, scales.row<const float>(row), values);
    } else {
      std::transform(hidden_states.row<const std::uint16_t>(row), hidden_states.row<const std::uint16_t>(row) + hidden,
                     values, decode<protocol::Bf16>);
    }
  }
  gate_and_up_.noalias() = rows_ * expert.gate_and_up.transpose();
  const auto gate = gate_and_up_.leftCols(expert_hidden_size_).array();
  const auto up = gate_and_up_.rightCols(expert_hidden_size_).array();
  activation_ = (gate / (1.0F + (-gate).exp()) * up).matrix();
  expert_output_.noalias() = activation_ * expert.down.transpose();
}

void LocalExperts::add_expert(const ExpertInput& input, const Expert& expert, std::span<const RoutedRow> routes) {
  run_expert(input, expert, routes);
  for (std::size_t i = 0; i < routes.size(); ++i)
    sums_.row(routes[i].row) += routes[i].weight * expert_output_.row(static_cast<Eigen::Index>(i));
}

void LocalExperts::write_expert(const ExpertInput& input,
                                const Expert& expert,
                                std::span<const RoutedRow> routes,
                                const TensorView& output) {
  run_expert(input, expert, routes);
  const RowAccess output_rows(output);
  for (std::size_t i = 0; i < routes.size(); ++i) {
    const float* values = expert_output_.row(static_cast<Eigen::Index>(i)).data();
    std::transform(values, values + hidden_size_, output_rows.row<std::uint16_t>(routes[i].row),
                   encode<protocol::Bf16>);
  }
}

void LocalExperts::check(const ExpertInput& input, const TensorView& output) {
  const bool fp8 = input.hidden_states_scale.defined();
  const bool by_expert = !input.topk_ids.defined();
  require(
      input.hidden_states.dtype == (fp8 ? Dtype::kF8e4m3 : Dtype::kBf16) && output.dtype == Dtype::kBf16 &&
          (by_expert || (input.topk_ids.dtype == Dtype::kI64 && input.topk_weights.dtype == Dtype::kF32)) &&
          (!fp8 || input.hidden_states_scale.dtype == Dtype::kF32),
      fmt::format("experts got rows {}, scales {}, ids {}, weights {} and output {}; bf16 rows, or f8e4m3 rows with "
                  "f32 scales, i64 ids, f32 weights and a bf16 output are right",
                  input.hidden_states.describe(), input.hidden_states_scale.describe(), input.topk_ids.describe(),
                  input.topk_weights.describe(), output.describe()));
  const std::int64_t num_rows = RowAccess(input.hidden_states).num_rows();
  const bool routed_alike = by_expert || (RowAccess(input.topk_ids).num_rows() == num_rows &&
                                          RowAccess(input.topk_weights).num_rows() == num_rows);
  require(routed_alike && RowAccess(output).num_rows() == num_rows,
          fmt::format("experts got {} rows, ids {}, weights {} and output {}; equal numbers of rows are right",
                      num_rows, input.topk_ids.describe(), input.topk_weights.describe(), output.describe()));
}

void LocalExperts::collect_rows_by_expert(const ExpertInput& input) {
  require(input.rows_per_expert.size() == experts_.size() && input.hidden_states.num_dims == 3,
          fmt::format("{} experts got {} counts and rows {}; one block of rows and one count for each are right",
                      experts_.size(), input.rows_per_expert.size(), input.hidden_states.describe()));
  for (std::size_t expert = 0; expert < experts_.size(); ++expert) {
    routes_[expert].clear();
    const std::int64_t first = static_cast<std::int64_t>(expert) * input.hidden_states.shape[1];
    for (std::int64_t row = 0; row < input.rows_per_expert[expert]; ++row)
      routes_[expert].push_back({.row = first + row, .weight = 1.0F});
  }
}

// Rows that no expert wrote stay as they are where each expert has a block of its own: nobody looks at them.
void LocalExperts::compute(const ExpertInput& input, const TensorView& output) {
  check(input, output);
  if (!input.topk_ids.defined()) {
    collect_rows_by_expert(input);
    for (std::size_t i = 0; i < experts_.size(); ++i) {
      if (!routes_[i].empty()) write_expert(input, experts_[i], routes_[i], output);
    }
    return;
  }
  const RowAccess output_rows(output);
  const std::int64_t num_rows = output_rows.num_rows();
  collect_routes(input);
  sums_.setZero(num_rows, hidden_size_);
  for (std::size_t i = 0; i < experts_.size(); ++i) {
    if (!routes_[i].empty()) add_expert(input, experts_[i], routes_[i]);
  }
  for (std::int64_t row = 0; row < num_rows; ++row) {
    const float* sums = sums_.row(row).data();
    std::transform(sums, sums + hidden_size_, output_rows.row<std::uint16_t>(row), encode<protocol::Bf16>);
  }
}

double relative_error(std::span<const std::uint16_t> actual, std::span<const float> expected) {
  require(actual.size() == expected.size(), fmt::format("{} values compared with {}", actual.size(), expected.size()));
  double difference = 0;
  double norm = 0;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const double reference = expected[i];
    const double delta = static_cast<double>(decode<protocol::Bf16>(actual[i])) - reference;
    difference += delta * delta;
    norm += reference * reference;
  }
  return norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference);
}

}  // namespace tokenyard::cli
