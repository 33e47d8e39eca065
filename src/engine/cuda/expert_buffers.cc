// SPDX-License-Identifier: Apache-2.0
#include "engine/cuda/expert_buffers.h"

#include "engine/cuda/kernels.h"

namespace tokenyard::engine::cuda {

ExpertBuffers::ExpertBuffers(int device, const protocol::WindowLayout& layout, const Experts& experts) {
  const protocol::WindowShape& shape = layout.shape();
  const std::int64_t ranks = shape.num_ranks;
  view_.words = static_cast<int>(protocol::ceil_div(ranks, kWordBits));
  view_.item_words = 2 + 2 * experts.top_k;
  const auto take = [this](std::int64_t bytes) {
    const std::int64_t start = bytes_;
    bytes_ = protocol::align_up(bytes_ + bytes, protocol::kSectionAlignment);
    return start;
  };
  const std::int64_t state = take(std::int64_t{kExpertWords} * 4);
  const std::int64_t waited = take(ranks * 8);
  const std::int64_t sets = take(shape.max_tokens * view_.words * 4);
  const std::int64_t sent = take(ranks * 4);
  const std::int64_t received = take(ranks * 4);
  const std::int64_t tokens = take(ranks * 4);
  const std::int64_t rows = take(experts.num_local * std::int64_t{4});
  const std::int64_t ranges = take(experts.num_local * ranks * 8);
  const std::int64_t sources = take(experts.num_local * experts.rows * 4);
  const std::int64_t items = take(experts.rows * view_.item_words * 4);
  memory_ = make_device_memory(device, bytes_);
  std::byte* memory = memory_.get();
  view_.state = reinterpret_cast<std::uint32_t*>(memory + state);
  view_.waited_ns = reinterpret_cast<unsigned long long*>(memory + waited);
  view_.ranks_of_token = reinterpret_cast<std::uint32_t*>(memory + sets);
  view_.rows_sent = reinterpret_cast<std::int32_t*>(memory + sent);
  view_.rows_received = reinterpret_cast<std::int32_t*>(memory + received);
  view_.tokens_of = reinterpret_cast<std::int32_t*>(memory + tokens);
  view_.rows_per_expert = reinterpret_cast<std::int32_t*>(memory + rows);
  view_.source_ranges = reinterpret_cast<std::int32_t*>(memory + ranges);
  view_.source_tokens = reinterpret_cast<std::int32_t*>(memory + sources);
  view_.items = reinterpret_cast<std::uint32_t*>(memory + items);
}

void ExpertBuffers::clear() {
  const DeviceScope scope(memory_.get_deleter().device);
  check(cudaMemset(memory_.get(), 0, static_cast<std::size_t>(bytes_)), "cudaMemset");
  in_use = closed = false;
}

void ExpertBuffers::clear_state(cudaStream_t stream) const {
  check(cudaMemsetAsync(view_.state, 0, sizeof(std::uint32_t) * kExpertWords, stream), "cudaMemsetAsync");
}

}  // namespace tokenyard::engine::cuda
