// SPDX-License-Identifier: Apache-2.0
// The shapes of an MoE layer as far as moving its tokens is concerned, and the sizes that follow from them.
// Everything here is pure: no I/O, no allocation, safe from any thread.
#pragma once

#include <cstdint>
#include <string_view>

#include "tokenyard/tensor.h"

namespace tokenyard {

// How a dispatched row is encoded. The library moves quantised rows and their scales as opaque bytes.
// Bytes per token of hidden size H (FlashInfer's QuantFormat; contracts.md part 1), values + scales:
enum class DispatchFormat : std::uint8_t {
  kNone,          // rows of MoeParams::dtype          H * size_of(dtype)
  kFp8PerTensor,  // one scale for all: not sent       H
  kFp8Block128,   // f32 scale per 128 values          H + 4 * ceil(H / 128)
  kMxfp8,         // e8m0 scale per 32 values          H + ceil(H / 32)
  kNvfp4,         // e4m3 scale per 16 values          ceil(H / 2) + ceil(H / 16)
  kMxfp4,         // e8m0 scale per 32 values          ceil(H / 2) + ceil(H / 32)
};

[[nodiscard]] std::string_view name(DispatchFormat format);

inline constexpr int kMaxTopK = 64;

// Equal on every rank; creation compares them and names the first field that differs.
struct MoeParams {
  int num_experts = 0;
  int top_k = 0;        // 1 to 64; may exceed num_experts when rows are padded with the invalid id
  int hidden_size = 0;  // elements of an unquantised row; any positive number
  // Tokens that any rank may dispatch in one call; windows are sized by it.
  int max_tokens_per_rank = 0;
  Dtype dtype = Dtype::kBf16;  // unquantised rows and expert output: bf16, f16 or f32
  DispatchFormat dispatch_format = DispatchFormat::kNone;
  // Marks "no expert" in topk_ids, besides -1 which always does; must lie outside [0, num_experts).
  std::int64_t invalid_expert_id = -1;
};

// Throws kInvalidArgument with the value and what would be right.
void validate(const MoeParams& params);

// Bytes of values and of scales of one dispatched row; ids, weights and extras are not counted.
[[nodiscard]] std::int64_t value_bytes_per_token(const MoeParams& params);
[[nodiscard]] std::int64_t scale_bytes_per_token(const MoeParams& params);
[[nodiscard]] std::int64_t dispatch_bytes_per_token(const MoeParams& params);

// Experts are owned in contiguous blocks; the first num_experts % num_ranks ranks own one more. Throws kInvalidArgument
// unless rank is in [0, num_ranks).
[[nodiscard]] int num_local_experts(const MoeParams& params, int rank, int num_ranks);
[[nodiscard]] int first_local_expert(const MoeParams& params, int rank, int num_ranks);

}  // namespace tokenyard
