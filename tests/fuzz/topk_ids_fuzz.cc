// SPDX-License-Identifier: Apache-2.0
// Planning of expert ids: whatever the ids, an Error that names one that is wrong, or counts that agree with a plain
// recount. Asked of ranks of several sizes of groups, each through RouteQuery, which plans as a dispatch does.
#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "tokenyard/communication.h"

#include "fuzz/input.h"
#include "fuzz/target.h"
#include "support/check.h"
#include "support/run_ranks.h"
#include "support/world.h"

namespace tokenyard::fuzz {
namespace {

using support::check;
using support::check_eq;

// One rank's side of a group of threads; planning is local, so the others need not live on.
struct Asked {
  std::vector<Communication> ranks;
};

Asked make_asked(std::string_view backend, int num_ranks, const MoeParams& params) {
  std::vector<std::unique_ptr<Communication>> made(static_cast<std::size_t>(num_ranks));
  support::run_ranks(num_ranks, [&](const Group& group) {
    made[static_cast<std::size_t>(group.rank())] =
        std::make_unique<Communication>(create_communication(group, params, backend));
  });
  Asked asked;
  for (auto& communication : made)
    asked.ranks.push_back(std::move(*communication));
  return asked;
}

std::deque<Asked>& all_asked() {
  static std::deque<Asked> all = [] {
    std::deque<Asked> made;
    const MoeParams few{.num_experts = 3, .top_k = 5, .hidden_size = 4, .max_tokens_per_rank = 9};
    const MoeParams uneven{
        .num_experts = 11, .top_k = 4, .hidden_size = 4, .max_tokens_per_rank = 70, .invalid_expert_id = 11};
    const MoeParams wide{
        .num_experts = 256, .top_k = 8, .hidden_size = 4, .max_tokens_per_rank = 40, .invalid_expert_id = -7};
    made.push_back(make_asked("high_throughput", 1, few));
    made.push_back(make_asked("one_sided", 5, few));
    made.push_back(make_asked("high_throughput", 3, uneven));
    made.push_back(make_asked("one_sided", 4, wide));
    return made;
  }();
  return all;
}

struct Ids {
  std::vector<std::int64_t> values;  // [num_tokens, top_k]
  std::int64_t num_tokens = 0;
};

Ids draw_ids(Input& input, const MoeParams& params, Dtype dtype) {
  Ids ids;
  ids.num_tokens = input.below(params.max_tokens_per_rank + 2);
  // Most ids are experts, so that not every input ends at the first of them.
  const bool hostile = input.flip();
  for (std::int64_t i = 0; i < ids.num_tokens * params.top_k; ++i) {
    std::int64_t id = -1;
    if (!input.empty()) {
      const std::int64_t kind = input.below(16);
      id = kind == 0 ? -1 : kind == 1 ? params.invalid_expert_id : input.below(params.num_experts);
      if (hostile && kind == 2) id = input.hostile<std::int64_t>();
    }
    ids.values.push_back(dtype == Dtype::kI32 ? static_cast<std::int32_t>(id) : id);
  }
  return ids;
}

bool is_none(const MoeParams& params, std::int64_t id) {
  return id == -1 || id == params.invalid_expert_id;
}

// The ids that may not be there; of a token that names too many, nothing.
std::vector<std::int64_t> wrong_ids(const MoeParams& params, const Ids& ids) {
  std::vector<std::int64_t> wrong;
  for (const std::int64_t id : ids.values) {
    if (!is_none(params, id) && (id < 0 || id >= params.num_experts)) wrong.push_back(id);
  }
  return wrong;
}

bool names_too_many(const MoeParams& params, const Ids& ids) {
  for (std::int64_t token = 0; token < ids.num_tokens; ++token) {
    std::int64_t live = 0;
    for (std::int64_t slot = 0; slot < params.top_k; ++slot)
      live += is_none(params, ids.values[static_cast<std::size_t>(token * params.top_k + slot)]) ? 0 : 1;
    if (live > params.num_experts) return true;
  }
  return false;
}

void check_counts(const Layout& layout, const MoeParams& params, const Ids& ids, int num_ranks) {
  std::vector<std::int32_t> per_rank(static_cast<std::size_t>(num_ranks), 0);
  std::vector<std::int32_t> per_expert(static_cast<std::size_t>(params.num_experts), 0);
  check_eq(layout.is_token_in_rank.shape[0], ids.num_tokens, "tokens of the layout");
  check_eq(layout.is_token_in_rank.shape[1], num_ranks, "ranks of the layout");
  const auto* in_rank = layout.is_token_in_rank.as<const std::uint8_t>();
  for (std::int64_t token = 0; token < ids.num_tokens; ++token) {
    std::set<std::int64_t> experts;
    std::set<int> ranks;
    for (std::int64_t slot = 0; slot < params.top_k; ++slot) {
      const std::int64_t id = ids.values[static_cast<std::size_t>(token * params.top_k + slot)];
      if (is_none(params, id)) continue;
      experts.insert(id);
      ranks.insert(support::owner_of(id, params, num_ranks));
    }
    for (const std::int64_t expert : experts)
      ++per_expert[static_cast<std::size_t>(expert)];
    for (int rank = 0; rank < num_ranks; ++rank) {
      check_eq(int{in_rank[token * num_ranks + rank]}, ranks.contains(rank) ? 1 : 0,
               "token " + std::to_string(token) + " in rank " + std::to_string(rank));
      per_rank[static_cast<std::size_t>(rank)] += ranks.contains(rank) ? 1 : 0;
    }
  }
  support::check_lists_eq(layout.num_tokens_per_rank, per_rank, "num_tokens_per_rank");
  support::check_lists_eq(layout.num_tokens_per_expert, per_expert, "num_tokens_per_expert");
}

void check_refusal(const Error& error, const MoeParams& params, const Ids& ids) {
  if (ids.num_tokens > params.max_tokens_per_rank) {
    check(error.code() == ErrorCode::kCapacity, "too many tokens are a matter of capacity");
    return;
  }
  check(error.code() == ErrorCode::kInvalidArgument, "wrong ids are an invalid argument");
  const std::vector<std::int64_t> wrong = wrong_ids(params, ids);
  const std::string text = error.what();
  const bool named = std::ranges::any_of(
      wrong, [&](std::int64_t id) { return text.find(" is " + std::to_string(id) + ";") != std::string::npos; });
  check(named || names_too_many(params, ids), "the message names no wrong id: " + text);
}

}  // namespace

void run_target(std::span<const std::byte> bytes) {
  Input input(bytes);
  auto& all = all_asked();
  Asked& asked = all[static_cast<std::size_t>(input.below(std::ssize(all)))];
  Communication& communication = asked.ranks[static_cast<std::size_t>(input.below(std::ssize(asked.ranks)))];
  const MoeParams& params = communication.params();
  const Dtype dtype = input.flip() ? Dtype::kI64 : Dtype::kI32;
  const std::int64_t padding = input.below(3);
  const Ids ids = draw_ids(input, params, dtype);

  // Exactly the memory that the view needs: the last row has no padding.
  const std::int64_t stride = params.top_k + padding;
  const auto element = static_cast<std::size_t>(size_of(dtype));
  const std::int64_t elements = ids.num_tokens == 0 ? 0 : (ids.num_tokens - 1) * stride + params.top_k;
  std::vector<std::byte> memory(static_cast<std::size_t>(elements) * element, std::byte{0x7F});
  const std::vector<std::byte> dense = support::id_bytes(ids.values, dtype);
  const std::size_t row_bytes = static_cast<std::size_t>(params.top_k) * element;
  for (std::int64_t token = 0; token < ids.num_tokens; ++token) {
    std::memcpy(memory.data() + static_cast<std::size_t>(token * stride) * element,
                dense.data() + static_cast<std::size_t>(token) * row_bytes, row_bytes);
  }
  TensorView view(memory.data(), dtype, {ids.num_tokens, params.top_k});
  view.strides[0] = stride;

  const bool right =
      ids.num_tokens <= params.max_tokens_per_rank && wrong_ids(params, ids).empty() && !names_too_many(params, ids);
  auto* query = communication.get<RouteQuery>();
  check(query != nullptr, "this backend answers no queries");
  try {
    const Layout layout = query->layout(view);
    check(right, "ids are taken that are no experts");
    check_counts(layout, params, ids, communication.num_ranks());
  } catch (const Error& error) {
    check(!right, "good ids are refused: " + std::string(error.what()));
    check_refusal(error, params, ids);
  }
}

}  // namespace tokenyard::fuzz
