// SPDX-License-Identifier: Apache-2.0
#include "fuzz/target.h"

// The name and the types are libFuzzer's.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  tokenyard::fuzz::run_target(std::as_bytes(std::span(data, size)));
  return 0;
}
