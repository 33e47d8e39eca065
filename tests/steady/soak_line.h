// SPDX-License-Identifier: Apache-2.0
// One communication of the mixed soak, with the rounds that it plays: made again and again, worked in every way that
// its contract allows, each result checked against the plain reference.
// Thread rule: one thread at a time, as a communication's.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tokenyard/communication.h"

#include "support/rng.h"
#include "support/round.h"
#include "support/world.h"

namespace tokenyard::steady_tests {

enum class SoakAct : std::uint8_t {
  kRound,        // dispatch and combine, with whatever the contract takes
  kHalves,       // in four halves, one after the other
  kStraddle,     // in four halves, with a round of another line between the two of each phase
  kHeld,         // with a round of another line between dispatch and combine, over which the result stays as it is
  kDropped,      // the handle dies without a combine
  kTwoInFlight,  // low_latency: the second dispatch before the first combine
  kReplay,       // high_throughput: a route, used again and again
  kGrow,         // one_sided: more room, or another routing, and a round in it
};

[[nodiscard]] std::string_view name(SoakAct act);

struct SoakLineSpec {
  std::string name;
  support::WorldSpec world{};  // what every round starts from
  BackendConfig config{};
  int num_threads = 1;
  bool casts = false;     // low_latency: a share of the rounds
  bool grows = false;     // one_sided
  bool straddles = true;  // false where a send half may need other ranks' receive half
};

// Two of every moving backend, different in params, config and options.
[[nodiscard]] std::vector<SoakLineSpec> soak_lines(int num_ranks);

class SoakLine {
 public:
  explicit SoakLine(SoakLineSpec spec);

  [[nodiscard]] const std::string& name() const { return spec_.name; }

  // Collective, as is all that follows: ranks play the same acts with the same seeds.
  void create(const Group& group);
  // Politely, or by letting it go.
  void end(const Group& group, bool politely);

  [[nodiscard]] bool lives() const { return communication_.has_value(); }

  // Of one that lives: no round of another such line may lie between its halves.
  [[nodiscard]] bool takes_turns() const { return communication_->contract().takes_turns; }

  [[nodiscard]] SoakAct draw_act(support::Rng& rng) const;
  // `other` plays a round of another line.
  void play(SoakAct act, std::uint64_t seed, const std::function<void()>& other);

 private:
  [[nodiscard]] support::World draw_world(support::Rng& rng) const;
  [[nodiscard]] support::RoundPlan draw_plan(support::Rng& rng, const support::World& world) const;
  void draw_backend_part(support::Rng& rng, const support::World& world, support::RoundPlan& plan) const;
  void play_held(support::Rng& rng, const std::function<void()>& other);
  void play_two_in_flight(support::Rng& rng);
  void play_replay(support::Rng& rng);
  void grow(support::Rng& rng);

  SoakLineSpec spec_;
  support::WorldSpec world_;  // of the present communication, which growth may have changed
  std::optional<Communication> communication_;
  std::array<DispatchResult, 2> results_;
};

}  // namespace tokenyard::steady_tests
