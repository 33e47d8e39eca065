// SPDX-License-Identifier: Apache-2.0
// DLPack in both directions: nothing is lost on the way, and what a TensorView cannot say is refused by name.
#include "tokenyard/dlpack.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <string>

namespace tokenyard {
namespace {

struct Source {
  std::array<float, 24> values{};
  std::array<std::int64_t, 5> shape{2, 3, 4, 1, 1};
  std::array<std::int64_t, 5> strides{12, 4, 1, 1, 1};
  DLTensor tensor{};

  Source() {
    tensor.data = values.data();
    tensor.device = {kDLCPU, 0};
    tensor.ndim = 3;
    tensor.dtype = {kDLFloat, 32, 1};
    tensor.shape = shape.data();
    tensor.strides = strides.data();
  }
};

void expect_refused(const DLTensor& tensor, const std::string& reason) {
  try {
    (void)from_dlpack(tensor);
    ADD_FAILURE() << "accepted, expected: " << reason;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find(reason), std::string::npos) << error.what();
  }
}

TEST(Dlpack, NullStridesMeanContiguous) {
  Source source;
  source.tensor.strides = nullptr;
  const TensorView view = from_dlpack(source.tensor);
  EXPECT_EQ(view.data, source.values.data());
  EXPECT_EQ(view.describe(), "f32[2, 3, 4]");
  EXPECT_TRUE(view.contiguous());
  EXPECT_EQ(view.strides[0], 12);
}

TEST(Dlpack, StridesAndByteOffsetAreHonoured) {
  Source source;
  source.strides = {1, 8, 2, 0, 0};
  source.tensor.byte_offset = 20;
  const TensorView view = from_dlpack(source.tensor);
  EXPECT_EQ(view.data, source.values.data() + 5);
  EXPECT_EQ(view.strides, (std::array<std::int64_t, kMaxDims>{1, 8, 2, 0}));
  EXPECT_FALSE(view.contiguous());
}

TEST(Dlpack, NoElementsNeedNoPointer) {
  Source source;
  source.shape[0] = 0;
  source.tensor.data = nullptr;
  source.tensor.byte_offset = 64;
  const TensorView view = from_dlpack(source.tensor);
  EXPECT_TRUE(view.defined());
  EXPECT_EQ(view.data, nullptr);
  EXPECT_EQ(view.num_rows(), 0);
}

TEST(Dlpack, EveryDtypeSurvivesBothWays) {
  constexpr std::array kDtypes{Dtype::kBf16, Dtype::kF16, Dtype::kF32, Dtype::kF8e4m3, Dtype::kF8e5m2,
                               Dtype::kE8m0, Dtype::kU8,  Dtype::kI32, Dtype::kI64};
  std::array<std::int64_t, 6> memory{};
  for (const Dtype dtype : kDtypes) {
    const TensorView view(memory.data(), dtype, {2, 3});
    const DLTensor tensor = to_dlpack(view);
    EXPECT_EQ(tensor.dtype.bits, 8 * size_of(dtype)) << name(dtype);
    const TensorView back = from_dlpack(tensor);
    EXPECT_EQ(back.dtype, dtype) << name(dtype);
    EXPECT_EQ(back.data, view.data);
    EXPECT_EQ(back.shape, view.shape);
    EXPECT_EQ(back.strides, view.strides);
  }
  // The numbers are the standard's.
  EXPECT_EQ(to_dlpack({memory.data(), Dtype::kBf16, {1}}).dtype.code, 4);
  EXPECT_EQ(to_dlpack({memory.data(), Dtype::kF8e4m3, {1}}).dtype.code, 10);
  EXPECT_EQ(to_dlpack({memory.data(), Dtype::kF8e5m2, {1}}).dtype.code, 12);
  EXPECT_EQ(to_dlpack({memory.data(), Dtype::kE8m0, {1}}).dtype.code, 14);
}

TEST(Dlpack, DevicesSurviveBothWays) {
  Source source;
  source.tensor.device = {kDLCUDA, 3};
  const TensorView view = from_dlpack(source.tensor);
  EXPECT_EQ(view.device, (Device{DeviceKind::kCuda, 3}));
  EXPECT_EQ(to_dlpack(view).device.device_type, kDLCUDA);
  EXPECT_EQ(to_dlpack(view).device.device_id, 3);
  source.tensor.device = {kDLCUDAHost, 0};
  EXPECT_EQ(from_dlpack(source.tensor).device.kind, DeviceKind::kCpu);
}

TEST(Dlpack, WhatAViewCannotSayIsRefused) {
  Source source;
  source.tensor.dtype = {kDLFloat, 64, 1};
  expect_refused(source.tensor, "type code 2 of 64 bits");
  source.tensor.dtype = {kDLFloat, 32, 4};
  expect_refused(source.tensor, "4 lanes");
  source.tensor.dtype = {kDLFloat, 32, 1};
  source.tensor.device = {kDLVulkan, 0};
  expect_refused(source.tensor, "device of type 7");
  source.tensor.device = {kDLCPU, 0};
  source.tensor.ndim = 5;
  expect_refused(source.tensor, "5 dimensions");
  source.tensor.ndim = 0;
  expect_refused(source.tensor, "0 dimensions");
  source.tensor.ndim = 3;
  source.shape[1] = -2;
  expect_refused(source.tensor, "extent -2 in dimension 1");
  EXPECT_THROW((void)to_dlpack(TensorView{}), Error);
}

TEST(Dlpack, AManagedTensorKeepsItsShapeAndReleasesItsOwnerOnce) {
  std::array<float, 6> values{};
  int released = 0;
  DLManagedTensor* managed = nullptr;
  {
    TensorView view(values.data(), Dtype::kF32, {2, 3});
    managed = to_managed_dlpack(view, &released, [](void* owner) { ++*static_cast<int*>(owner); });
    view.shape = {9, 9, 9, 9};
  }
  EXPECT_EQ(from_dlpack(managed->dl_tensor).describe(), "f32[2, 3]");
  EXPECT_EQ(released, 0);
  managed->deleter(managed);
  EXPECT_EQ(released, 1);

  DLManagedTensor* unowned = to_managed_dlpack({values.data(), Dtype::kF32, {6}}, nullptr, nullptr);
  unowned->deleter(unowned);
}

}  // namespace
}  // namespace tokenyard
