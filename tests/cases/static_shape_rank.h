// SPDX-License-Identifier: Apache-2.0
// A recorded plan on the CPU: a capturable backend at its full, fixed shape, with tensors that stay where they are
// while rows, ids and counts in them change from replay to replay. All that a replay needs is made before the first.
// Thread rule: one thread at a time, as a communication's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "cases/case_round.h"

namespace tokenyard::support {

inline constexpr int kStaticRanks = 3;

// Balanced, skewed, padded and with a rank that has nothing, in turn; other rows each time.
[[nodiscard]] World static_world(std::int64_t replay);

class StaticShapeRank {
 public:
  // Collective. Worlds 0 to `num_replays - 1` are made ready.
  StaticShapeRank(const Group& group, std::string_view backend, std::int64_t num_replays);

  // Puts the rows, ids and weights of replay `index` into the fixed tensors. Nothing of this rank's is allocated.
  void load(std::int64_t index);
  // One round from the fixed tensors to `output`, or false. Allocates nothing itself; expert rows are the dispatched
  // ones (identity), weighted as the world says.
  [[nodiscard]] bool replay(std::int64_t index, DispatchResult& result);
  [[nodiscard]] bool dispatch(DispatchResult& result);
  [[nodiscard]] bool output_is_right(std::int64_t index) const;

  [[nodiscard]] const Tensor& output() const { return output_; }

  [[nodiscard]] Communication& communication() { return communication_; }

 private:
  // One row of expert output and where it stands.
  struct Placed {
    std::int64_t position = 0;
    std::vector<std::byte> bytes{};
  };

  struct Prepared {
    std::int64_t num_tokens = 0;
    std::vector<std::byte> hidden{}, ids{}, weights{}, y{};
    std::vector<Placed> expert_rows{};
  };

  [[nodiscard]] Prepared prepare(const World& world) const;

  Communication communication_;
  Tensor hidden_, ids_, weights_, expert_output_, output_;
  std::vector<Prepared> prepared_;
  std::int64_t num_tokens_ = 0;
};

}  // namespace tokenyard::support
