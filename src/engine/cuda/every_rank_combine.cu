// SPDX-License-Identifier: Apache-2.0
// Combine of every rank's rows: each origin pulls its tokens' rows from all ranks. The places of an origin's rows are
// its tokens.
#include "engine/cuda/every_rank_kernels.h"
#include "engine/cuda/pull_combine.cuh"

namespace tokenyard::engine::cuda {
namespace {

// One origin's behind the other's.
class ResultRows {
 public:
  __device__ explicit ResultRows(const EveryRankCombineTask& task) : task_(task.rows) {}

  __device__ std::int64_t places(int origin) const { return task_.route.tokens_of[origin]; }

  __device__ bool there(int /*origin*/, int /*place*/) const { return true; }

  __device__ std::int64_t row(int origin, int place) const { return rows_before(task_.route, origin) + place; }

  __device__ const std::byte* from(int origin, int place) const {
    return task_.from + row(origin, place) * task_.from_row_stride;
  }

  __device__ void stage_rest(std::int64_t /*row*/) const {}

 private:
  const CombineTask& task_;
};

class EveryRanksRows {
 public:
  struct Known {
    int token = 0;
    int owner = 0;  // the next
  };

  __device__ explicit EveryRanksRows(const EveryRankCombineTask& task)
      : common_(task.rows.common), ready_(task.rows), first_row_(task.first_row) {}

  __device__ void begin(std::uint32_t epoch) { ready_.begin(epoch); }

  [[nodiscard]] __device__ bool in_place() const { return ready_.in_place(); }

  __device__ Known load(int token) const { return {token, 0}; }

  __device__ bool wait(const Known& known) const {
    return ready_.wait([&known](int /*owner*/) { return std::int64_t{known.token}; });
  }

  __device__ const std::byte* next(Known& known) const {
    if (known.owner == common_.num_ranks) return nullptr;
    return window_of(common_, known.owner++) + common_.layout.combine_row(first_row_ + known.token);
  }

 private:
  const Common& common_;
  Readiness ready_;
  std::int64_t first_row_;
};

struct EveryRank {
  using Task = EveryRankCombineTask;
  using Owed = ResultRows;
  using Rows = EveryRanksRows;
  static constexpr bool kLowPrecision = false;

  static __host__ __device__ const CombineTask& rows_of(const Task& task) { return task.rows; }

  static __device__ void sum_rest(const Task& /*task*/, std::uint32_t /*epoch*/) {}

  static __device__ void end(const Task& task) { clear_route(task.rows.route, task.rows.common.num_ranks); }
};

}  // namespace

bool load_every_rank_combine() {
  return load_pull_combine<EveryRank>();
}

void launch_every_rank_combine(const EveryRankCombineTask& task, int blocks, bool in_bulk, cudaStream_t stream) {
  launch_pull_combine<EveryRank>(task, blocks, in_bulk, stream);
}

}  // namespace tokenyard::engine::cuda
