// SPDX-License-Identifier: Apache-2.0
#include "tokenyard/params.h"

#include <limits>
#include <string>

#include "tokenyard/error.h"

#include "protocol/formats.h"
#include "protocol/owner.h"

namespace tokenyard {

std::string_view name(DispatchFormat format) {
  switch (format) {
    case DispatchFormat::kNone:
      return "none";
    case DispatchFormat::kFp8PerTensor:
      return "fp8_per_tensor";
    case DispatchFormat::kFp8Block128:
      return "fp8_block128";
    case DispatchFormat::kMxfp8:
      return "mxfp8";
    case DispatchFormat::kNvfp4:
      return "nvfp4";
    case DispatchFormat::kMxfp4:
      return "mxfp4";
  }
  return "unknown";
}

namespace {

void require_positive(std::string_view field, int value) {
  if (value > 0) return;
  throw Error(ErrorCode::kInvalidArgument,
              "MoeParams::" + std::string(field) + " is " + std::to_string(value) + "; it must be positive");
}

void require_rank(int rank, int num_ranks) {
  if (num_ranks < 1) {
    throw Error(ErrorCode::kInvalidArgument, "num_ranks is " + std::to_string(num_ranks) + "; it must be at least 1");
  }
  if (rank >= 0 && rank < num_ranks) return;
  throw Error(ErrorCode::kInvalidArgument,
              "rank is " + std::to_string(rank) + "; it must be in [0, " + std::to_string(num_ranks) + ")");
}

}  // namespace

void validate(const MoeParams& params) {
  require_positive("num_experts", params.num_experts);
  require_positive("top_k", params.top_k);
  require_positive("hidden_size", params.hidden_size);
  require_positive("max_tokens_per_rank", params.max_tokens_per_rank);
  if (params.top_k > kMaxTopK) {
    throw Error(ErrorCode::kInvalidArgument, "MoeParams::top_k is " + std::to_string(params.top_k) + "; at most " +
                                                 std::to_string(kMaxTopK) + " is supported");
  }
  if (!protocol::is_wide_float(params.dtype)) {
    throw Error(ErrorCode::kInvalidArgument, "MoeParams::dtype is " + std::string(name(params.dtype)) +
                                                 "; it must be bf16, f16 or f32 (quantised rows are described by "
                                                 "dispatch_format)");
  }
  if (params.dispatch_format > DispatchFormat::kMxfp4) {
    throw Error(ErrorCode::kInvalidArgument, "MoeParams::dispatch_format is " +
                                                 std::to_string(static_cast<int>(params.dispatch_format)) +
                                                 "; it must be one of DispatchFormat's names");
  }
  const std::int64_t id = params.invalid_expert_id;
  if (id >= 0 && id < params.num_experts) {
    throw Error(ErrorCode::kInvalidArgument, "MoeParams::invalid_expert_id is " + std::to_string(id) +
                                                 "; it must lie outside [0, " + std::to_string(params.num_experts) +
                                                 ")");
  }
  if (id < std::numeric_limits<std::int32_t>::min() || id > std::numeric_limits<std::int32_t>::max()) {
    throw Error(ErrorCode::kInvalidArgument,
                "MoeParams::invalid_expert_id is " + std::to_string(id) + "; it must fit 32 bits");
  }
}

std::int64_t value_bytes_per_token(const MoeParams& params) {
  return protocol::row_bytes(params.dispatch_format, params.hidden_size, size_of(params.dtype)).values;
}

std::int64_t scale_bytes_per_token(const MoeParams& params) {
  return protocol::row_bytes(params.dispatch_format, params.hidden_size, size_of(params.dtype)).scales;
}

std::int64_t dispatch_bytes_per_token(const MoeParams& params) {
  return value_bytes_per_token(params) + scale_bytes_per_token(params);
}

int num_local_experts(const MoeParams& params, int rank, int num_ranks) {
  require_rank(rank, num_ranks);
  return protocol::num_local_experts(params.num_experts, num_ranks, rank);
}

int first_local_expert(const MoeParams& params, int rank, int num_ranks) {
  require_rank(rank, num_ranks);
  return protocol::first_local_expert(params.num_experts, num_ranks, rank);
}

}  // namespace tokenyard
