// SPDX-License-Identifier: Apache-2.0
// One rank's window of queues seen through its layout. Plain pointers, cheap to copy.
#pragma once

#include <cstddef>
#include <cstdint>

#include "protocol/queue_layout.h"

namespace tokenyard::engine::host {

class QueueView {
 public:
  QueueView(std::byte* base, const protocol::QueueLayout& layout) : base_(base), layout_(&layout) {}

  [[nodiscard]] std::uint64_t& begun(int phase, int peer) const { return word(layout_->begun(phase, peer)); }

  [[nodiscard]] std::uint64_t& filled(int phase, int source) const { return word(layout_->filled(phase, source)); }

  [[nodiscard]] std::uint64_t& drained(int phase, int peer) const { return word(layout_->drained(phase, peer)); }

  [[nodiscard]] std::byte* queue(int phase, int source) const { return base_ + layout_->queue(phase, source); }

  [[nodiscard]] std::byte* words() const { return base_; }

  [[nodiscard]] std::int64_t words_bytes() const { return layout_->queues(); }

 private:
  [[nodiscard]] std::uint64_t& word(std::int64_t offset) const {
    return *reinterpret_cast<std::uint64_t*>(base_ + offset);  // every word has a line of its own
  }

  std::byte* base_;
  const protocol::QueueLayout* layout_;
};

}  // namespace tokenyard::engine::host
