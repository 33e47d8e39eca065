// SPDX-License-Identifier: Apache-2.0
// Combine for devices with bulk copies: sums of rows that lie with several ranks, and staging. Each warp has a ring of
// stages in shared memory of its own and keeps it full of pieces on their way, so it waits for no other warp, and how
// much is on its way does not depend on registers. What it sums is a slice of a token's row: a piece from each owner,
// in the order of owners, each added to sums in registers when it is there, whose stage then takes the next.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "engine/cuda/bulk_sums.h"
#include "engine/cuda/combine_steps.cuh"

namespace tokenyard::engine::cuda {

inline constexpr int kRingOfWarp = kSumRingBytes / kWarps;
// Of a warp. More copies on their way in a multiprocessor do not make it faster, but slower where all are of its own
// memory.
inline constexpr int kMostStages = 4;
static_assert(kMostStages <= kWarp, "a bit and a lane each");

// Sums in a lane's registers. Pieces should be long, for each costs its warp as much as it takes to add a kilobyte, and
// a row of 7168 should be whole slices.
template <class From>
inline constexpr int kSumsOfLane = sizeof(typename From::Bits) > 2 ? 32 : 56;

// In shared memory: of each warp's stages, and one more for rows that are staged.
struct Counters {
  std::uint64_t of[kWarps][kMostStages + 1];
};

// How rows are cut: slices of equal width, but for the last.
struct Slices {
  int hidden;
  int count;
  int size;  // elements, whole units of 16 bytes in any format

  __device__ Slices(std::int64_t elements, int largest)
      : hidden(static_cast<int>(elements)),
        count((hidden + largest - 1) / largest),
        size(static_cast<int>(protocol::align_up(protocol::ceil_div(hidden, count), 16))) {}
};

struct Slice {
  int token = 0;
  int first = 0;  // element
  bool there = false;
};

// Moves rows through the stages of one warp, as one.
class RowMover {
 public:
  // `counter`: ready for bytes.
  __device__ RowMover(const Common& common, std::uint64_t* counter, std::byte* stages)
      : common_(common), counter_(counter), stages_(stages) {}

  // By the warp. The row is written on return; false when a wait ended before.
  __device__ bool move(std::byte* to, const std::byte* from, std::int64_t bytes) {
    bool there = true;
    for (std::int64_t offset = 0; offset < bytes && there && lane_index() == 0; offset += kRingOfWarp) {
      const auto piece = static_cast<std::uint32_t>(min(bytes - offset, std::int64_t{kRingOfWarp}));
      expect_bytes(counter_, piece);
      load_bulk(stages_, from + offset, piece, counter_);
      there = wait_for_bytes(common_, counter_, turn_);
      turn_ ^= 1U;
      if (!there) continue;
      store_bulk(to + offset, stages_, piece);
      close_bulk_stores();
      wait_bulk_stores<0>();
    }
    return __shfl_sync(kAllLanes, static_cast<int>(there), 0) != 0;
  }

 private:
  const Common& common_;
  std::uint64_t* counter_;
  std::byte* stages_;
  unsigned turn_ = 0;
};

// By one warp. `Rows` is as combine_steps.cuh says.
template <class From, class To, class Rows>
class WarpSums {
 public:
  // `counters`: kMostStages, which are to be ready before run(). What is known of the first tokens is loaded already.
  __device__ WarpSums(const CombineTask& task, const Rows& rows, std::uint64_t* counters, std::byte* stages)
      : task_(task),
        rows_(rows),
        counters_(counters),
        stages_(stages),
        slices_(task.hidden, kSumsOfLane<From> * kWarp),
        num_slices_(task.route.state[kRouteTokens] * static_cast<unsigned>(slices_.count)),
        stage_bytes_(static_cast<int>(protocol::align_up(slices_.size, kPack * kWarp)) * kFromBytes),
        num_stages_(min(kRingOfWarp / stage_bytes_, kMostStages)) {
    const unsigned first = static_cast<unsigned>(warp_index()) * gridDim.x + blockIdx.x;
    ahead_ = slice_at(first);
    if (ahead_.there) known_ahead_ = rows_.load(ahead_.token);
    taken_ = first + kWarps * gridDim.x;
  }

