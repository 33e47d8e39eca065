// SPDX-License-Identifier: Apache-2.0
// C115: two micro-batches, in two threads of each rank or interleaved in one, keep their handles and rows apart. Where
// communications of a group take turns, threads have groups of their own.
// C116: layer after layer with other ids, and no synchronisation between them.
#include <array>
#include <chrono>
#include <exception>
#include <thread>

#include "cases/case_round.h"
#include "support/rng.h"

namespace tokenyard::support {
namespace {

constexpr int kRanks = 4;
constexpr int kLayers = 30;

// Six tokens a rank in micro-batch 0 and three in micro-batch 1; some ranks have none in some layers.
World micro_batch(std::size_t which, std::int64_t layer) {
  CaseWorld made;
  made.params = {.num_experts = 8, .top_k = 2, .hidden_size = 16, .max_tokens_per_rank = 6, .dtype = Dtype::kF32};
  made.ids.resize(kRanks);
  for (std::int64_t rank = 0; rank < kRanks; ++rank) {
    if (which == 1 && (rank + layer) % 4 == 0) continue;
    for (std::int64_t token = 0; token < (which == 0 ? 6 : 3); ++token)
      made.ids[static_cast<std::size_t>(rank)].push_back({(token + layer) % 8, (3 * token + 2 * rank + layer + 1) % 8});
  }
  return made.make();
}

class MicroBatches : public EachBackend {};

void play_layers(Communication& communication, std::size_t which, bool pauses) {
  DispatchResult result;
  Rng rng(static_cast<std::uint64_t>(communication.rank()) * 2 + which);
  for (std::int64_t layer = 0; layer < kLayers; ++layer) {
    const World world = micro_batch(which, layer);
    if (pauses) std::this_thread::sleep_for(std::chrono::microseconds(rng.below(300)));
    dispatch_and_check(communication, world, {}, result);
    if (pauses) std::this_thread::sleep_for(std::chrono::microseconds(rng.below(300)));
    moe_combine(communication, world, {}, result, Experts::kIdentity);
  }
}

TEST_P(MicroBatches, InTwoThreads) {
  for (const bool pauses : {false, true}) {
    const GroupsAtOnce groups(GetParam(), kRanks, 2);
    EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
      std::vector<Communication> communications;
      for (std::size_t which = 0; which < 2; ++which)
        communications.push_back(communication_for(groups.of(which, group), GetParam(), micro_batch(which, 0).spec));
      std::exception_ptr failure;
      std::thread second([&] {
        try {
          play_layers(communications[1], 1, pauses);
        } catch (...) {
          failure = std::current_exception();
        }
      });
      try {
        play_layers(communications[0], 0, pauses);
      } catch (...) {
        second.join();
        throw;
      }
      second.join();
      if (failure) std::rethrow_exception(failure);
    })) << pauses;
  }
}

// Dispatch 0, dispatch 1, combine 0, dispatch 0 of the next layer, combine 1, ...
TEST_P(MicroBatches, InterleavedInOneThread) {
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    std::vector<Communication> communications;
    for (std::size_t which = 0; which < 2; ++which)
      communications.push_back(communication_for(group, GetParam(), micro_batch(which, 0).spec));
    std::array<DispatchResult, 2> results;
    dispatch_and_check(communications[0], micro_batch(0, 0), {}, results[0]);
    for (std::int64_t layer = 0; layer < kLayers; ++layer) {
      dispatch_and_check(communications[1], micro_batch(1, layer), {}, results[1]);
      moe_combine(communications[0], micro_batch(0, layer), {}, results[0], Experts::kIdentity);
      if (layer + 1 < kLayers) dispatch_and_check(communications[0], micro_batch(0, layer + 1), {}, results[0]);
      moe_combine(communications[1], micro_batch(1, layer), {}, results[1], Experts::kIdentity);
    }
  }));
}

// Three layers with a communication each, and all in one (C116).
TEST_P(MicroBatches, LayerAfterLayer) {
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    std::vector<Communication> layers;
    for (std::size_t layer = 0; layer < 3; ++layer)
      layers.push_back(communication_for(group, GetParam(), micro_batch(0, 0).spec));
    DispatchResult result;
    for (std::int64_t pass = 0; pass < 5; ++pass) {
      for (std::size_t layer = 0; layer < 3; ++layer)
        moe_round(layers[layer], micro_batch(layer % 2, 3 * pass), {}, result, Experts::kIdentity);
    }
    for (std::int64_t layer = 0; layer < 9; ++layer)
      moe_round(layers[0], micro_batch(static_cast<std::size_t>(layer % 2), layer), {}, result, Experts::kIdentity);
  }));
}

INSTANTIATE_TEST_SUITE_P(Backends, MicroBatches, ::testing::ValuesIn(kMovingBackends), backend_name);

}  // namespace
}  // namespace tokenyard::support
