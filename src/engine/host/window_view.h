// SPDX-License-Identifier: Apache-2.0
// One rank's window seen through the layout: typed access to its lines. Plain pointers, cheap to copy.
#pragma once

#include <cstddef>
#include <cstdint>

#include "protocol/layout.h"
#include "protocol/stamp.h"

namespace tokenyard::engine::host {

using protocol::kCombinePhase;
using protocol::kDispatchPhase;
using protocol::kWeightsPhase;

class WindowView {
 public:
  WindowView(std::byte* base, const protocol::WindowLayout& layout) : base_(base), layout_(&layout) {}

  // A line for each peer; with queues they are not here.
  [[nodiscard]] std::byte* life_lines() const { return base_ + layout_->life(0); }

  [[nodiscard]] std::uint64_t& released(int phase, int peer) const {
    return at<std::uint64_t>(layout_->released(phase, peer));
  }

  [[nodiscard]] protocol::HeaderLine& header(int phase, std::uint32_t epoch, int source) const {
    return at<protocol::HeaderLine>(layout_->header(phase, protocol::header_slot(epoch), source));
  }

  [[nodiscard]] std::int32_t* counts(std::uint32_t epoch, int source) const {
    return &at<std::int32_t>(layout_->counts(protocol::header_slot(epoch), source));
  }

  [[nodiscard]] protocol::ChunkLine& chunk(int source, std::int64_t index, int slot) const {
    return at<protocol::ChunkLine>(layout_->chunk(source, index, slot));
  }

  [[nodiscard]] std::int32_t* stats(int source) const { return &at<std::int32_t>(layout_->stats(source)); }

  [[nodiscard]] std::byte* payload(int source, int slot) const { return base_ + layout_->payload(source, slot); }

  [[nodiscard]] std::byte* combine_row(std::int64_t row, int slot) const {
    return base_ + layout_->combine_row(row, slot);
  }

  [[nodiscard]] std::byte* weights_row(std::int64_t row, int slot) const {
    return base_ + layout_->weights_row(row, slot);
  }

  [[nodiscard]] float* given_weights(int origin, int slot) const {
    return &at<float>(layout_->given_weights(origin, slot));
  }

  // Everything in front of the rows: the words and lines of the protocol.
  [[nodiscard]] std::byte* control() const { return base_; }

  [[nodiscard]] std::int64_t control_bytes() const { return layout_->rows(); }

 private:
  template <class T>
  [[nodiscard]] T& at(std::int64_t offset) const {
    return *reinterpret_cast<T*>(base_ + offset);  // the layout aligns every section to 128 bytes
  }

  std::byte* base_;
  const protocol::WindowLayout* layout_;
};

}  // namespace tokenyard::engine::host