  __device__ void run(std::uint32_t epoch) {
    rows_.begin(epoch);
    enter_slice();
    for (int stage = 0; stage < num_stages_; ++stage)
      load_piece(stage);
    while (num_loaded_ > 0) {
      if (!sum_slice()) return;
    }
  }

 private:
  static constexpr int kFromBytes = sizeof(typename From::Bits);
  static constexpr int kToBytes = sizeof(typename To::Bits);
  static constexpr int kPack = kPackOf<From, To>;
  static constexpr int kPacks = kSumsOfLane<From> / kPack;
  static_assert(kSumsOfLane<From> * kWarp * kFromBytes <= kRingOfWarp);

  __device__ Slice slice_at(unsigned index) const {
    const auto count = static_cast<unsigned>(slices_.count);
    const unsigned token = index / count;
    return {static_cast<int>(token), static_cast<int>(index - token * count) * slices_.size, index < num_slices_};
  }

  // Warps take the slices as they get on with them, but for the first two. Two slices ahead one is taken, and what is
  // known of its token is loaded one slice ahead.
  __device__ void enter_slice() {
    slice_ = ahead_;
    if (!slice_.there) return;
    known_ = known_ahead_;
    if (!rows_.in_place() && !wait_for_rows()) return;
    next_row_ = rows_.next(known_);
    ahead_ = slice_at(__shfl_sync(kAllLanes, taken_, 0));
    if (!ahead_.there) return;
    known_ahead_ = rows_.load(ahead_.token);
    if (lane_index() == 0) taken_ = 2 * kWarps * gridDim.x + add_relaxed_device(&task_.common.board->shares_taken, 1);
  }

  // After a false nothing more is loaded.
  __device__ bool wait_for_rows() {
    slice_.there = rows_.wait(known_);
    if (lane_index() == 0) fence_before_bulk_copies();  // of the words that said that the rows are there
    __syncwarp();
    return slice_.there;
  }

  [[nodiscard]] __device__ int size_from(int first) const { return min(slices_.size, slices_.hidden - first); }

  // A slice that no owner has anything of is a piece of no bytes.
  __device__ void load_piece(int stage) {
    if (!slice_.there) return;
    const std::byte* row = next_row_;
    if (row != nullptr) next_row_ = rows_.next(known_);
    const bool last = next_row_ == nullptr;
    last_ = (last_ & ~(1U << stage)) | (last ? 1U << stage : 0U);
    if (lane_index() == stage) {
      token_of_stage_ = row == nullptr ? ~slice_.token : slice_.token;
      first_of_stage_ = slice_.first;
    }
    if (lane_index() == 0) {
      const auto bytes = static_cast<std::uint32_t>(row == nullptr ? 0 : size_from(slice_.first) * kFromBytes);
      expect_bytes(&counters_[stage], bytes);
      if (bytes > 0)
        load_bulk(stages_ + stage * stage_bytes_, row + slice_.first * kFromBytes, bytes, &counters_[stage]);
    }
    ++num_loaded_;
    if (last) enter_slice();
  }

  __device__ bool sum_slice() {
    const int noted = __shfl_sync(kAllLanes, token_of_stage_, stage_);
    const bool empty = noted < 0;
    const int token = empty ? ~noted : noted;
    const int first = __shfl_sync(kAllLanes, first_of_stage_, stage_);
    const int packs = size_from(first) / kPack;
    float sums[kPacks][kPack] = {};
    bool last = false;
    while (!last) {
      // Lanes may find out at different times that the rank has failed; they go on or end together.
      const bool there = wait_for_bytes(task_.common, &counters_[stage_], turn_);
      if (__all_sync(kAllLanes, static_cast<int>(there)) == 0) return false;
      last = (last_ >> stage_ & 1U) != 0;
      add_piece(empty ? 0 : packs, sums);
      --num_loaded_;
      __syncwarp();  // the stage was read
      load_piece(stage_);
      if (++stage_ < num_stages_) continue;
      stage_ = 0;
      turn_ ^= 1U;
    }
    write(token, first, sums);
    return true;
  }

