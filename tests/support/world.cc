// SPDX-License-Identifier: Apache-2.0
#include "support/world.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>

#include "support/casts.h"
#include "support/check.h"
#include "support/rng.h"
#include "unit/block_cast_reference.h"

namespace tokenyard::support {
namespace {

// An expert drawn with probability ~ 1 / (expert + 1).
std::int64_t draw_zipf(Rng& rng, std::int64_t num_experts) {
  double total = 0;
  for (std::int64_t e = 0; e < num_experts; ++e)
    total += 1.0 / static_cast<double>(e + 1);
  double left = rng.uniform() * total;
  for (std::int64_t e = 0; e + 1 < num_experts; ++e) {
    left -= 1.0 / static_cast<double>(e + 1);
    if (left <= 0) return e;
  }
  return num_experts - 1;
}

// Different experts in [0, bound), padded with -1 when there are fewer than slots.
std::vector<std::int64_t> draw_distinct(Rng& rng, std::int64_t bound, int slots, bool zipf) {
  std::vector<std::int64_t> drawn;
  while (std::ssize(drawn) < std::min<std::int64_t>(slots, bound)) {
    std::int64_t expert = zipf ? draw_zipf(rng, bound) : rng.below(bound);
    while (std::find(drawn.begin(), drawn.end(), expert) != drawn.end())
      expert = (expert + 1) % bound;
    drawn.push_back(expert);
  }
  drawn.resize(static_cast<std::size_t>(slots), -1);
  return drawn;
}

std::vector<std::int64_t> draw_token(Rng& rng, const WorldSpec& spec) {
  const MoeParams& params = spec.params;
  const std::int64_t bound =
      spec.skew == Skew::kEmptyRanks ? std::max(1, params.num_experts / 2) : std::int64_t{params.num_experts};
  std::vector<std::int64_t> ids = draw_distinct(rng, bound, params.top_k, spec.skew == Skew::kZipf);
  switch (spec.skew) {
    case Skew::kAllToOneExpert:
      std::fill(ids.begin(), ids.end(), -1);
      ids[static_cast<std::size_t>(rng.below(params.top_k))] = params.num_experts / 2;
      break;
    case Skew::kMaskedIds: {
      const bool whole_row = rng.below(4) == 0;
      for (std::int64_t& id : ids) {
        if (whole_row || rng.below(5) < 2) id = rng.below(2) == 0 ? -1 : params.invalid_expert_id;
      }
      break;
    }
    case Skew::kDuplicates:
      for (std::int64_t& id : ids)
        id = rng.below(std::min(3, params.num_experts)) * (params.num_experts / 3);
      for (std::int64_t& id : ids)
        id = std::min<std::int64_t>(id, params.num_experts - 1);
      // No token may name more experts than there are, also when they repeat.
      for (auto slot = static_cast<std::size_t>(params.num_experts); slot < ids.size(); ++slot)
        ids[slot] = -1;
      break;
    default:
      break;
  }
  return ids;
}

Rows random_rows(Rng& rng, Dtype dtype, std::int64_t num_rows, std::int64_t columns) {
  Rows rows{.dtype = dtype, .columns = columns, .bytes = {}};
  rows.bytes.resize(static_cast<std::size_t>(num_rows * rows.row_bytes()));
  for (std::byte& byte : rows.bytes)
    byte = static_cast<std::byte>(rng.next() & 0xFF);
  return rows;
}

std::pair<Dtype, std::int64_t> value_columns(const MoeParams& params) {
  switch (params.dispatch_format) {
    case DispatchFormat::kNone:
      return {params.dtype, params.hidden_size};
    case DispatchFormat::kNvfp4:
    case DispatchFormat::kMxfp4:
      return {Dtype::kU8, (params.hidden_size + 1) / 2};
    default:
      return {Dtype::kF8e4m3, params.hidden_size};
  }
}

std::pair<Dtype, std::int64_t> scale_columns(const MoeParams& params) {
  const std::int64_t hidden = params.hidden_size;
  switch (params.dispatch_format) {
    case DispatchFormat::kFp8Block128:
      return {Dtype::kF32, (hidden + 127) / 128};
    case DispatchFormat::kMxfp8:
    case DispatchFormat::kMxfp4:
      return {Dtype::kE8m0, (hidden + 31) / 32};
    case DispatchFormat::kNvfp4:
      return {Dtype::kF8e4m3, (hidden + 15) / 16};
    default:
      return {Dtype::kU8, 0};
  }
}

RankData make_rank(Rng& rng, const WorldSpec& spec, std::int64_t num_tokens) {
  RankData data{.num_tokens = num_tokens};
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    const std::vector<std::int64_t> ids = draw_token(rng, spec);
    data.ids.insert(data.ids.end(), ids.begin(), ids.end());
  }
  const auto [value_dtype, values] = value_columns(spec.params);
  data.hidden = random_rows(rng, value_dtype, num_tokens, values);
  const auto [scale_dtype, scales] = scale_columns(spec.params);
  data.scale = random_rows(rng, scale_dtype, num_tokens, scales);
  if (spec.with_weights) {
    data.weights = random_rows(rng, spec.weight_dtype, num_tokens, spec.params.top_k);
    for (std::int64_t i = 0; i < num_tokens * spec.params.top_k; ++i) {
      store(spec.weight_dtype, data.weights.bytes.data(), i, static_cast<float>(0.01 + rng.uniform()));
    }
  }
  data.router_logits = random_rows(rng, Dtype::kF32, num_tokens, spec.router_columns);
  for (const std::int64_t bytes : spec.extra_row_bytes) {
    const Dtype dtype = bytes % 4 == 0 ? Dtype::kI32 : bytes % 2 == 0 ? Dtype::kBf16 : Dtype::kU8;
    data.extras.push_back(random_rows(rng, dtype, num_tokens, bytes / size_of(dtype)));
  }
  for (std::int64_t i = 0; i < spec.eplb_entries; ++i)
    data.eplb.push_back(static_cast<std::int32_t>(rng.next()));
  return data;
}

Tensor tensor_of(const Rows& rows, std::int64_t num_rows, bool strided) {
  if (rows.columns == 0) return {};
  Tensor tensor(rows.dtype, {num_rows, rows.columns}, {.padding_elements = strided ? 3 : 0});
  tensor.fill(rows.bytes);
  return tensor;
}

}  // namespace

