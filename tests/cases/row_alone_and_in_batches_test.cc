// SPDX-License-Identifier: Apache-2.0
// C98: a token's result does not depend on the tokens beside it, on who is late, or on the number of threads.
#include <array>
#include <chrono>
#include <thread>

#include "cases/case_round.h"
#include "support/casts.h"
#include "support/rng.h"

namespace tokenyard::support {
namespace {

class RowAloneAndInBatches : public EachBackend {};

constexpr int kRanks = 4;

// The sum of 1000, 1, -1000 and 0.001 in fp32 depends on its order. Rank r's expert multiplies by its number.
constexpr std::array<float, kRanks> kFactors{1e3F, 1.0F, -1e3F, 1e-3F};

World batch(std::int64_t tokens) {
  CaseWorld made{.ids = std::vector<IdTable>(kRanks, repeated(tokens, {0, 1, 2, 3}))};
  made.params = {.num_experts = 4, .top_k = 4, .hidden_size = 8, .max_tokens_per_rank = 64, .dtype = Dtype::kF32};
  return made.make();
}

// Expert rows are x times this rank's factor, whatever the layout: every expert has one rank of its own.
Tensor factor_rows(const Communication& communication, const World& world, const DispatchResult& result) {
  Tensor rows = expert_rows(communication, world, {}, result, Experts::kIdentity);
  for (const ExpectedRow& row : expect_dispatch(world, communication.rank(), layout_rule(communication, {})).rows) {
    for (std::int64_t column = 0; column < 8; ++column) {
      const float x = load(Dtype::kF32, row_of(result.hidden_states, row.position), column) + 0.1F;
      store(Dtype::kF32, rows.row(row.position), column, kFactors[static_cast<std::size_t>(communication.rank())] * x);
    }
  }
  return rows;
}

// Token 0 of rank 2.
std::vector<std::byte> first_row(std::string_view backend, std::int64_t tokens, int threads, std::uint64_t delays) {
  std::vector<std::byte> row;
  run_ranks(kRanks, [&](const Group& group) {
    CommunicationOptions options = test_options();
    options.num_threads = threads;
    const World world = batch(tokens);
    Communication communication = communication_for(group, backend, world.spec, options);
    DispatchResult result;
    Rng rng(delays * 31 + static_cast<std::uint64_t>(group.rank()));
    for (int round = 0; round < 5; ++round) {
      dispatch_and_check(communication, world, {}, result);
      const Tensor rows = factor_rows(communication, world, result);
      if (delays > 0) std::this_thread::sleep_for(std::chrono::microseconds(rng.below(800)));
      Tensor output(Dtype::kF32, {tokens, 8});
      TensorView view = output.view();
      check_ok(communication.combine(result.handle, {.expert_output = rows.view()}, {}, view), "combine");
      if (group.rank() != 2) continue;
      const std::vector<std::byte> now(output.row(0), output.row(0) + 32);
      if (row.empty()) row = now;
      check_bytes(now.data(), row, "token 0 in round " + std::to_string(round));
    }
  });
  return row;
}

TEST_P(RowAloneAndInBatches, IsTheSameBits) {
  std::vector<std::byte> in_rank_order(32);
  for (std::int64_t column = 0; column < 8; ++column) {
    float sum = 0.0F;
    for (const float factor : kFactors) {
      const float product = factor * (case_value(2, 0, column) + 0.1F);
      sum += product;
    }
    store(Dtype::kF32, in_rank_order.data(), column, sum);
  }
  for (const std::int64_t tokens : {1, 2, 17, 64}) {
    for (const int threads : {1, 3}) {
      for (std::uint64_t delays = 0; delays < 3; ++delays) {
        EXPECT_NO_THROW(EXPECT_EQ(first_row(GetParam(), tokens, threads, delays), in_rank_order))
            << tokens << " tokens, " << threads << " threads";
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, RowAloneAndInBatches, ::testing::ValuesIn(kMovingBackends), backend_name);

}  // namespace
}  // namespace tokenyard::support
