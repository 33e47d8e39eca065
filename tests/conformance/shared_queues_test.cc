// SPDX-License-Identifier: Apache-2.0
// All two_sided communications of a group share one window of queues: they take turns and nobody's rows are taken for
// another's, whatever their shapes; the last one to go frees the queues, in any order.
#include <gtest/gtest.h>

#include <array>
#include <fstream>
#include <optional>
#include <sstream>
#include <vector>

#include "conformance/small_spec.h"
#include "support/check.h"
#include "support/errors.h"
#include "support/rng.h"
#include "support/run_ranks.h"

namespace tokenyard::support {
namespace {

constexpr int kRanks = 3;

// Rows of different widths, tokens, experts and queue needs; `queue` is large enough for all.
constexpr std::int64_t kQueueBytes = 4096;

std::vector<WorldSpec> shapes(std::uint64_t seed) {
  std::vector<WorldSpec> specs(3, small_spec(kRanks, seed));
  specs[1].params.hidden_size = 130;
  specs[1].params.max_tokens_per_rank = 40;
  specs[2].params.num_experts = 12;
  specs[2].params.top_k = 3;
  specs[2].params.dtype = Dtype::kF32;
  return specs;
}

Communication shared(const Group& group, const WorldSpec& spec, std::int64_t queue_bytes = kQueueBytes) {
  return create_communication(group, spec.params, TwoSidedConfig{.queue_bytes_per_peer = queue_bytes}, test_options());
}

RoundPlan plan_of(const WorldSpec& spec, std::uint64_t seed) {
  return {.seed = seed, .expert_dtype = spec.params.dtype, .output_dtype = spec.params.dtype};
}

// What this process maps of shared memory, one entry for each window.
std::vector<std::int64_t> mapped_windows() {
  std::vector<std::int64_t> sizes;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("memfd:") == std::string::npos) continue;
    std::istringstream range(line);
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    char dash = 0;
    range >> std::hex >> begin >> dash >> end;
    sizes.push_back(static_cast<std::int64_t>(end - begin));
  }
  return sizes;
}

std::int64_t mapped_bytes() {
  std::int64_t bytes = 0;
  for (const std::int64_t size : mapped_windows())
    bytes += size;
  return bytes;
}

class SharedQueues : public ::testing::TestWithParam<RankKind> {};

// Dispatches and combines of three shapes in orders that change from pass to pass.
TEST_P(SharedQueues, CarryEveryShapeInTurn) {
  EXPECT_NO_THROW(run(GetParam(), kRanks, [](const Group& group) {
    std::vector<Communication> all;
    for (const WorldSpec& spec : shapes(1))
      all.push_back(shared(group, spec));
    std::vector<DispatchResult> results(3);
    Rng rng(5);  // the same on every rank
    for (std::uint64_t pass = 0; pass < 100; ++pass) {
      const std::vector<WorldSpec> specs = shapes(100 + pass);
      std::vector<World> worlds;
      for (const WorldSpec& spec : specs)
        worlds.push_back(make_world(spec));
      std::array<std::size_t, 3> order{0, 1, 2};
      for (const bool dispatch : {true, false}) {
        for (std::size_t i = 3; i-- > 1;)
          std::swap(order[i], order[static_cast<std::size_t>(rng.below(static_cast<std::int64_t>(i) + 1))]);
        for (const std::size_t i : order) {
          if (dispatch) {
            dispatch_and_check(all[i], worlds[i], plan_of(specs[i], pass), results[i]);
          } else {
            combine_and_check(all[i], worlds[i], plan_of(specs[i], pass), results[i], results[i].handle);
          }
        }
      }
    }
    for (Communication& one : all)
      check_ok(one.destroy(), "destroy");
  }));
}

// Halves of one communication may overlap; the others come between its operations.
TEST_P(SharedQueues, CarrySplitRoundsBetweenOthers) {
  EXPECT_NO_THROW(run(GetParam(), kRanks, [](const Group& group) {
    const WorldSpec spec = all_to_all_spec(kRanks, 7);
    Communication one = shared(group, spec, 1024);
    Communication other = shared(group, spec, 512);
    DispatchResult first;
    DispatchResult second;
    for (std::uint64_t round = 0; round < 20; ++round) {
      const World world = make_world(with_seed(spec, round));
      const RankTensors tensors(world, group.rank(), false);
      auto* split = (round % 2 == 0 ? one : other).get<SplitPhases>();
      Communication& between = round % 2 == 0 ? other : one;
      check_ok(split->dispatch_send(tensors.input(), {}, first), "dispatch_send");
      check_ok(split->dispatch_receive({}, first), "dispatch_receive");
      dispatch_and_check(between, world, {}, second);
      Tensor rows(Dtype::kBf16, {num_flat_rows(first.hidden_states), spec.params.hidden_size});
      Tensor output(Dtype::kBf16, {spec.params.max_tokens_per_rank, spec.params.hidden_size});
      TensorView view = output.view();
      check_ok(split->combine_send(first.handle, {.expert_output = rows.view()}, {}), "combine_send");
      check_ok(split->combine_receive(first.handle, view), "combine_receive");
      combine_and_check(between, world, {.seed = round}, second, second.handle);
    }
  }));
}

