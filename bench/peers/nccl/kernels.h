// SPDX-License-Identifier: Apache-2.0
// What the exchange does on the GPU beside NCCL: find rows, pack, unpack and sum, and play the experts. Every function
// puts one kernel on the stream. Rows are bf16 and start at multiples of 16 bytes. Thread rule: one thread per rank.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace tokenyard::bench {

inline constexpr int kMaxRanks = 32;  // a warp has a lane for each
inline constexpr int kMaxTopK = 64;

struct KernelShape {
  int num_ranks = 1;
  int rank = 0;
  int num_tokens = 0;
  int hidden_size = 0;
  int num_experts = 0;
  int top_k = 0;
};

// Buffers of one rank. Rows for or from another rank stand in blocks of num_tokens, one block per rank; received rows
// stand one after the other, by source and then by token.
struct Buffers {
  std::uint16_t* tokens = nullptr;  // [num_tokens, hidden_size]
  std::int32_t* ids = nullptr;      // [num_tokens, top_k]
  float* weights = nullptr;
  std::uint16_t* received = nullptr;  // [at most num_ranks * num_tokens, hidden_size]
  std::int32_t* received_ids = nullptr;
  float* received_weights = nullptr;
  std::uint16_t* expert_output = nullptr;  // like received
  std::uint16_t* output = nullptr;         // like tokens
  float* expert_factors = nullptr;         // [num_experts]
  // All-to-all only.
  std::uint16_t* packed = nullptr;  // [num_ranks, num_tokens, hidden_size]
  std::int32_t* packed_ids = nullptr;
  float* packed_weights = nullptr;
  std::uint16_t* returned = nullptr;       // like packed
  std::int32_t* slots = nullptr;           // [num_tokens, num_ranks]: the row in a rank's block, or -1
  std::int32_t* send_counts = nullptr;     // [num_ranks]; receive_counts stand right behind
  std::int32_t* receive_counts = nullptr;  // [num_ranks]
};

// Fills slots, send_counts, and what this rank receives from itself.
void launch_plan(const KernelShape& shape, const Buffers& buffers, cudaStream_t stream);

// Rows for others to packed, own rows to where they are received; needs receive_counts.
void launch_pack(const KernelShape& shape, const Buffers& buffers, cudaStream_t stream);

// expert_output = received times what this rank's experts and the weights make of it; zero where none was picked. With
// `all` every rank's every token was received, else what receive_counts say.
void launch_experts(const KernelShape& shape, const Buffers& buffers, bool all, cudaStream_t stream);

// output = fp32 sum, in rank order, of what came back for each token.
void launch_unpack(const KernelShape& shape, const Buffers& buffers, cudaStream_t stream);

}  // namespace tokenyard::bench
