// SPDX-License-Identifier: Apache-2.0
// What the case tests share: worlds written by hand, and a whole MoE layer around dispatch and combine.
// The layer's experts are f_e(x) = (e + 1) x, the identity or a square. Its result is compared with
// y = sum over slots of w_k f_{e_k}(x) in fp32, which knows nothing of ranks, layouts or rows.
// Thread rule: `moe_round` and `moe_combine` as a communication's; the rest are pure functions.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "support/backends.h"
#include "support/check.h"
#include "support/errors.h"
#include "support/round.h"
#include "support/run_ranks.h"

namespace tokenyard::support {

using IdTable = std::vector<std::vector<std::int64_t>>;  // [token][slot] of one rank
using WeightTable = std::vector<std::vector<float>>;

// Row elements are ((37 rank + 11 token + column) mod 61) - 30: exact in bf16, and different for near tokens.
// `weights` empty: 1 where the id is an expert, else 0. Shapes follow from the tables.
struct CaseWorld {
  MoeParams params{.num_experts = 4, .top_k = 1, .hidden_size = 16, .max_tokens_per_rank = 8, .dtype = Dtype::kF32};
  std::vector<IdTable> ids{};  // of each rank
  std::vector<WeightTable> weights{};
  Dtype id_dtype = Dtype::kI64;

  [[nodiscard]] World make() const;
};

[[nodiscard]] float case_value(int rank, std::int64_t token, std::int64_t column);
// `num_tokens` times the same row of ids.
[[nodiscard]] IdTable repeated(std::int64_t num_tokens, const std::vector<std::int64_t>& row);

enum class Experts : std::uint8_t {
  kScale,
  kIdentity,
  kSquare,            // w x^2
  kSquareOfWeighted,  // (w x)^2: the weight is applied before the expert
};

// What this rank's experts make of the rows of `result`, in the layout that combine takes; unused rows are NaN.
[[nodiscard]] Tensor expert_rows(const Communication& communication,
                                 const World& world,
                                 const RoundPlan& plan,
                                 const DispatchResult& result,
                                 Experts experts = Experts::kScale);
void check_y(const TensorView& y, const World& world, int rank, Experts experts = Experts::kScale);

// This rank's experts on what came, combine, and y, whose bytes are returned.
std::vector<std::byte> moe_combine(Communication& communication,
                                   const World& world,
                                   const RoundPlan& plan,
                                   DispatchResult& result,
                                   Experts experts = Experts::kScale);

// Dispatch (checked row by row), this rank's experts on what came, combine, and y.
void moe_round(Communication& communication,
               const World& world,
               const RoundPlan& plan,
               DispatchResult& result,
               Experts experts = Experts::kScale);

// All ranks, one communication, the worlds in turn.
void play_worlds(std::string_view backend,
                 const std::vector<World>& worlds,
                 const RoundPlan& plan = {},
                 Experts experts = Experts::kScale);

// Groups for communications of which several are between their halves at once: the same one for all, or one for each
// where communications of a group take turns.
class GroupsAtOnce {
 public:
  GroupsAtOnce(std::string_view backend, int num_ranks, std::size_t count) {
    if (!find_backend(backend).contract.takes_turns) return;
    for (std::size_t i = 0; i < count; ++i)
      own_.push_back(Group::in_process(num_ranks));
  }

  [[nodiscard]] const Group& of(std::size_t which, const Group& shared) const {
    return own_.empty() ? shared : own_[which][static_cast<std::size_t>(shared.rank())];
  }

 private:
  std::vector<std::vector<Group>> own_;
};

// A suite whose parameter is the backend.
class EachBackend : public ::testing::TestWithParam<std::string_view> {};

[[nodiscard]] inline std::string backend_name(const ::testing::TestParamInfo<std::string_view>& backend) {
  return std::string(backend.param);
}

}  // namespace tokenyard::support