// Rounds that are dropped, refused or given up use up their turns like others.
TEST_P(SharedQueues, SurviveMisuseOfEachOther) {
  EXPECT_NO_THROW(run(GetParam(), kRanks, [](const Group& group) {
    const std::vector<WorldSpec> specs = shapes(3);
    std::vector<Communication> all;
    for (const WorldSpec& spec : specs)
      all.push_back(shared(group, spec));
    DispatchResult result;
    for (std::uint64_t round = 0; round < 12; ++round) {
      const WorldSpec spec = with_seed(specs[round % 3], round);
      Communication& victim = all[round % 3];
      Communication& other = all[(round + 1) % 3];
      const int culprit = static_cast<int>(round) % kRanks;
      const World world = make_world(spec);
      const RankTensors tensors(world, group.rank(), false);
      DispatchInput input = tensors.input();
      if (group.rank() == culprit) {
        input.topk_ids = {};
        check_throws(ErrorCode::kInvalidArgument, {"topk_ids"}, [&] { (void)victim.dispatch(input, {}, result); });
      } else {
        check_fault(victim.dispatch(input, {}, result), StatusCode::kAborted, culprit, Phase::kDispatch);
      }
      const WorldSpec next = with_seed(specs[(round + 1) % 3], round);
      dispatch_and_check(other, make_world(next), plan_of(next, round), result);
      if (round % 2 == 0) {
        combine_and_check(other, make_world(next), plan_of(next, round), result, result.handle);
      } else {
        result.handle = Handle();
      }
      check_ok(victim.get<SplitPhases>()->dispatch_send(tensors.input(), {}, result), "dispatch_send");
      result.handle = Handle();  // neither rows nor headers were read
    }
    for (std::size_t i = 0; i < 3; ++i)
      play_round(all[i], make_world(specs[i]), plan_of(specs[i], i), result);
  }));
}

TEST_P(SharedQueues, AreOneWindowHoweverManyUseThem) {
  EXPECT_NO_THROW(run(GetParam(), kRanks, [](const Group& group) {
    const std::int64_t large = std::int64_t{4} << 20;
    const std::int64_t queues = 2 * kRanks * large;  // of each rank
    const std::int64_t before = mapped_bytes();
    const std::vector<WorldSpec> specs = shapes(1);
    std::optional<Communication> first(shared(group, specs[0], large));
    group.barrier();
    const std::int64_t with_one = mapped_bytes() - before;
    check(with_one >= kRanks * queues, "the queues are not mapped");
    check(with_one < kRanks * queues + (1 << 20), "one communication maps more than its queues");
    group.barrier();
    std::optional<Communication> second(shared(group, specs[1], 0));
    std::optional<Communication> third(shared(group, specs[2], large));
    group.barrier();
    check(mapped_bytes() - before < kRanks * queues + (1 << 20), "others have queues of their own");
    check(second->window_bytes() >= queues && second->window_bytes() < queues + (1 << 20), "window_bytes");
    check_eq(first->window_bytes(),
             window_bytes(specs[0].params, TwoSidedConfig{.queue_bytes_per_peer = large}, kRanks), "window_bytes");
    group.barrier();
    // Whoever made them may go; the last one frees them, and not before.
    first.reset();
    third.reset();
    group.barrier();
    check(mapped_bytes() - before >= kRanks * queues, "the queues went with their maker");
    DispatchResult result;
    play_round(*second, make_world(specs[1]), {}, result);
    second.reset();
    group.barrier();
    check_eq(mapped_bytes(), before, "bytes mapped after the last one went");
    group.barrier();
    Communication again = shared(group, specs[0]);
    play_round(again, make_world(specs[0]), {}, result);
  }));
}

