// SPDX-License-Identifier: Apache-2.0
// What all ranks put into one dispatch, made from a seed: every rank builds the same `World` and so knows what the
// others send, also when ranks are processes.
// Thread rule: plain values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "tokenyard/dispatch.h"
#include "tokenyard/params.h"

#include "support/tensor.h"

namespace tokenyard::support {

enum class Skew : std::uint8_t { kUniform, kZipf, kAllToOneExpert, kEmptyRanks, kMaskedIds, kDuplicates };

inline constexpr int kNumSkews = 6;

[[nodiscard]] std::string_view name(Skew skew);

struct WorldSpec {
  MoeParams params{};
  int num_ranks = 1;
  Skew skew = Skew::kUniform;
  Dtype id_dtype = Dtype::kI32;
  Dtype weight_dtype = Dtype::kF32;
  bool with_weights = true;
  std::vector<std::int64_t> extra_row_bytes{};
  std::int64_t router_columns = 0;  // f32 logits
  std::int64_t eplb_entries = 0;
  std::vector<std::int64_t> num_tokens{};  // of each rank; empty: drawn
  std::uint64_t seed = 1;
};

// Rows of one payload, one after the other.
struct Rows {
  Dtype dtype = Dtype::kU8;
  std::int64_t columns = 0;
  std::vector<std::byte> bytes{};

  [[nodiscard]] std::int64_t row_bytes() const { return columns * size_of(dtype); }

  [[nodiscard]] std::span<const std::byte> row(std::int64_t index) const {
    return std::span(bytes).subspan(static_cast<std::size_t>(index * row_bytes()),
                                    static_cast<std::size_t>(row_bytes()));
  }
};

struct RankData {
  std::int64_t num_tokens = 0;
  std::vector<std::int64_t> ids{};  // [num_tokens, top_k]
  Rows hidden{}, scale{}, weights{}, router_logits{};
  std::vector<Rows> extras{};
  std::vector<std::int32_t> eplb{};
};

struct World {
  WorldSpec spec{};
  std::vector<RankData> ranks{};

  [[nodiscard]] const RankData& rank(int index) const { return ranks[static_cast<std::size_t>(index)]; }

  [[nodiscard]] RankData& rank(int index) { return ranks[static_cast<std::size_t>(index)]; }

  [[nodiscard]] std::int64_t id(int rank_index, std::int64_t token, int slot) const {
    return rank(rank_index).ids[static_cast<std::size_t>(token * spec.params.top_k + slot)];
  }
};

[[nodiscard]] World make_world(const WorldSpec& spec);
// The same routes with other rows and without weights, as a replay sends them.
[[nodiscard]] World with_new_rows(const World& world, std::uint64_t seed);
// Rows and scales as receivers get them when the sender casts.
[[nodiscard]] World with_cast(const World& world, DispatchCast cast);

// The owner rule, counted out expert by expert. -1 for ids that name no expert.
[[nodiscard]] int owner_of(std::int64_t expert, const MoeParams& params, int num_ranks);
[[nodiscard]] std::int64_t first_expert_of(const MoeParams& params, int rank, int num_ranks);
[[nodiscard]] std::int64_t num_experts_of(const MoeParams& params, int rank, int num_ranks);

// One rank's part of a world in guarded tensors, with the DispatchInput that views them.
class RankTensors {
 public:
  RankTensors(const World& world, int rank, bool strided);

  [[nodiscard]] DispatchInput input(bool with_ids = true) const;

  [[nodiscard]] std::int64_t num_tokens() const { return hidden_.num_rows(); }

  void check_unchanged() const;

 private:
  Tensor hidden_, ids_, weights_, scale_, router_logits_, eplb_;
  std::vector<Tensor> extras_;
  std::vector<TensorView> extra_views_;
};

// Ids as bytes of `dtype` (i32 or i64).
[[nodiscard]] std::vector<std::byte> id_bytes(std::span<const std::int64_t> ids, Dtype dtype);

}  // namespace tokenyard::support