std::string_view name(Skew skew) {
  constexpr std::string_view kNames[] = {"uniform", "zipf", "all_to_one", "empty_ranks", "masked", "duplicates"};
  return kNames[static_cast<std::size_t>(skew)];
}

World make_world(const WorldSpec& spec) {
  Rng rng(spec.seed);
  World world{.spec = spec, .ranks = {}};
  for (int rank = 0; rank < spec.num_ranks; ++rank) {
    std::int64_t num_tokens = rng.below(spec.params.max_tokens_per_rank + 1);
    if (spec.skew == Skew::kEmptyRanks && rank % 2 == 1) num_tokens = 0;
    if (rank == spec.num_ranks / 2 && spec.skew != Skew::kEmptyRanks) num_tokens = spec.params.max_tokens_per_rank;
    if (!spec.num_tokens.empty()) num_tokens = spec.num_tokens[static_cast<std::size_t>(rank)];
    world.ranks.push_back(make_rank(rng, spec, num_tokens));
  }
  return world;
}

World with_new_rows(const World& world, std::uint64_t seed) {
  World changed = world;
  WorldSpec other_spec = world.spec;
  other_spec.seed = seed;
  const World other = make_world(other_spec);
  for (int rank = 0; rank < world.spec.num_ranks; ++rank) {
    std::vector<std::byte>& bytes = changed.rank(rank).hidden.bytes;
    const std::vector<std::byte>& donor = other.rank(rank).hidden.bytes;
    for (std::size_t i = 0; i < bytes.size() && !donor.empty(); ++i)
      bytes[i] = donor[i % donor.size()] ^ std::byte{5};
    changed.rank(rank).weights = {};
  }
  changed.spec.with_weights = false;
  return changed;
}