  // The lanes of a pack that is not whole read what is left in the stage, and nobody writes their sums.
  __device__ void add_piece(int packs, float (&sums)[kPacks][kPack]) const {
    const auto* from = reinterpret_cast<const Pack<From, kPack>*>(stages_ + stage_ * stage_bytes_) + lane_index();
    if (packs == kPacks * kWarp) {  // without branches, so that loads do not wait for each other
#pragma unroll
      for (int k = 0; k < kPacks; ++k)
        add_pack<From, kPack>(sums[k], from[k * kWarp]);
      return;
    }
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (k * kWarp < packs) add_pack<From, kPack>(sums[k], from[k * kWarp]);
    }
  }

  __device__ void write(int token, int first, float (&sums)[kPacks][kPack]) const {
    const std::int64_t place = (first + lane_index() * kPack) * kToBytes;
    const int packs = size_from(first) / kPack - lane_index();
    for (unsigned b = 0; b < task_.bias.size(); ++b) {
      if (task_.bias[b] == nullptr) continue;
      const auto* bias = reinterpret_cast<const Pack<To, kPack>*>(task_.bias[b] + token * task_.bias_stride[b] + place);
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        if (k * kWarp < packs) add_pack<To, kPack>(sums[k], bias[k * kWarp]);
      }
    }
    auto* output = reinterpret_cast<Pack<To, kPack>*>(task_.output + token * task_.output_stride + place);
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (k * kWarp < packs) output[k * kWarp] = round_sums<To, kPack>(sums[k]);
    }
  }

  const CombineTask& task_;
  Rows rows_;
  std::uint64_t* counters_;
  std::byte* stages_;
  Slices slices_;
  unsigned num_slices_;
  int stage_bytes_;
  int num_stages_;
  Slice slice_;  // of the next piece
  Slice ahead_;
  unsigned taken_ = 0;  // the slice after that one; known to lane 0
  typename Rows::Known known_{};
  typename Rows::Known known_ahead_{};
  const std::byte* next_row_ = nullptr;
  int num_loaded_ = 0;  // pieces that are not summed
  int stage_ = 0;       // of the oldest of them
  unsigned turn_ = 0;
  unsigned last_ = 0;       // of each stage: the slice has no more pieces
  int token_of_stage_ = 0;  // of the lane's stage; its complement where there are no bytes
  int first_of_stage_ = 0;
};

// What a block does in bulk; each warp by itself.
template <class Placement, class From, class To>
class InBulk {
 public:
  using Task = typename Placement::Task;

  __device__ InBulk(const Task& task, std::byte* ring, Counters& counters)
      : task_(task),
        stages_(ring + warp_index() * kRingOfWarp),
        counters_(counters.of[warp_index()]),
        sums_(Placement::rows_of(task), typename Placement::Rows(task), counters_, stages_) {
    if (lane_index() != 0) return;
#pragma unroll 1
    for (int stage = 0; stage <= kMostStages; ++stage)
      init_byte_counter(&counters_[stage]);
  }

  __device__ void stage(std::uint32_t epoch, Crew warps) {
    if (!stages_in_bulk(Placement::rows_of(task_))) return stage_plainly<Placement>(task_, epoch, warps);
    begin();
    RowMover mover(Placement::rows_of(task_).common, &counters_[kMostStages], stages_);
    stage_rows<Placement>(task_, epoch, warps, [&mover, this](std::byte* to, const std::byte* from) {
      return mover.move(to, from, Placement::rows_of(task_).row_bytes);
    });
  }

  __device__ void sum(std::uint32_t epoch, Crew /*warps*/) {
    begin();
    sums_.run(epoch);
  }

 private:
  // Of the counters, and of the words that said that the section is free or that rows are there.
  __device__ void begin() const {
    if (lane_index() == 0) fence_before_bulk_copies();
    __syncwarp();
  }

  const Task& task_;
  std::byte* stages_;
  std::uint64_t* counters_;
  WarpSums<From, To, typename Placement::Rows> sums_;
};

}  // namespace tokenyard::engine::cuda
