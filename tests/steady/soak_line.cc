// SPDX-License-Identifier: Apache-2.0
#include "steady/soak_line.h"

#include <algorithm>
#include <utility>

#include "support/backends.h"
#include "support/check.h"
#include "support/reference.h"
#include "unit/block_cast_reference.h"

namespace tokenyard::steady_tests {
namespace {

using support::Rng;
using support::RoundPlan;
using support::World;

constexpr std::array kWideFloats{Dtype::kBf16, Dtype::kF16, Dtype::kF32};

template <class Choices>
auto pick(Rng& rng, const Choices& choices) {
  return choices[static_cast<std::size_t>(rng.below(std::ssize(choices)))];
}

bool once_in(Rng& rng, std::int64_t times) {
  return rng.below(times) == 0;
}

std::int64_t most_tokens(const World& world) {
  std::int64_t most = 0;
  for (const support::RankData& data : world.ranks)
    most = std::max(most, data.num_tokens);
  return most;
}

}  // namespace

std::string_view name(SoakAct act) {
  static constexpr std::array<std::string_view, 8> kNames{
      "a round",          "halves",        "straddling halves", "a held result",
      "a dropped handle", "two in flight", "a replay",          "growth"};
  return kNames[static_cast<std::size_t>(act)];
}

SoakLine::SoakLine(SoakLineSpec spec) : spec_(std::move(spec)), world_(spec_.world) {}

void SoakLine::create(const Group& group) {
  world_ = spec_.world;
  CommunicationOptions options = support::test_options();
  options.num_threads = spec_.num_threads;
  communication_.emplace(create_communication(group, world_.params, spec_.config, options));
}

void SoakLine::end(const Group& group, bool politely) {
  if (politely) {
    support::check_ok(communication_->destroy(), "destroy");
  } else {
    group.barrier();  // nobody needs this rank's window any more
  }
  communication_.reset();
  results_ = {};
}

SoakAct SoakLine::draw_act(Rng& rng) const {
  std::vector<SoakAct> acts{SoakAct::kRound, SoakAct::kRound, SoakAct::kHalves, SoakAct::kHeld, SoakAct::kDropped};
  const Contract& contract = communication_->contract();
  if (spec_.straddles) acts.push_back(SoakAct::kStraddle);
  if (contract.max_in_flight > 1) acts.push_back(SoakAct::kTwoInFlight);
  if (contract.handle_use == HandleUse::kReplay) acts.push_back(SoakAct::kReplay);
  if (spec_.grows && once_in(rng, 10)) return SoakAct::kGrow;
  return pick(rng, acts);
}

World SoakLine::draw_world(Rng& rng) const {
  support::WorldSpec spec = world_;
  spec.seed = rng.next();
  spec.skew = static_cast<support::Skew>(rng.below(support::kNumSkews));
  spec.id_dtype = once_in(rng, 2) ? Dtype::kI32 : Dtype::kI64;
  spec.weight_dtype = pick(rng, kWideFloats);
  spec.with_weights = !once_in(rng, 5);
  return make_world(spec);
}

RoundPlan SoakLine::draw_plan(Rng& rng, const World& world) const {
  RoundPlan plan{.seed = rng.next()};
  plan.expert_dtype = once_in(rng, 3) ? pick(rng, kWideFloats) : world.spec.params.dtype;
  plan.output_dtype = pick(rng, kWideFloats);
  plan.strided = once_in(rng, 2);
  plan.zero_copy = once_in(rng, 2);
  plan.caller_tensors = once_in(rng, 3);
  plan.flat_expert_output = once_in(rng, 2);
  draw_backend_part(rng, world, plan);
  return plan;
}

void SoakLine::draw_backend_part(Rng& rng, const World& world, RoundPlan& plan) const {
  const Contract& contract = communication_->contract();
  if (contract.takes_num_tokens_per_rank) plan.tell_num_tokens = once_in(rng, 2);
  if (contract.takes_bias) plan.num_biases = static_cast<int>(rng.below(3));
  if (contract.returns_weights) plan.weights_back = once_in(rng, 2);
  if (contract.takes_expert_alignment) plan.expert_alignment = static_cast<int>(1 + rng.below(4));
  if (contract.takes_num_worst_tokens && once_in(rng, 4)) {
    plan.num_worst_tokens = rng.below(world.spec.num_ranks * std::int64_t{world.spec.params.max_tokens_per_rank});
    plan.zero_copy = false;  // the window has the rows that came, and no tail
  }
  if (contract.takes_runtime_max_tokens && once_in(rng, 2)) {
    const std::int64_t most = most_tokens(world);
    plan.runtime_max_tokens = most + rng.below(communication_->params().max_tokens_per_rank - most + 1);
  }
  if (spec_.casts && once_in(rng, 2)) plan.cast = pick(rng, std::span(reference::kCasts));
}

void SoakLine::play(SoakAct act, std::uint64_t seed, const std::function<void()>& other) {
  Rng rng(seed);
  if (act == SoakAct::kHeld) return play_held(rng, other);
  if (act == SoakAct::kTwoInFlight) return play_two_in_flight(rng);
  if (act == SoakAct::kReplay) return play_replay(rng);
  if (act == SoakAct::kGrow) grow(rng);
  const World world = draw_world(rng);
  RoundPlan plan = draw_plan(rng, world);
  if (act == SoakAct::kHalves) plan.between_halves = [] {};
  if (act == SoakAct::kStraddle) plan.between_halves = other;
  if (act == SoakAct::kDropped) {
    support::dispatch_and_check(*communication_, world, plan, results_[0]);
    results_[0].handle = Handle();
    return;
  }
  support::play_round(*communication_, world, plan, results_[0]);
}

void SoakLine::play_held(Rng& rng, const std::function<void()>& other) {
  const World world = draw_world(rng);
  const RoundPlan plan = draw_plan(rng, world);
  std::vector<support::Tensor> memory;
  support::dispatch_and_check(*communication_, world, plan, results_[0], &memory);
  other();
  support::check_result(*communication_, world, plan, results_[0]);
  support::combine_and_check(*communication_, world, plan, results_[0], results_[0].handle);
}

void SoakLine::play_two_in_flight(Rng& rng) {
  std::array<World, 2> worlds;
  std::array<RoundPlan, 2> plans;
  std::array<std::vector<support::Tensor>, 2> memory;
  for (std::size_t i = 0; i < 2; ++i) {
    worlds[i] = draw_world(rng);
    plans[i] = draw_plan(rng, worlds[i]);
    support::dispatch_and_check(*communication_, worlds[i], plans[i], results_[i], &memory[i]);
  }
  const std::size_t first = once_in(rng, 2) ? 0 : 1;
  for (const std::size_t i : {first, 1 - first}) {
    support::check_result(*communication_, worlds[i], plans[i], results_[i]);
    support::combine_and_check(*communication_, worlds[i], plans[i], results_[i], results_[i].handle);
  }
}

void SoakLine::play_replay(Rng& rng) {
  const World world = draw_world(rng);
  RoundPlan plan = draw_plan(rng, world);
  plan.num_worst_tokens.reset();
  support::play_round(*communication_, world, plan, results_[0]);
  for (std::int64_t i = rng.below(3); i >= 0; --i) {
    const World changed = with_new_rows(world, rng.next());
    const support::RankTensors tensors(changed, communication_->rank(), plan.strided);
    support::check_ok(communication_->dispatch(tensors.input(false), {.replay = &results_[0].handle}, results_[1]),
                      "replay");
    support::check_result(*communication_, changed, plan, results_[1], false);
    plan.seed = rng.next();
    support::combine_and_check(*communication_, changed, plan, results_[1], results_[1].handle);
  }
}

// Small steps, up to a size at which every request fits; a new communication starts over.
void SoakLine::grow(Rng& rng) {
  MoeParams wanted = spec_.world.params;
  wanted.max_tokens_per_rank += static_cast<int>(rng.below(4));
  wanted.hidden_size += static_cast<int>(rng.below(17));
  wanted.top_k += static_cast<int>(rng.below(2));
  const std::int64_t extra = std::get<OneSidedConfig>(spec_.config).extra_payload_bytes_per_token + rng.below(20);
  communication_->get<Growth>()->reserve(wanted, extra);
  world_.params = wanted;
}

}  // namespace tokenyard::steady_tests
