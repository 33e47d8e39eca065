// SPDX-License-Identifier: Apache-2.0
// Dispatch and combine of bf16 rows with NCCL, for one rank, in one of two ways.
//
// All-gather: every rank gets every row with its picks and weights; combine is a reduce-scatter of bf16 rows.
// All-to-all: a kernel finds the rows of each rank, counts are exchanged and go to the host, which waits for them while
// rows are packed, one per (token, rank) with picks and weights; then grouped sends and receives of exactly these rows,
// the same way back, and an fp32 sum in rank order. Own rows are packed to where they are received, so NCCL never sends
// to itself. With known counts, those of an earlier round are taken and the host waits for nothing.
// Thread rule: one thread per rank; the constructor, the destructor, learn_counts, dispatch and combine are collective.
#pragma once

#include <cuda_runtime.h>
#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "arena.h"
#include "kernels.h"
#include "routing.h"

namespace tokenyard::bench {

struct ExchangeOptions {
  ExchangeKind kind = ExchangeKind::kAllGather;
  MemoryKind memory = MemoryKind::kPlain;
  bool known_counts = false;
};

// What a rank's exchange runs on.
struct Place {
  ncclComm_t comm = nullptr;
  cudaStream_t stream = nullptr;
  int rank = 0;
};

class Exchange {
 public:
  Exchange(const ExchangeOptions& options, const Routing& routing, const Place& place);
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;
  Exchange(Exchange&&) = delete;
  Exchange& operator=(Exchange&&) = delete;

  // Finds, exchanges and waits for the counts that dispatch takes as known; nothing where none are.
  void learn_counts();

  void dispatch();
  void combine();

  // Fills everything that a round writes with bytes that no right answer has.
  void spoil();
  // What this rank's experts make of the rows that came.
  void run_experts();
  // Waits for the stream. Throws std::runtime_error that shows the first wrong value, or the counts where these differ.
  void require_right_output();

  [[nodiscard]] bool registered() const { return arena_->registered(); }

 private:
  void fill();
  void exchange_counts();
  void gather_rows();
  void send_rows();
  void send_back();
  void require_right_counts() const;

  [[nodiscard]] std::size_t counts_bytes() const {
    return static_cast<std::size_t>(shape_.num_ranks) * 2 * sizeof(std::int32_t);
  }

  [[nodiscard]] std::int64_t send_count(int peer) const { return host_counts_[peer]; }

  [[nodiscard]] std::int64_t receive_count(int peer) const { return host_counts_[shape_.num_ranks + peer]; }

  ExchangeOptions options_;
  const Routing& routing_;
  Place place_;
  KernelShape shape_;
  std::unique_ptr<Arena> arena_;
  Buffers buffers_;
  std::int32_t* host_counts_ = nullptr;  // pinned: what is sent to each rank, then what each rank sends
  cudaEvent_t counts_are_here_ = nullptr;
};

}  // namespace tokenyard::bench
