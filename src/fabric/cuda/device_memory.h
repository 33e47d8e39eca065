// SPDX-License-Identifier: Apache-2.0
// Memory of a device that others may map: an allocation without an address, and mappings that give it addresses. The
// device keeps the memory until the last handle, descriptor and mapping of any process is gone.
// Thread rule: values; one thread at a time per object. The memory itself is the users' affair.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>

#include "fabric/cuda/context.h"
#include "fabric/cuda/owned.h"
#include "system/file_descriptor.h"

namespace tokenyard::fabric::cuda {

// Held around the driver's calls that make and end virtual memory: cuMemUnmap of one thread beside such a call of
// another has corrupted the driver's heap (580.159.04, one allocation mapped for two devices). Held again where one of
// them fails and what was made before it is given back.
[[nodiscard]] std::recursive_mutex& virtual_memory_mutex();

// What an importer must know of an allocation, besides its descriptor.
struct AllocationSize {
  std::int64_t bytes = 0;      // a multiple of `alignment`
  std::int64_t alignment = 0;  // of addresses
};

class Allocation {
 public:
  // At least `bytes` of the context's device.
  [[nodiscard]] static Allocation create(const Context& context, std::int64_t bytes);
  // Another process's, which stays as large as it was made. The descriptor is used up.
  [[nodiscard]] static Allocation import(const Context& context, system::FileDescriptor fd, const AllocationSize& size);

  // For import() by another process; closed on exec.
  [[nodiscard]] system::FileDescriptor export_descriptor() const;

  [[nodiscard]] CUmemGenericAllocationHandle handle() const { return handle_.get(); }

  [[nodiscard]] const AllocationSize& size() const { return size_; }

 private:
  struct Handle {
    using Value = CUmemGenericAllocationHandle;

    static void release(const Driver& cu, const Value& handle) noexcept {
      const std::scoped_lock lock(virtual_memory_mutex());
      cu.mem_release(handle);
    }
  };

  Allocation(const Driver& cu, CUmemGenericAllocationHandle handle, const AllocationSize& size)
      : driver_(&cu), handle_(cu, handle), size_(size) {}

  const Driver* driver_;
  Owned<Handle> handle_;
  AllocationSize size_;
};

// An allocation at addresses where the context's device loads and stores.
class Mapping {
 public:
  Mapping(const Context& context, const Allocation& allocation);

  [[nodiscard]] std::byte* data() const {
    // CUDA's type for addresses is an integer. NOLINTNEXTLINE(performance-no-int-to-ptr)
    return reinterpret_cast<std::byte*>(range_.get().address);
  }

 private:
  struct Range {
    CUdeviceptr address = 0;
    std::size_t bytes = 0;
  };

  struct Reserved {
    using Value = Range;

    static void release(const Driver& cu, const Value& range) noexcept {
      const std::scoped_lock lock(virtual_memory_mutex());
      cu.mem_address_free(range.address, range.bytes);
    }
  };

  struct Mapped {
    using Value = Range;

    static void release(const Driver& cu, const Value& range) noexcept {
      const std::scoped_lock lock(virtual_memory_mutex());
      cu.mem_unmap(range.address, range.bytes);
    }
  };

  Owned<Reserved> range_;
  Owned<Mapped> mapped_;
};

// A rank's own memory, zeroed.
struct DeviceMemory {
  explicit DeviceMemory(const Context& owner, std::int64_t bytes);

  Context context;
  Allocation allocation;
  Mapping mapping;
};

}  // namespace tokenyard::fabric::cuda
