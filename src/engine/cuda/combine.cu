// SPDX-License-Identifier: Apache-2.0
// Combine of rows in a space per source: the places of an origin's rows are its tokens.
#include "engine/cuda/pull_combine.cuh"

namespace tokenyard::engine::cuda {
namespace {

class ReceivedRows {
 public:
  __device__ explicit ReceivedRows(const CombineTask& task) : task_(task) {}

  __device__ std::int64_t places(int origin) const {
    return task_.route.rows_received[origin] == 0 ? 0 : task_.route.tokens_of[origin];
  }

  __device__ bool there(int origin, int place) const {
    const protocol::WindowLayout& layout = task_.common.layout;
    const int size = layout.shape().tokens_per_chunk;
    return (task_.route.masks[origin * layout.max_chunks() + place / size] >> (place % size) & 1U) != 0;
  }

  __device__ std::int64_t row(int origin, int place) const {
    return origin * task_.common.layout.shape().max_tokens + place;
  }

  __device__ const std::byte* from(int origin, int place) const {
    return task_.from + origin * task_.from_block_stride + place * task_.from_row_stride;
  }

  __device__ void stage_rest(std::int64_t /*row*/) const {}

 private:
  const CombineTask& task_;
};

// By ascending rank.
class OwnersRows {
 public:
  struct Known {
    int token = 0;
    std::uint32_t word = 0;  // of the ranks in it, those that are still to come
    int index = 0;
  };

  __device__ explicit OwnersRows(const CombineTask& task)
      : task_(task), ready_(task), first_row_(task.common.rank * task.common.layout.shape().max_tokens) {}

  __device__ void begin(std::uint32_t epoch) { ready_.begin(epoch); }

  [[nodiscard]] __device__ bool in_place() const { return ready_.in_place(); }

  __device__ Known load(int token) const { return {token, word_of(token, 0), 0}; }

  __device__ bool wait(const Known& known) const {
    return ready_.wait([&known](int /*owner*/) { return std::int64_t{known.token}; });
  }

  __device__ const std::byte* next(Known& known) const {
    while (known.word == 0) {
      if (++known.index >= task_.route.words) return nullptr;
      known.word = word_of(known.token, known.index);
    }
    const int owner = known.index * kWordBits + __ffs(static_cast<int>(known.word)) - 1;
    known.word &= known.word - 1;
    return window_of(task_.common, owner) + task_.common.layout.combine_row(first_row_ + known.token);
  }

 private:
  __device__ std::uint32_t word_of(int token, int index) const {
    return task_.route.ranks_of_token[std::int64_t{token} * task_.route.words + index];
  }

  const CombineTask& task_;
  Readiness ready_;
  std::int64_t first_row_;
};

struct RankMajor {
  using Task = CombineTask;
  using Owed = ReceivedRows;
  using Rows = OwnersRows;
  static constexpr bool kLowPrecision = true;

  static __host__ __device__ const CombineTask& rows_of(const Task& task) { return task; }

  static __device__ void sum_rest(const Task& /*task*/, std::uint32_t /*epoch*/) {}

  static __device__ void end(const Task& task) { clear_route(task.route, task.common.num_ranks); }
};

}  // namespace

bool load_combine() {
  return load_pull_combine<RankMajor>();
}

void launch_combine(const CombineTask& task, int blocks, bool in_bulk, cudaStream_t stream) {
  launch_pull_combine<RankMajor>(task, blocks, in_bulk, stream);
}

}  // namespace tokenyard::engine::cuda
