// SPDX-License-Identifier: Apache-2.0
// TensorView to and from DLPack, without a copy. Header-only, and not part of tokenyard.h, because it needs DLPack's
// own <dlpack/dlpack.h> (0.6 or newer).
// Thread rule: pure functions. A managed tensor's deleter runs on the thread that calls it.
#pragma once

#include <dlpack/dlpack.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "tokenyard/error.h"
#include "tokenyard/tensor.h"

namespace tokenyard {

// DLPack's type codes. Its headers have the fp8 ones since 1.1; their numbers are the same everywhere.
inline constexpr int kDlpackInt = 0;
inline constexpr int kDlpackUint = 1;
inline constexpr int kDlpackFloat = 2;
inline constexpr int kDlpackBfloat = 4;
inline constexpr int kDlpackFloat8E4m3fn = 10;
inline constexpr int kDlpackFloat8E5m2 = 12;
inline constexpr int kDlpackFloat8E8m0fnu = 14;

namespace dlpack_detail {

struct DtypeCode {
  Dtype dtype;
  int code;
  int bits;
};

inline constexpr std::array<DtypeCode, 9> kDtypeCodes{{{Dtype::kBf16, kDlpackBfloat, 16},
                                                       {Dtype::kF16, kDlpackFloat, 16},
                                                       {Dtype::kF32, kDlpackFloat, 32},
                                                       {Dtype::kF8e4m3, kDlpackFloat8E4m3fn, 8},
                                                       {Dtype::kF8e5m2, kDlpackFloat8E5m2, 8},
                                                       {Dtype::kE8m0, kDlpackFloat8E8m0fnu, 8},
                                                       {Dtype::kU8, kDlpackUint, 8},
                                                       {Dtype::kI32, kDlpackInt, 32},
                                                       {Dtype::kI64, kDlpackInt, 64}}};

[[noreturn]] inline void refuse(const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, "DLPack tensor " + what);
}

inline Dtype dtype_of(const DLDataType& type) {
  if (type.lanes != 1) refuse("has " + std::to_string(type.lanes) + " lanes per element; 1 is right");
  for (const DtypeCode& known : kDtypeCodes) {
    if (known.code == static_cast<int>(type.code) && known.bits == static_cast<int>(type.bits)) return known.dtype;
  }
  refuse("has type code " + std::to_string(type.code) + " of " + std::to_string(type.bits) +
         " bits; bf16, f16, f32, f8e4m3fn, f8e5m2, f8e8m0fnu, u8, i32 or i64 is right");
}

inline Device device_of(const DLDevice& device) {
  if (device.device_type == kDLCPU) return {DeviceKind::kCpu, device.device_id};
  // Pinned host memory is read and written by the CPU like any other.
  if (device.device_type == kDLCUDAHost) return {DeviceKind::kCpu, 0};
  if (device.device_type == kDLCUDA) return {DeviceKind::kCuda, device.device_id};
  refuse("is on a device of type " + std::to_string(static_cast<int>(device.device_type)) +
         "; CPU (1), CUDA (2) or CUDA host (3) memory is right");
}

inline DLDataType type_of(Dtype dtype) {
  for (const DtypeCode& known : kDtypeCodes) {
    if (known.dtype == dtype) {
      return {.code = static_cast<std::uint8_t>(known.code), .bits = static_cast<std::uint8_t>(known.bits), .lanes = 1};
    }
  }
  throw Error(ErrorCode::kInvalidArgument, "dtype " + std::to_string(static_cast<int>(dtype)) + " is none of Dtype");
}

// What a managed tensor keeps alive: its own shape and strides, and the caller's owner.
struct Managed {
  DLManagedTensor tensor{};
  TensorView view{};
  void* owner = nullptr;
  void (*release)(void*) = nullptr;
};

}  // namespace dlpack_detail

// A view of the same memory; it borrows, so the DLPack tensor's owner must outlive it. Null strides mean contiguous;
// byte_offset is added to the pointer. Throws kInvalidArgument for what a TensorView cannot say.
[[nodiscard]] inline TensorView from_dlpack(const DLTensor& tensor) {
  if (tensor.ndim < 1 || tensor.ndim > kMaxDims) {
    dlpack_detail::refuse("has " + std::to_string(tensor.ndim) + " dimensions; 1 to " + std::to_string(kMaxDims) +
                          " are right");
  }
  TensorView view;
  view.dtype = dlpack_detail::dtype_of(tensor.dtype);
  view.device = dlpack_detail::device_of(tensor.device);
  view.num_dims = tensor.ndim;
  std::int64_t contiguous_stride = 1;
  for (int i = tensor.ndim - 1; i >= 0; --i) {
    const auto dim = static_cast<std::size_t>(i);
    const std::int64_t extent = tensor.shape[i];
    if (extent < 0)
      dlpack_detail::refuse("has extent " + std::to_string(extent) + " in dimension " + std::to_string(i));
    view.shape[dim] = extent;
    view.strides[dim] = tensor.strides == nullptr ? contiguous_stride : tensor.strides[i];
    contiguous_stride *= extent;
  }
  // Null for tensors without elements, whose offset then means nothing.
  if (tensor.data != nullptr) view.data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  return view;
}

// Borrows shape and strides from `view`, which must outlive the result and must be defined.
[[nodiscard]] inline DLTensor to_dlpack(const TensorView& view) {
  if (!view.defined())
    throw Error(ErrorCode::kInvalidArgument, "a tensor that is not given cannot become a DLPack one");
  DLTensor tensor{};
  tensor.data = view.data;
  tensor.device.device_type = view.device.kind == DeviceKind::kCuda ? kDLCUDA : kDLCPU;
  tensor.device.device_id = view.device.index;
  tensor.ndim = view.num_dims;
  tensor.dtype = dlpack_detail::type_of(view.dtype);
  // DLPack has no const; consumers do not write these.
  tensor.shape = const_cast<std::int64_t*>(view.shape.data());
  tensor.strides = const_cast<std::int64_t*>(view.strides.data());
  return tensor;
}

// For consumers that take ownership. The result holds its own shape; its deleter calls `release(owner)` (unless
// `release` is null) and frees the rest. On an exception `owner` is not released.
[[nodiscard]] inline DLManagedTensor* to_managed_dlpack(const TensorView& view, void* owner, void (*release)(void*)) {
  auto managed = std::make_unique<dlpack_detail::Managed>();
  managed->view = view;
  managed->owner = owner;
  managed->release = release;
  managed->tensor.dl_tensor = to_dlpack(managed->view);
  managed->tensor.manager_ctx = managed.get();
  managed->tensor.deleter = [](DLManagedTensor* self) {
    const std::unique_ptr<dlpack_detail::Managed> dying(static_cast<dlpack_detail::Managed*>(self->manager_ctx));
    if (dying->release != nullptr) dying->release(dying->owner);
  };
  return &managed.release()->tensor;
}

}  // namespace tokenyard
