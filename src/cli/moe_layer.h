// SPDX-License-Identifier: Apache-2.0
// One mixture-of-experts layer from safetensors files: its tokens with their routes, its experts, and the output that
// the layer should give.
//
//   tokens.safetensors    hidden_states [..., hidden] bf16, topk_ids [..., top_k] i64, topk_weights [..., top_k] f32
//   experts.safetensors   w_gate, w_up [num_experts, expert_hidden, hidden], w_down [num_experts, hidden,
//   expert_hidden],
//                         all bf16
//   expected.safetensors  expected_output [..., hidden] f32
//
//   output[t] = sum over k of topk_weights[t, k] * w_down[e] (silu(w_gate[e] x) * (w_up[e] x)),
//               with e = topk_ids[t, k] and x = hidden_states[t]
//
// Thread rule: a layer may be read from many threads; LocalExperts serves one thread at a time.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

#include <Eigen/Core>

#include "tokenyard/tensor.h"

#include "cli/safetensors.h"

namespace tokenyard::cli {

class MoeLayer {
 public:
  // Throws kInvalidArgument that names the file and tensor when shapes or dtypes do not fit together.
  static MoeLayer load(const std::filesystem::path& folder);

  [[nodiscard]] int num_experts() const { return num_experts_; }

  [[nodiscard]] int top_k() const { return top_k_; }

  [[nodiscard]] int hidden_size() const { return hidden_size_; }

  [[nodiscard]] int expert_hidden_size() const { return expert_hidden_size_; }

  [[nodiscard]] std::int64_t num_tokens() const { return hidden_states().num_rows(); }

  // The dimensions of the files before the last one; their product is num_tokens().
  [[nodiscard]] std::span<const std::int64_t> token_shape() const { return token_shape_; }

  // All tokens of all domains as rows.
  [[nodiscard]] TensorView hidden_states() const { return rows("hidden_states", hidden_size_); }

  [[nodiscard]] TensorView topk_ids() const { return rows("topk_ids", top_k_); }

  [[nodiscard]] TensorView topk_weights() const { return rows("topk_weights", top_k_); }

  [[nodiscard]] std::span<const float> expected_output() const;
  // One expert's matrix as it is stored.
  [[nodiscard]] std::span<const std::uint16_t> expert_matrix(const char* name, int expert) const;

 private:
  MoeLayer(Safetensors tokens, Safetensors experts, Safetensors expected);

  [[nodiscard]] TensorView rows(const char* name, std::int64_t row_size) const;

  Safetensors tokens_;
  Safetensors experts_;
  Safetensors expected_;
  std::vector<std::int64_t> token_shape_;
  int num_experts_ = 0;
  int top_k_ = 0;
  int hidden_size_ = 0;
  int expert_hidden_size_ = 0;
};

struct TokenRange {
  std::int64_t first = 0;
  std::int64_t count = 0;
};

// Contiguous shares in rank order; sizes differ by at most one.
[[nodiscard]] TokenRange tokens_of_rank(std::int64_t num_tokens, int rank, int num_ranks);

// Rows as a dispatch gives them: [rows, *] or [num_ranks, tokens_per_rank, *] with their ids and weights, or else
// [num_experts, rows, *], an expert's rows from 0 on; with strides.
struct ExpertInput {
  TensorView hidden_states{};                       // bf16, or f8e4m3 with scales
  TensorView hidden_states_scale{};                 // f32, one per 128 values; not given for bf16
  TensorView topk_ids{};                            // i64
  TensorView topk_weights{};                        // f32
  std::int64_t first_id = 0;                        // the id by which `topk_ids` call the first of these experts
  std::span<const std::int64_t> rows_per_expert{};  // by expert: how many rows each has; ids and weights are not given
};

// The experts of one rank, ready to compute: fp32, one matrix product per expert and matrix over all of its rows.
class LocalExperts {
 public:
  LocalExperts(const MoeLayer& layer, int first_expert, int num_experts);

  // Writes to each row of `output` (bf16, shaped as the input's rows) the weighted sum over these experts of that row,
  // rounded once; rows without a route to them become zero. Of rows by expert, the expert's output, not weighted.
  void compute(const ExpertInput& input, const TensorView& output);

 private:
  using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

  struct Expert {
    Matrix gate_and_up;  // [2 * expert_hidden, hidden]
    Matrix down;         // [hidden, expert_hidden]
  };

  struct RoutedRow {
    std::int64_t row = 0;
    float weight = 0;
  };

  static void check(const ExpertInput& input, const TensorView& output);
  void collect_routes(const ExpertInput& input);
  void collect_rows_by_expert(const ExpertInput& input);
  void run_expert(const ExpertInput& input, const Expert& expert, std::span<const RoutedRow> routes);
  void add_expert(const ExpertInput& input, const Expert& expert, std::span<const RoutedRow> routes);
  void write_expert(const ExpertInput& input,
                    const Expert& expert,
                    std::span<const RoutedRow> routes,
                    const TensorView& output);

  int hidden_size_;
  int expert_hidden_size_;
  std::vector<Expert> experts_;
  // Kept between calls so that their memory is.
  std::vector<std::vector<RoutedRow>> routes_;  // per expert
  Matrix rows_, gate_and_up_, activation_, expert_output_, sums_;
};

// ||actual - expected|| / ||expected|| with sums in double. `actual` is bf16.
[[nodiscard]] double relative_error(std::span<const std::uint16_t> actual, std::span<const float> expected);

}  // namespace tokenyard::cli
