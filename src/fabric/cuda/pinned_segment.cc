// SPDX-License-Identifier: Apache-2.0
#include "fabric/cuda/pinned_segment.h"

#include <unistd.h>

#include <string>
#include <utility>

namespace tokenyard::fabric::cuda {

PinnedSegment::PinnedSegment(const Context& owner, system::Segment segment)
    : context_(owner.index()), segment_(std::move(segment)) {
  const Driver& cu = context_.driver();
  const CurrentContext current(context_);
  // The mapping goes on to the end of its page.
  const std::int64_t page = ::sysconf(_SC_PAGESIZE);
  const std::int64_t bytes = (segment_.bytes() + page - 1) / page * page;
  // Portable: the process's other devices may map it too.
  constexpr unsigned kFlags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
  require(cu, cu.mem_host_register(segment_.data(), static_cast<std::size_t>(bytes), kFlags), "cuMemHostRegister",
          "of " + std::to_string(bytes) + " bytes for " + context_.name());
  registered_ = Owned<Registered>(cu, {.context = context_.native(), .data = segment_.data()});
}

void PinnedSegment::Registered::release(const Driver& cu, const Range& range) noexcept {
  if (cu.ctx_push_current(range.context) != CUDA_SUCCESS) return;
  cu.mem_host_unregister(range.data);
  CUcontext popped = nullptr;
  cu.ctx_pop_current(&popped);
}

std::byte* PinnedSegment::address_for(const Context& context) const {
  const Driver& cu = context.driver();
  const CurrentContext current(context);
  CUdeviceptr address = 0;
  require(cu, cu.mem_host_get_device_pointer(&address, segment_.data(), 0), "cuMemHostGetDevicePointer",
          "for " + context.name());
  return reinterpret_cast<std::byte*>(address);  // NOLINT(performance-no-int-to-ptr): CUDA's address type
}

}  // namespace tokenyard::fabric::cuda
