// SPDX-License-Identifier: Apache-2.0
// A segment of host memory that the devices of this process map.
// Thread rule: immutable once made; the memory itself is the users' affair.
#pragma once

#include <cstddef>

#include "fabric/cuda/context.h"
#include "fabric/cuda/owned.h"
#include "system/segment.h"

namespace tokenyard::fabric::cuda {

class PinnedSegment {
 public:
  PinnedSegment(const Context& owner, system::Segment segment);

  [[nodiscard]] const system::Segment& segment() const { return segment_; }

  // Where the device of `context`, which need not be the owner's, loads and stores.
  [[nodiscard]] std::byte* address_for(const Context& context) const;

 private:
  struct Range {
    CUcontext context = nullptr;
    void* data = nullptr;
  };

  struct Registered {
    using Value = Range;
    static void release(const Driver& cu, const Value& range) noexcept;
  };

  Context context_;  // unpinning needs one
  system::Segment segment_;
  Owned<Registered> registered_;
};

}  // namespace tokenyard::fabric::cuda
