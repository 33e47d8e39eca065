// SPDX-License-Identifier: Apache-2.0
// C58: the window that a communication makes is as large as `window_bytes` says, and full rounds stay inside it.
// C71: the default config of every backend is valid for any number of ranks.
#include <algorithm>
#include <fstream>
#include <iterator>
#include <sstream>
#include <vector>

#include "cases/case_round.h"
#include "protocol/queue_layout.h"

namespace tokenyard::support {
namespace {

class WindowSizeHint : public EachBackend {};

struct Mapping {
  const std::byte* begin = nullptr;
  std::int64_t bytes = 0;
};

// The windows that this process has mapped, each of them whole pages.
std::vector<Mapping> window_mappings() {
  std::vector<Mapping> found;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("memfd:tokenyard") == std::string::npos) continue;
    std::istringstream fields(line);
    void* begin = nullptr;
    void* end = nullptr;
    char dash = '-';
    check(static_cast<bool>(fields >> begin >> dash >> end), "no addresses in " + line);
    found.push_back({static_cast<const std::byte*>(begin),
                     static_cast<const std::byte*>(end) - static_cast<const std::byte*>(begin)});
  }
  return found;
}

// What the hint is made of: where communications take turns, a window of the group's queues and one of its own.
std::vector<std::int64_t> windows_of(std::string_view backend, std::int64_t hint, int ranks) {
  if (!find_backend(backend).contract.takes_turns) return {hint};
  constexpr std::int64_t kDefaultQueueBytes = 256 << 10;
  const std::int64_t queues = protocol::QueueLayout::of(ranks, kDefaultQueueBytes).bytes();
  return {hint - queues, queues};
}

// Memory comes zeroed and in whole pages, so what a store beyond the window hits shows. `windows` are in order of size.
void check_tails(const std::vector<Mapping>& mappings, const std::vector<std::int64_t>& windows) {
  check(!mappings.empty(), "no window is mapped");
  for (const Mapping& mapping : mappings) {
    const auto larger = std::ranges::upper_bound(windows, mapping.bytes);
    check(larger != windows.begin(),
          "a mapping of " + std::to_string(mapping.bytes) + " bytes for a window of " + std::to_string(windows[0]));
    const std::int64_t window = *std::prev(larger);
    check(mapping.bytes < window + (std::int64_t{2} << 20), "a mapping is larger than the window by a huge page");
    for (std::int64_t i = window; i < mapping.bytes; ++i) {
      check_eq(std::to_integer<int>(mapping.begin[i]), 0, "byte " + std::to_string(i - window) + " after the window");
    }
  }
}

TEST_P(WindowSizeHint, IsWhatIsMadeAndEnough) {
  for (const DispatchFormat format : {DispatchFormat::kNone, DispatchFormat::kFp8Block128, DispatchFormat::kNvfp4}) {
    for (const int ranks : {2, 4, 8, 12}) {
      for (const int top_k : {1, 8}) {
        WorldSpec spec;
        spec.params = {
            .num_experts = 12, .top_k = top_k, .hidden_size = 132, .max_tokens_per_rank = 9, .dispatch_format = format};
        spec.num_ranks = ranks;
        spec.num_tokens.assign(static_cast<std::size_t>(ranks), 9);
        const World world = make_world(spec);
        const std::int64_t hint = window_bytes(spec.params, config_for(GetParam(), spec), ranks);
        EXPECT_NO_THROW(run_ranks(ranks,
                                  [&](const Group& group) {
                                    Communication communication = communication_for(group, GetParam(), spec);
                                    check_eq(communication.window_bytes(), hint, "bytes of the window");
                                    DispatchResult result;
                                    for (int round = 0; round < 2; ++round)
                                      play_round(communication, world, {.zero_copy = round == 1}, result);
                                    group.barrier();
                                    if (group.rank() == 0)
                                      check_tails(window_mappings(), windows_of(GetParam(), hint, ranks));
                                    group.barrier();
                                  }))
            << name(format) << " " << ranks << " ranks, top " << top_k;
      }
    }
  }
}

// Results are never larger than the other size function says.
TEST_P(WindowSizeHint, OutputsFitTheirHint) {
  WorldSpec spec;
  spec.params = {.num_experts = 8, .top_k = 8, .hidden_size = 64, .max_tokens_per_rank = 7};
  spec.num_ranks = 3;
  spec.num_tokens = {7, 7, 7};
  const World world = make_world(spec);
  const std::int64_t hint = output_bytes(spec.params, config_for(GetParam(), spec), 3);
  EXPECT_NO_THROW(run_ranks(3, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), spec);
    DispatchResult result;
    dispatch_and_check(communication, world, {}, result);
    std::int64_t bytes = 0;
    for (const TensorView* view : {&result.hidden_states, &result.topk_ids, &result.topk_weights}) {
      if (view->defined()) bytes += num_flat_rows(*view) * last_dim_bytes(*view);
    }
    check(bytes <= hint, std::to_string(bytes) + " bytes of results and a hint of " + std::to_string(hint));
    combine_and_check(communication, world, {}, result, result.handle);
  }));
}

TEST_P(WindowSizeHint, DefaultConfigsFitEveryGroup) {
  const MoeParams params{.num_experts = 256, .top_k = 8, .hidden_size = 7168, .max_tokens_per_rank = 128};
  const BackendConfig config = find_backend(GetParam()).default_config;
  for (const int ranks : {1, 2, 3, 4, 8, 16, 24, 32, 64, 128, 160, 255, 257, 1024}) {
    EXPECT_NO_THROW({
      EXPECT_GT(window_bytes(params, config, ranks), 0) << ranks;
      EXPECT_GE(output_bytes(params, config, ranks), std::int64_t{128} * ranks * 7168 * 2) << ranks;
    }) << ranks;
  }
}

// The largest of these groups that threads of a test can be, with the default config.
TEST_P(WindowSizeHint, DefaultConfigMovesTokensOfManyRanks) {
  CaseWorld made{.ids = std::vector<IdTable>(128, IdTable{{0}, {127}})};
  made.params = {.num_experts = 128, .top_k = 1, .hidden_size = 4, .max_tokens_per_rank = 2, .dtype = Dtype::kF32};
  const World world = made.make();
  EXPECT_NO_THROW(run_ranks(128, [&](const Group& group) {
    CommunicationOptions options = test_options();
    options.deadline = options.first_round_deadline = std::chrono::milliseconds(30'000);
    Communication communication = create_communication(group, world.spec.params, GetParam(), options);
    DispatchResult result;
    moe_round(communication, world, {}, result, Experts::kIdentity);
  }));
}

INSTANTIATE_TEST_SUITE_P(Backends, WindowSizeHint, ::testing::ValuesIn(kMovingBackends), backend_name);

}  // namespace
}  // namespace tokenyard::support
