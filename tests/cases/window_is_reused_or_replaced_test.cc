// SPDX-License-Identifier: Apache-2.0
// C154: a shared window is used again only where group, bytes and tokens fit, and made anew where they do not; pairs of
// arguments that make no sense together are errors.
#include "tokenyard/manager.h"

#include "cases/case_round.h"

namespace tokenyard::support {
namespace {

World world_of(int max_tokens) {
  CaseWorld made{.ids = {repeated(max_tokens, {0, 3}), repeated(max_tokens / 2, {2, 1})}};
  made.params.top_k = 2;
  made.params.max_tokens_per_rank = max_tokens;
  return made.make();
}

All2AllManager manager_of(const Group& group) {
  ManagerOptions options{.group = group, .communication = test_options()};
  options.params.dtype = Dtype::kF32;
  return create_all2all_manager("one_sided", options);
}

void initialize(All2AllManager& manager, int max_tokens) {
  manager.initialize({.max_num_tokens = max_tokens, .top_k = 2, .num_experts = 4, .hidden_size = 16});
}

// A round whose handle and rows stay behind: `hidden_states` is where the window is.
struct LeftRound {
  DispatchResult result{};

  void play(All2AllManager& manager, int max_tokens) {
    moe_round(manager.get_communication(), world_of(max_tokens), {}, result);
  }

  [[nodiscard]] const void* window() const { return result.hidden_states.data; }
};

TEST(WindowIsReusedOrReplaced, ByItsSizesAndItsGroup) {
  std::vector<Group> other = Group::in_process(2);
  EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
    All2AllManager manager = manager_of(group);
    LeftRound left;
    initialize(manager, 4);
    left.play(manager, 4);
    const std::int64_t bytes_of_4 = manager.get_communication().window_bytes();

    LeftRound old = std::move(left);
    initialize(manager, 8);  // does not fit: another window
    check(manager.get_communication().window_bytes() > bytes_of_4, "the window did not grow");
    Tensor rows(Dtype::kF32, {2, 4, 16});
    Tensor output(Dtype::kF32, {world_of(4).rank(group.rank()).num_tokens, 16});
    TensorView view = output.view();
    check_throws(ErrorCode::kReplaced, {}, [&] {
      (void)manager.get_communication().combine(old.result.handle, {.expert_output = rows.view()}, {}, view);
    });
    LeftRound large;
    large.play(manager, 8);

    initialize(manager, 4);  // fits: the same window
    LeftRound again;
    again.play(manager, 8);
    check(again.window() == large.window(), "a smaller request made another window");

    All2AllManager of_other = manager_of(other[static_cast<std::size_t>(group.rank())]);
    initialize(of_other, 8);
    LeftRound elsewhere;
    elsewhere.play(of_other, 8);
    check(elsewhere.window() != large.window(), "two groups share a window");
    again.play(manager, 8);
  }));
}

TEST(WindowIsReusedOrReplaced, PairsOfArgumentsMustMakeSense) {
  const World world = world_of(4);
  EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
    Communication communication = communication_for(group, "high_throughput", world.spec);
    const RankTensors tensors(world, group.rank(), false);
    DispatchResult first;
    check_ok(communication.dispatch(tensors.input(), {}, first), "dispatch");
    Tensor output(Dtype::kF32, {tensors.num_tokens(), 16});
    Tensor weights(Dtype::kF32, {tensors.num_tokens(), 2});
    TensorView view = output.view();
    check_throws(ErrorCode::kInvalidArgument, {"topk_weights_output is given", "CombineInput::topk_weights is not"},
                 [&] {
                   (void)communication.combine(first.handle, {.expert_output = first.hidden_states},
                                               {.topk_weights_output = weights.view()}, view);
                 });
    DispatchResult second;
    check_ok(communication.dispatch(tensors.input(), {}, second), "dispatch");
    check_ok(communication.combine(second.handle, {.expert_output = second.hidden_states}, {}, view), "combine");
    DispatchResult replayed;
    check_throws(ErrorCode::kInvalidArgument, {"a replay takes its route from the handle", "leave topk_ids"},
                 [&] { (void)communication.dispatch(tensors.input(), {.replay = &second.handle}, replayed); });
    moe_round(communication, world, {}, first);
  }));
}

}  // namespace
}  // namespace tokenyard::support
