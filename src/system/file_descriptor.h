// SPDX-License-Identifier: Apache-2.0
// Ownership of one file descriptor.
// Thread rule: a value; one thread at a time per object.
#pragma once

#include <unistd.h>

#include <utility>

namespace tokenyard::system {

class FileDescriptor {
 public:
  FileDescriptor() = default;

  explicit FileDescriptor(int fd) : fd_(fd) {}

  FileDescriptor(FileDescriptor&& other) noexcept : fd_(other.release()) {}

  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    if (this != &other) reset(other.release());
    return *this;
  }

  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;

  ~FileDescriptor() { reset(); }

  [[nodiscard]] int get() const { return fd_; }

  [[nodiscard]] bool valid() const { return fd_ >= 0; }

  // Gives up ownership.
  [[nodiscard]] int release() { return std::exchange(fd_, -1); }

  // Linux frees the number even when close() fails, so its result tells nothing that could be acted on.
  void reset(int fd = -1) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = fd;
  }

 private:
  int fd_ = -1;
};

}  // namespace tokenyard::system
