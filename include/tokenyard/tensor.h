// SPDX-License-Identifier: Apache-2.0
// Tensors as the library sees them: borrowed memory with a dtype, a shape and strides.
//
// A `TensorView` owns nothing and is trivially copyable. Whoever passes one keeps the memory alive for as long as
// the call's contract says. Inputs are never written, although `data` is not const: one type serves both directions.
// `dlpack.h` converts to and from DLPack without a copy.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>

namespace tokenyard {

enum class Dtype : std::uint8_t {
  kBf16,    // bfloat16
  kF16,     // IEEE binary16
  kF32,     // IEEE binary32
  kF8e4m3,  // OCP FP8 E4M3: no infinity, NaN = 0x7F and 0xFF, largest finite 448
  kF8e5m2,  // OCP FP8 E5M2: largest finite 57344
  kE8m0,    // OCP MX scale: 2^(byte - 127), NaN = 0xFF
  kU8,      // opaque bytes: NVFP4, MXFP4 and other packed rows
  kI32,
  kI64,
};

[[nodiscard]] std::string_view name(Dtype dtype);  // "bf16", "f8e4m3", ...
[[nodiscard]] std::int64_t size_of(Dtype dtype);   // bytes of one element

enum class DeviceKind : std::uint8_t { kCpu, kCuda };

struct Device {
  DeviceKind kind = DeviceKind::kCpu;
  int index = 0;

  friend bool operator==(const Device&, const Device&) = default;
};

inline constexpr int kMaxDims = 4;
// No machine's memory is larger; a view that says so is refused before its sizes are multiplied.
inline constexpr std::int64_t kMaxTensorBytes = std::int64_t{1} << 56;

// A default-constructed view is "not given" (`defined()` is false). A view with zero rows is given, and its pointer
// may then be null.
struct TensorView {
  void* data = nullptr;
  Dtype dtype = Dtype::kU8;
  Device device{};
  int num_dims = 0;
  std::array<std::int64_t, kMaxDims> shape{};
  std::array<std::int64_t, kMaxDims> strides{};  // in elements

  TensorView() = default;
  // Row-major and contiguous. Throws kInvalidArgument for more than kMaxDims dimensions, a negative extent or
  // more than kMaxTensorBytes.
  TensorView(void* data, Dtype dtype, std::initializer_list<std::int64_t> shape);
  TensorView(void* data, Dtype dtype, std::span<const std::int64_t> shape);

  // A view of memory that is only read. The const is dropped because inputs and outputs share one type.
  static TensorView of_const(const void* data, Dtype dtype, std::initializer_list<std::int64_t> shape);

  [[nodiscard]] bool defined() const { return num_dims > 0; }

  [[nodiscard]] std::int64_t num_elements() const;

  // Rows are the first dimension: shape[0], or 0 when not defined.
  [[nodiscard]] std::int64_t num_rows() const { return num_dims > 0 ? shape[0] : 0; }

  // Bytes of one row (all dimensions but the first), not counting padding between rows.
  [[nodiscard]] std::int64_t row_bytes() const;
  [[nodiscard]] std::int64_t row_stride_bytes() const;
  [[nodiscard]] bool contiguous() const;
  // Rows [first, first + count) of the first dimension.
  [[nodiscard]] TensorView rows(std::int64_t first, std::int64_t count) const;
  // "bf16[3, 2880]", with strides when not contiguous: for messages.
  [[nodiscard]] std::string describe() const;

  // The memory as elements of T; T must have the dtype's size. No check beyond that in release builds.
  template <class T>
  [[nodiscard]] T* as() const {
    return static_cast<T*>(data);
  }
};

}  // namespace tokenyard
