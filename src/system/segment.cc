// SPDX-License-Identifier: Apache-2.0
#include "system/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysinfo.h>

#include <cerrno>
#include <string>
#include <utility>

#include "system/system_error.h"

namespace tokenyard::system {

namespace {

std::string size_text(std::int64_t bytes) {
  return std::to_string(bytes) + " bytes of shared memory";
}

void check_positive(std::int64_t bytes) {
  if (bytes > 0) return;
  throw Error(ErrorCode::kInvalidArgument,
              "a segment of " + std::to_string(bytes) + " bytes was asked for; it must have at least 1");
}

// posix_fallocate() would fill the whole machine before it fails, and the kernel might kill somebody meanwhile.
void check_fits_machine(std::int64_t bytes) {
  struct sysinfo info {};

  if (::sysinfo(&info) != 0) return;
  const std::uint64_t memory = (info.totalram + info.totalswap) * std::uint64_t{info.mem_unit};
  if (static_cast<std::uint64_t>(bytes) <= memory) return;
  throw Error(ErrorCode::kSystem, size_text(bytes) + " were asked for; this machine has " + std::to_string(memory) +
                                      ": " + errno_text(ENOMEM));
}

std::byte* map_shared(int fd, std::int64_t bytes) {
  void* address = ::mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (address == MAP_FAILED) throw system_error("mapping " + size_text(bytes) + " failed", errno);
  return static_cast<std::byte*>(address);
}

}  // namespace

Segment Segment::create(std::int64_t bytes) {
  check_positive(bytes);
  check_fits_machine(bytes);
  FileDescriptor fd(::memfd_create("tokenyard", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) throw system_error("memfd_create for " + size_text(bytes) + " failed", errno);
  int error = EINTR;
  while (error == EINTR)
    error = ::posix_fallocate(fd.get(), 0, bytes);  // returns the error, leaves errno alone
  if (error != 0) throw system_error("reserving " + size_text(bytes) + " failed", error);
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    throw system_error("sealing the size of " + size_text(bytes) + " failed", errno);
  }
  std::byte* data = map_shared(fd.get(), bytes);
  return {std::move(fd), data, bytes};
}

Segment Segment::import(FileDescriptor fd, std::int64_t bytes) {
  check_positive(bytes);

  struct stat status {};

  if (::fstat(fd.get(), &status) != 0) throw system_error("fstat of an imported segment failed", errno);
  if (status.st_size < bytes) {
    throw Error(ErrorCode::kMismatch, "an imported segment holds " + std::to_string(status.st_size) +
                                          " bytes; at least " + std::to_string(bytes) + " are needed");
  }
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    throw Error(ErrorCode::kMismatch,
                "an imported descriptor is no segment: its size is not sealed, so its owner could shrink it under us");
  }
  std::byte* data = map_shared(fd.get(), bytes);
  return {std::move(fd), data, bytes};
}

Segment::Segment(FileDescriptor fd, std::byte* data, std::int64_t bytes)
    : fd_(std::move(fd)), data_(data), bytes_(bytes) {}

Segment::Segment(Segment&& other) noexcept
    : fd_(std::move(other.fd_)), data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Segment& Segment::operator=(Segment&& other) noexcept {
  if (this == &other) return *this;
  unmap();
  fd_ = std::move(other.fd_);
  data_ = std::exchange(other.data_, nullptr);
  bytes_ = std::exchange(other.bytes_, 0);
  return *this;
}

Segment::~Segment() {
  unmap();
}

void Segment::unmap() noexcept {
  if (data_ != nullptr) ::munmap(data_, static_cast<std::size_t>(bytes_));
  data_ = nullptr;
}

}  // namespace tokenyard::system
