// SPDX-License-Identifier: Apache-2.0
// How managers are made: by which names, what must agree, and what they say of themselves.
#include <gtest/gtest.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <vector>

#include "manager/manager_setup.h"
#include "support/errors.h"
#include "support/run_ranks.h"

namespace tokenyard::manager_tests {
namespace {

using support::check;
using support::check_eq;
using support::check_throws;
using support::run_ranks;

// A group whose next rank seems to be on another host.
Group with_other_host(const Group& group) {
  return Group::from_callbacks({.rank = group.rank(),
                                .num_ranks = group.num_ranks(),
                                .all_gather =
                                    [group](std::span<const std::byte> bytes) {
                                      std::vector<Bytes> all = group.all_gather(bytes);
                                      // A host's identity stands in front of the text; the nonce's exchange is shorter.
                                      Bytes& next = all[static_cast<std::size_t>(group.rank() + 1) % all.size()];
                                      if (next.size() > 40) next[0] = std::byte{'~'};
                                      return all;
                                    },
                                .barrier = [group] { group.barrier(); }});
}

TEST(ManagerNames, EveryNameOfEveryBackendWorks) {
  for (const BackendInfo& info : backends()) {
    std::vector<std::string_view> names{info.name, info.seed_class};
    names.insert(names.end(), info.aliases.begin(), info.aliases.end());
    for (const std::string_view name : names) {
      const All2AllManager manager = create_all2all_manager(name, options_for(Group::in_process(1).front()));
      EXPECT_EQ(manager.backend().name, info.name) << name;
    }
  }
}

TEST(ManagerNames, SeedNamesLeadToTheirBackends) {
  const std::vector<std::pair<std::string_view, std::string_view>> expected{
      {"allgather_reducescatter", "all_gather"},
      {"naive", "all_gather"},
      {"AgRsAll2AllManager", "all_gather"},
      {"deepep_high_throughput", "high_throughput"},
      {"DeepEPHTAll2AllManager", "high_throughput"},
      {"flashinfer_nvlink_one_sided", "one_sided"},
      {"FlashInferNVLinkOneSidedManager", "one_sided"},
      {"passthrough", "passthrough"},
      {"PassThroughAll2AllManager", "passthrough"}};
  for (const auto& [name, backend] : expected) {
    const All2AllManager manager = create_all2all_manager(name, options_for(Group::in_process(1).front()));
    EXPECT_EQ(manager.backend().name, backend) << name;
  }
}

TEST(ManagerNames, BaseClassesAndUnknownNamesAreRefused) {
  const auto make = [](std::string_view name) {
    (void)create_all2all_manager(name, options_for(Group::in_process(1).front()));
  };
  check_throws(ErrorCode::kInvalidArgument, {"All2AllManagerBase", "base class", "no backend", "all_gather"},
               [&] { make("All2AllManagerBase"); });
  check_throws(ErrorCode::kInvalidArgument, {"DeepEPAll2AllManagerBase", "base class"},
               [&] { make("DeepEPAll2AllManagerBase"); });
  check_throws(ErrorCode::kInvalidArgument, {"no backend is called `pplx`", "all_gather, "}, [&] { make("pplx"); });
}

// Whatever the build leaves out is an error of the registry; whatever is in it works.
TEST(ManagerNames, BackendsThatAreNotHereAreTheRegistrysError) {
  for (const std::string_view name : {"low_latency", "two_sided", "elastic_buffer", "balanced", "elastic", "gather"}) {
    const bool here = std::ranges::any_of(backends(), [&](const BackendInfo& info) { return info.name == name; });
    const auto make = [&] { (void)create_all2all_manager(name, options_for(Group::in_process(1).front())); };
    if (here) {
      EXPECT_NO_THROW(make()) << name;
    } else {
      check_throws(ErrorCode::kInvalidArgument, {"no backend is called `" + std::string(name) + "`"}, make);
    }
  }
}

TEST(ManagerCreation, SaysWhereItIs) {
  EXPECT_NO_THROW(run_ranks(3, [](const Group& group) {
    All2AllManager manager = create_all2all_manager("one_sided", options_for(group));
    check_eq(manager.rank(), group.rank(), "rank");
    check_eq(manager.num_ranks(), 3, "num_ranks");
    check(!manager.spans_hosts(), "ranks of one process are on one host");
    check(!manager.initialized(), "nothing was initialised yet");
    check(manager.probe().state == probe(find_backend("one_sided")).state, "probe");
    check(manager.probe().state == Support::State::kUsable, "one_sided works everywhere");
    check_eq(manager.max_sms_used().value_or(-1), 0, "SMs on the host engine");
  }));
  const All2AllManager none = create_all2all_manager("passthrough", options_for(Group::in_process(1).front()));
  EXPECT_EQ(none.probe().state, Support::State::kUnusable);
  EXPECT_NE(none.probe().reason, "");
}

TEST(ManagerCreation, RanksOnOtherHostsAreSeen) {
  EXPECT_NO_THROW(run_ranks(3, [](const Group& group) {
    const All2AllManager manager = create_all2all_manager("one_sided", options_for(with_other_host(group)));
    check(manager.spans_hosts(), "the next rank named another host");
  }));
}

TEST(ManagerCreation, WhatDiffersIsNamedEverywhere) {
  EXPECT_NO_THROW(run_ranks(3, [](const Group& group) {
    const bool odd = group.rank() == 1;
    check_throws(ErrorCode::kMismatch, {"ranks disagree on manager", "rank 0: one_sided", "rank 1: all_gather"}, [&] {
      ManagerOptions options = options_for(group);
      options.parallel.tp_size = 3;
      (void)create_all2all_manager(odd ? "all_gather" : "one_sided", options);
    });
    check_throws(ErrorCode::kMismatch, {"MoeParams::top_k", "rank 0: 2", "rank 1: 4", "rank 2: 2"}, [&] {
      ManagerOptions options = options_for(group);
      options.params.top_k = odd ? 4 : 2;
      (void)create_all2all_manager("one_sided", options);
    });
    check_throws(ErrorCode::kMismatch, {"use_low_precision_combine", "rank 0: false", "rank 1: true"}, [&] {
      ManagerOptions options = options_for(group);
      options.knobs.one_sided_low_precision_combine = odd;
      (void)create_all2all_manager("one_sided", options);
    });
    (void)create_all2all_manager("one_sided", options_for(group));  // the group works on
  }));
}

TEST(ManagerCreation, WhatIsWrongOnOneRankFailsEverywhere) {
  EXPECT_NO_THROW(run_ranks(3, [](const Group& group) {
    const support::Stopwatch stopwatch;
    const auto make = [&] {
      (void)create_all2all_manager(group.rank() == 2 ? "nonsense" : "one_sided", options_for(group));
    };
    if (group.rank() == 2) {
      check_throws(ErrorCode::kInvalidArgument, {"rank 2: no backend is called `nonsense`"}, make);
    } else {
      check_throws(ErrorCode::kPeerFailed, {"rank 2 failed: no backend is called `nonsense`"}, make);
    }
    stopwatch.check_below(std::chrono::milliseconds(5'000), "a creation that fails");
  }));
}

TEST(ManagerCreation, WrongOptionsAreNamed) {
  const auto make = [](std::string_view name, auto&& change) {
    ManagerOptions options = options_for(Group::in_process(1).front());
    change(options);
    (void)create_all2all_manager(name, options);
  };
  check_throws(ErrorCode::kInvalidArgument, {"config is of `one_sided`", "manager of `all_gather`"},
               [&] { make("all_gather", [](ManagerOptions& options) { options.config = OneSidedConfig{}; }); });
  check_throws(ErrorCode::kInvalidArgument, {"data_group says rank 1 of 2", "rank 0 of 1"}, [&] {
    make("one_sided", [](ManagerOptions& options) { options.data_group = Group::in_process(2).back(); });
  });
  check_throws(ErrorCode::kInvalidArgument, {"nowhere"},
               [&] { make("one_sided", [](ManagerOptions& options) { options.store = "nowhere"; }); });
  check_throws(ErrorCode::kInvalidArgument, {"tp_size is 0", "at least 1"},
               [&] { make("all_gather", [](ManagerOptions& options) { options.parallel.tp_size = 0; }); });
  check_throws(ErrorCode::kInvalidArgument, {"1 data-parallel", "3 tensor-parallel", "expert-parallel group 1"},
               [&] { make("all_gather", [](ManagerOptions& options) { options.parallel.tp_size = 3; }); });
  EXPECT_NO_THROW(make("one_sided", [](ManagerOptions& options) { options.store = "127.0.0.1:29500"; }));
}

TEST(ManagerCreation, ConfigGivenIsTakenAndKnobsAreNot) {
  ManagerOptions options = options_for(Group::in_process(1).front());
  options.knobs.one_sided_low_precision_combine = true;
  const auto uses_low_precision = [](const ManagerOptions& given) {
    All2AllManager manager = create_all2all_manager("one_sided", given);
    manager.initialize({.max_num_tokens = 4, .top_k = 1, .num_experts = 2, .hidden_size = 8});
    return std::get<OneSidedConfig>(manager.get_communication().config()).use_low_precision_combine;
  };
  EXPECT_TRUE(uses_low_precision(options));
  options.config = OneSidedConfig{};
  EXPECT_FALSE(uses_low_precision(options));
}

TEST(ManagerCreation, DataGroupCarriesTheCommunications) {
  std::vector<Group> data = Group::in_process(2);
  EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
    int gathers = 0;
    const Group& member = data[static_cast<std::size_t>(group.rank())];
    ManagerOptions options = options_for(group);
    options.data_group = Group::from_callbacks({.rank = group.rank(),
                                                .num_ranks = 2,
                                                .all_gather =
                                                    [&](std::span<const std::byte> bytes) {
                                                      ++gathers;
                                                      return member.all_gather(bytes);
                                                    },
                                                .barrier = [&] { member.barrier(); }});
    All2AllManager manager = create_all2all_manager("one_sided", options);
    const int before = gathers;
    manager.initialize({.max_num_tokens = 4, .top_k = 1, .num_experts = 2, .hidden_size = 8});
    check(gathers > before, "creation went over another group");
    check(manager.destroy().ok(), "destroy");
  }));
}

// The sink may call accessors: the lock is re-entrant.
TEST(ManagerLog, TellsArgumentsAndSizes) {
  std::vector<std::string> debug;
  std::vector<std::string> info;
  All2AllManager* seen = nullptr;
  ManagerOptions options = options_for(Group::in_process(1).front());
  options.communication.log = [&](LogLevel level, std::string_view text) {
    (level == LogLevel::kInfo ? info : debug).emplace_back(text);
    if (seen != nullptr) (void)seen->initialized();
  };
  All2AllManager manager = create_all2all_manager("one_sided", options);
  seen = &manager;
  ASSERT_EQ(debug.size(), 1U);
  support::check_contains(debug[0], {"one_sided", "rank 0 of 1"});
  manager.initialize({.max_num_tokens = 4, .top_k = 1, .num_experts = 2, .hidden_size = 24});
  ASSERT_EQ(debug.size(), 2U);
  support::check_contains(debug[1], {"hidden_size=24", "max_tokens_per_rank=4"});
  ASSERT_EQ(info.size(), 1U);
  support::check_contains(info[0], {"rank 0 of 1", "hidden_size 24", "bytes"});
}

}  // namespace
}  // namespace tokenyard::manager_tests
