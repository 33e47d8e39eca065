// SPDX-License-Identifier: Apache-2.0
// What a fuzz target is: one function of the fuzzer's bytes, which throws or crashes when a property does not hold.
// entry.cc makes libFuzzer's entry point of it; replay.cc runs it where there is no libFuzzer.
// Thread rule: called by one thread, again and again; it may keep state that no input can change for the next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace tokenyard::fuzz {

void run_target(std::span<const std::byte> bytes);

}  // namespace tokenyard::fuzz

// NOLINTNEXTLINE(readability-identifier-naming): the name is libFuzzer's
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);