World with_cast(const World& world, DispatchCast cast) {
  const bool e8m0 = cast == DispatchCast::kFp8Block128Ue8m0;
  World received = world;
  for (RankData& data : received.ranks) {
    const Rows given = std::exchange(data.hidden, {.dtype = Dtype::kF8e4m3, .columns = data.hidden.columns});
    data.scale = {.dtype = e8m0 ? Dtype::kE8m0 : Dtype::kF32, .columns = (given.columns + 127) / 128};
    for (std::int64_t token = 0; token < data.num_tokens; ++token) {
      std::vector<float> values;
      for (std::int64_t column = 0; column < given.columns; ++column)
        values.push_back(load(given.dtype, given.row(token).data(), column));
      const reference::CastRow row = reference::cast_row(values, cast);
      data.hidden.bytes.insert(data.hidden.bytes.end(), row.values.begin(), row.values.end());
      data.scale.bytes.insert(data.scale.bytes.end(), row.scales.begin(), row.scales.end());
    }
  }
  return received;
}

int owner_of(std::int64_t expert, const MoeParams& params, int num_ranks) {
  if (expert < 0 || expert >= params.num_experts) return -1;
  for (int rank = 0; rank < num_ranks; ++rank) {
    expert -= num_experts_of(params, rank, num_ranks);
    if (expert < 0) return rank;
  }
  return -1;
}

std::int64_t first_expert_of(const MoeParams& params, int rank, int num_ranks) {
  std::int64_t first = 0;
  for (int before = 0; before < rank; ++before)
    first += num_experts_of(params, before, num_ranks);
  return first;
}

std::int64_t num_experts_of(const MoeParams& params, int rank, int num_ranks) {
  return params.num_experts / num_ranks + (rank < params.num_experts % num_ranks ? 1 : 0);
}

std::vector<std::byte> id_bytes(std::span<const std::int64_t> ids, Dtype dtype) {
  std::vector<std::byte> bytes(ids.size() * static_cast<std::size_t>(size_of(dtype)));
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (dtype == Dtype::kI64) {
      std::memcpy(bytes.data() + 8 * i, &ids[i], 8);
    } else {
      const auto narrow = static_cast<std::int32_t>(ids[i]);
      std::memcpy(bytes.data() + 4 * i, &narrow, 4);
    }
  }
  return bytes;
}

RankTensors::RankTensors(const World& world, int rank, bool strided) {
  const RankData& data = world.rank(rank);
  const WorldSpec& spec = world.spec;
  hidden_ = tensor_of(data.hidden, data.num_tokens, strided);
  ids_ = Tensor(spec.id_dtype, {data.num_tokens, spec.params.top_k}, {.padding_elements = strided ? 1 : 0});
  ids_.fill(id_bytes(data.ids, spec.id_dtype));
  weights_ = tensor_of(data.weights, data.num_tokens, strided);
  scale_ = tensor_of(data.scale, data.num_tokens, strided);
  router_logits_ = tensor_of(data.router_logits, data.num_tokens, strided);
  for (const Rows& rows : data.extras) {
    extras_.push_back(tensor_of(rows, data.num_tokens, strided));
    extra_views_.push_back(extras_.back().view());
  }
  if (!data.eplb.empty()) {
    eplb_ = Tensor(Dtype::kI32, {1, std::ssize(data.eplb)});
    eplb_.fill(std::as_bytes(std::span(data.eplb)));
  }
}

DispatchInput RankTensors::input(bool with_ids) const {
  DispatchInput input;
  input.hidden_states = hidden_.view();
  if (with_ids) input.topk_ids = ids_.view();
  input.topk_weights = weights_.view();
  input.hidden_states_scale = scale_.view();
  input.router_logits = router_logits_.view();
  if (eplb_.view().defined()) {
    input.eplb_local_stats = TensorView(eplb_.view().data, Dtype::kI32, {eplb_.view().shape[1]});
  }
  input.extra_payloads = extra_views_;
  return input;
}

void RankTensors::check_unchanged() const {
  const Tensor* all[] = {&hidden_, &ids_, &weights_, &scale_, &router_logits_, &eplb_};
  for (const Tensor* tensor : all) {
    if (tensor->view().defined()) tensor->check_unchanged("an input of dispatch");
  }
  for (const Tensor& extra : extras_)
    extra.check_unchanged("an extra payload");
}

}  // namespace tokenyard::support
