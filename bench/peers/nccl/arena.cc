// SPDX-License-Identifier: Apache-2.0
#include "arena.h"

#include "checked.h"

namespace tokenyard::bench {

Arena::Arena(MemoryKind kind, ncclComm_t comm, std::size_t size) : kind_(kind), comm_(comm) {
  if (kind == MemoryKind::kPlain) {
    check("cudaMalloc", cudaMalloc(&memory_, size));
    return;
  }
  check("ncclMemAlloc", ncclMemAlloc(&memory_, size));
  try {
    if (kind == MemoryKind::kRegistered) {
      check("ncclCommRegister", ncclCommRegister(comm, memory_, size, &handle_));
    } else {
      check("ncclCommWindowRegister", ncclCommWindowRegister(comm, memory_, size, &window_, NCCL_WIN_COLL_SYMMETRIC));
    }
  } catch (...) {
    release();
    throw;
  }
}

Arena::~Arena() {
  release();
}

void Arena::release() noexcept {
  if (window_ != nullptr) report("ncclCommWindowDeregister", ncclCommWindowDeregister(comm_, window_));
  if (handle_ != nullptr) report("ncclCommDeregister", ncclCommDeregister(comm_, handle_));
  if (kind_ == MemoryKind::kPlain) {
    report("cudaFree", cudaFree(memory_));
  } else {
    report("ncclMemFree", ncclMemFree(memory_));
  }
}

}  // namespace tokenyard::bench
