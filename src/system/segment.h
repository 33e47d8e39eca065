// SPDX-License-Identifier: Apache-2.0
// Shared memory without a name: a memfd whose descriptor is the only handle, so nothing is left behind when every
// holder is killed. Pages are reserved at creation: a machine without room is an Error here, never a SIGBUS later.
// The size is sealed, so no peer can shrink memory that others have mapped.
// Thread rule: one thread at a time per object; the memory itself is the users' affair.
#pragma once

#include <cstddef>
#include <cstdint>

#include "system/file_descriptor.h"

namespace tokenyard::system {

class Segment {
 public:
  Segment() = default;
  // Zeroed, page-aligned, mapped for reading and writing.
  [[nodiscard]] static Segment create(std::int64_t bytes);
  // Maps the first `bytes` of another process's segment; the descriptor must come from create().
  [[nodiscard]] static Segment import(FileDescriptor fd, std::int64_t bytes);

  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment();

  // Null for a default-constructed or moved-from segment.
  [[nodiscard]] std::byte* data() const { return data_; }

  // As asked for; the mapping goes on to the end of its page.
  [[nodiscard]] std::int64_t bytes() const { return bytes_; }

  [[nodiscard]] int fd() const { return fd_.get(); }

 private:
  Segment(FileDescriptor fd, std::byte* data, std::int64_t bytes);
  void unmap() noexcept;

  FileDescriptor fd_;
  std::byte* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

}  // namespace tokenyard::system
