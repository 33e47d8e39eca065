// SPDX-License-Identifier: Apache-2.0
// Tensors must be in the memory of their communication's device.
#include <gtest/gtest.h>

#include <array>
#include <string>

#include "tokenyard/error.h"

#include "communication/arguments.h"

namespace tokenyard::communication {
namespace {

constexpr Device kHost{};
constexpr Device kOtherHost{DeviceKind::kCpu, 3};
constexpr Device kFirstGpu{DeviceKind::kCuda, 0};
constexpr Device kSecondGpu{DeviceKind::kCuda, 1};

// What each check says of a tensor on `tensor` where the communication is on `communication`; empty: it is taken.
std::array<std::string, 3> refusals(Device communication, Device tensor) {
  const Limits limits{.device = communication};
  std::array<std::int32_t, 8> memory{};
  TensorView list(memory.data(), Dtype::kI32, {8});
  TensorView rows(memory.data(), Dtype::kI32, {2, 4});
  TensorView blocks(memory.data(), Dtype::kI32, {2, 2, 2});
  for (TensorView* view : {&list, &rows, &blocks})
    view->device = tensor;
  const auto refusal = [](auto&& check) {
    try {
      check();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return std::string(error.what());
    }
    return std::string();
  };
  return {refusal([&] { check_list(limits, list, "list", Dtype::kI32, 8); }),
          refusal([&] { check_rows(limits, rows, "rows", 2); }),
          refusal([&] { check_blocks(limits, blocks, "blocks"); })};
}

void expect_taken(Device communication, Device tensor) {
  for (const std::string& refusal : refusals(communication, tensor))
    EXPECT_EQ(refusal, "");
}

void expect_refused(Device communication, Device tensor, const std::string& place) {
  for (const std::string& refusal : refusals(communication, tensor))
    EXPECT_NE(refusal.find(place), std::string::npos) << "refused with: " << refusal;
}

TEST(TensorDevice, IsTheCommunications) {
  expect_taken(kHost, kHost);
  expect_taken(kHost, kOtherHost);
  expect_taken(kSecondGpu, kSecondGpu);
  expect_refused(kHost, kFirstGpu, "in host memory");
  expect_refused(kSecondGpu, kHost, "on cuda:1");
  expect_refused(kSecondGpu, kFirstGpu, "on cuda:1");
}

}  // namespace
}  // namespace tokenyard::communication
