// SPDX-License-Identifier: Apache-2.0
#include "fabric/cuda/device_memory.h"

#include <fcntl.h>

#include <cerrno>
#include <string>
#include <utility>

#include "tokenyard/error.h"

#include "system/system_error.h"

namespace tokenyard::fabric::cuda {
namespace {

CUmemLocation location_of(const Context& context) {
  CUmemLocation location{};
  location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  location.id = context.device();
  return location;
}

CUmemAllocationProp properties_of(const Context& context) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location = location_of(context);
  return properties;
}

std::string size_text(const Context& context, std::int64_t bytes) {
  return std::to_string(bytes) + " bytes of " + context.name();
}

// Sizes that no device has would be refused with less clear words, or overflow when rounded up.
void check_size(const Context& context, std::int64_t bytes) {
  if (bytes <= 0) {
    throw Error(ErrorCode::kInvalidArgument,
                "a window of " + std::to_string(bytes) + " bytes was asked for; it must have at least 1");
  }
  const Driver& cu = context.driver();
  std::size_t total = 0;
  require(cu, cu.device_total_mem(&total, context.device()), "cuDeviceTotalMem");
  if (static_cast<std::uint64_t>(bytes) > total) {
    throw Error(ErrorCode::kSystem, size_text(context, bytes) + " were asked for; it has " + std::to_string(total));
  }
}

struct Stream {
  using Value = CUstream;

  static void release(const Driver& cu, const Value& stream) noexcept { cu.stream_destroy(stream); }
};

// On a stream of its own: the default stream would wait for the caller's kernels, and they for it.
void fill_with_zeros(const Context& context, std::byte* data, std::int64_t bytes) {
  const Driver& cu = context.driver();
  const CurrentContext current(context);
  CUstream native = nullptr;
  require(cu, cu.stream_create(&native, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  const Owned<Stream> stream(cu, native);
  // A thread that captures may not wait. It learns so before there is anything that writes to memory which then goes.
  require(cu, cu.stream_synchronize(native), "cuStreamSynchronize", "before zeroing " + size_text(context, bytes));
  const auto address = reinterpret_cast<CUdeviceptr>(data);
  require(cu, cu.memset_d8_async(address, 0, static_cast<std::size_t>(bytes), native), "cuMemsetD8Async");
  require(cu, cu.stream_synchronize(native), "cuStreamSynchronize", "after zeroing " + size_text(context, bytes));
}

}  // namespace

std::recursive_mutex& virtual_memory_mutex() {
  static std::recursive_mutex mutex;
  return mutex;
}

Allocation Allocation::create(const Context& context, std::int64_t bytes) {
  check_size(context, bytes);
  const Driver& cu = context.driver();
  const CUmemAllocationProp properties = properties_of(context);
  std::size_t granularity = 0;
  require(cu, cu.mem_get_allocation_granularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
          "cuMemGetAllocationGranularity");
  const auto alignment = static_cast<std::int64_t>(granularity);
  const AllocationSize size{.bytes = (bytes + alignment - 1) / alignment * alignment, .alignment = alignment};
  const std::string about = "of " + size_text(context, size.bytes);
  CUmemGenericAllocationHandle handle = 0;
  const std::scoped_lock lock(virtual_memory_mutex());
  require(cu, cu.mem_create(&handle, static_cast<std::size_t>(size.bytes), &properties, 0), "cuMemCreate", about);
  return {cu, handle, size};
}

Allocation Allocation::import(const Context& context, system::FileDescriptor fd, const AllocationSize& size) {
  const Driver& cu = context.driver();
  // The descriptor travels in the pointer itself.
  void* shareable = reinterpret_cast<void*>(static_cast<std::intptr_t>(fd.get()));  // NOLINT(performance-no-int-to-ptr)
  CUmemGenericAllocationHandle handle = 0;
  const std::scoped_lock lock(virtual_memory_mutex());
  require(cu, cu.mem_import_from_shareable_handle(&handle, shareable, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
          "cuMemImportFromShareableHandle", "for " + context.name());
  return {cu, handle, size};
}

system::FileDescriptor Allocation::export_descriptor() const {
  int number = -1;
  require(*driver_,
          driver_->mem_export_to_shareable_handle(&number, handle(), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
          "cuMemExportToShareableHandle");
  system::FileDescriptor fd(number);
  if (::fcntl(number, F_SETFD, FD_CLOEXEC) != 0)
    throw system::system_error("fcntl of exported GPU memory failed", errno);
  return fd;
}

Mapping::Mapping(const Context& context, const Allocation& allocation) {
  const Driver& cu = context.driver();
  const CurrentContext current(context);
  Range range{.bytes = static_cast<std::size_t>(allocation.size().bytes)};
  const std::string about = "of " + std::to_string(range.bytes) + " bytes for " + context.name();
  const auto alignment = static_cast<std::size_t>(allocation.size().alignment);
  const std::scoped_lock lock(virtual_memory_mutex());
  require(cu, cu.mem_address_reserve(&range.address, range.bytes, alignment, 0, 0), "cuMemAddressReserve", about);
  range_ = Owned<Reserved>(cu, range);
  require(cu, cu.mem_map(range.address, range.bytes, 0, allocation.handle(), 0), "cuMemMap", about);
  mapped_ = Owned<Mapped>(cu, range);
  CUmemAccessDesc access{};
  access.location = location_of(context);
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  require(cu, cu.mem_set_access(range.address, range.bytes, &access, 1), "cuMemSetAccess", about);
}

DeviceMemory::DeviceMemory(const Context& owner, std::int64_t bytes)
    : context(owner.index()), allocation(Allocation::create(context, bytes)), mapping(context, allocation) {
  fill_with_zeros(context, mapping.data(), allocation.size().bytes);
}

}  // namespace tokenyard::fabric::cuda