TEST_P(SharedQueues, EndInAnyOrder) {
  EXPECT_NO_THROW(run(GetParam(), kRanks, [](const Group& group) {
    constexpr std::array<std::array<std::size_t, 3>, 6> kOrders{
        {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}}};
    const std::vector<WorldSpec> specs = shapes(1);
    const std::size_t before = mapped_windows().size();
    for (std::size_t i = 0; i < kOrders.size(); ++i) {
      std::array<std::optional<Communication>, 3> all;
      for (std::size_t which = 0; which < 3; ++which)
        all[which].emplace(shared(group, specs[which]));
      for (const std::size_t gone : kOrders[i]) {
        DispatchResult result;
        for (std::size_t which = 0; which < 3; ++which) {
          if (all[which]) play_round(*all[which], make_world(specs[which]), plan_of(specs[which], i), result);
        }
        if (i % 2 == 0) check_ok(all[gone]->destroy(), "destroy");
        all[gone].reset();
      }
      group.barrier();
      check_eq(mapped_windows().size(), before, "windows after the last one went");
      group.barrier();
    }
  }));
}

// A rank that dropped its last one has no queues any more: all make new ones, and those of before are nobody's.
TEST_P(SharedQueues, AreMadeAnewWhenARankHasNoneLeft) {
  EXPECT_NO_THROW(run(GetParam(), kRanks, [](const Group& group) {
    const WorldSpec spec = all_to_all_spec(kRanks, 3);
    std::optional<Communication> old(shared(group, spec));
    std::optional<Communication> older(shared(group, spec));
    DispatchResult result;
    for (int round = 0; round < kRanks; ++round) {
      play_round(*old, make_world(spec), {}, result);
      result.handle = Handle();
      if (group.rank() == round) {
        old.reset();
        older.reset();
      }
      Communication fresh = shared(group, spec);
      Communication next = shared(group, spec);
      play_round(fresh, make_world(spec), {}, result);
      play_round(next, make_world(spec), {}, result);
      group.barrier();
      older.reset();
      old.emplace(std::move(fresh));
      older.emplace(std::move(next));
    }
  }));
}

// Queues that hold less than is asked are not shared; the larger ones are, from then on.
TEST_P(SharedQueues, AreReplacedByLargerOnes) {
  EXPECT_NO_THROW(run(GetParam(), kRanks, [](const Group& group) {
    const WorldSpec spec = all_to_all_spec(kRanks, 3);
    Communication small = shared(group, spec, 1024);
    Communication large = shared(group, spec, 1 << 20);
    const std::size_t windows = mapped_windows().size();
    group.barrier();
    Communication like_small = shared(group, spec, 1024);
    group.barrier();
    check_eq(mapped_windows().size(), windows + kRanks, "windows");
    check_eq(like_small.window_bytes(), large.window_bytes(), "bytes of the window with the larger queues");
    check(small.window_bytes() < large.window_bytes(), "the small ones grew");
    // Those on other queues need not take turns with these.
    const World world = make_world(spec);
    const RankTensors tensors(world, group.rank(), false);
    DispatchResult sent;
    DispatchResult result;
    check_ok(small.get<SplitPhases>()->dispatch_send(tensors.input(), {}, sent), "dispatch_send");
    play_round(large, world, {}, result);
    play_round(like_small, world, {}, result);
    check_ok(small.get<SplitPhases>()->dispatch_receive({}, sent), "dispatch_receive");
    combine_and_check(small, world, {}, sent, sent.handle);
  }));
}

TEST_P(SharedQueues, KeepTheirTurnsAcrossTheWrap) {
  EXPECT_NO_THROW(run(GetParam(), kRanks, [](const Group& group) {
    const std::vector<WorldSpec> specs = shapes(9);
    CommunicationOptions options = test_options();
    options.initial_epoch = 0xFFFFFFFA;
    Communication one = communication_for(group, "two_sided", specs[0], options);
    Communication other = communication_for(group, "two_sided", specs[1]);
    DispatchResult result;
    for (std::uint64_t round = 0; round < 8; ++round) {
      play_round(one, make_world(with_seed(specs[0], round)), {.seed = round}, result);
      play_round(other, make_world(with_seed(specs[1], round)), {.seed = round}, result);
    }
  }));
}

INSTANTIATE_TEST_SUITE_P(Ranks,
                         SharedQueues,
                         ::testing::Values(RankKind::kThreads, RankKind::kProcesses),
                         [](const auto& kind) { return std::string(name(kind.param)); });

}  // namespace
}  // namespace tokenyard::support
