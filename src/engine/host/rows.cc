// SPDX-License-Identifier: Apache-2.0
#include "engine/host/rows.h"

#include <hwy/cache_control.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <type_traits>

#include "tokenyard/error.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "engine/host/rows.cc"
// These come first: they repeat this file once per instruction set.
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "engine/host/plain_stores.h"
#include "engine/host/rows-inl.h"
#include "engine/host/sums-inl.h"
#include "protocol/casts.h"
#include "protocol/formats.h"

HWY_BEFORE_NAMESPACE();

namespace tokenyard::engine::host::HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR

void copy_streaming(std::byte* to, const std::byte* from, std::size_t bytes) {
  std::memcpy(to, from, bytes);
}

template <class From, class To>
void cast_elements(std::byte* to, const std::byte* from, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i)
    store_element<To>(to, i, load_element<From>(from, i));
}

#else  // HWY_TARGET == HWY_SCALAR

void copy_streaming(std::byte* to, const std::byte* from, std::size_t bytes) {
  const ByteTag tag;
  const std::size_t step = hn::Lanes(tag);
  std::size_t done = std::min(bytes, bytes_to_line(to));
  std::memcpy(to, from, done);
  const std::uint8_t* source = bytes_of(from);
  std::uint8_t* target = bytes_of(to);
  for (; done + 4 * step <= bytes; done += 4 * step) {
    const auto v0 = hn::LoadU(tag, source + done);
    const auto v1 = hn::LoadU(tag, source + done + step);
    const auto v2 = hn::LoadU(tag, source + done + 2 * step);
    const auto v3 = hn::LoadU(tag, source + done + 3 * step);
    hn::Stream(v0, tag, target + done);
    hn::Stream(v1, tag, target + done + step);
    hn::Stream(v2, tag, target + done + 2 * step);
    hn::Stream(v3, tag, target + done + 3 * step);
  }
  if (done < bytes) std::memcpy(target + done, source + done, bytes - done);
}

template <class From, class To>
HWY_INLINE void cast_elements(std::byte* to_row, const std::byte* from_row, std::size_t n) {
  const CodeBytesTag<From> from_tag;
  const CodeBytesTag<To> to_tag;
  constexpr std::size_t kFromSize = sizeof(typename From::Bits);
  constexpr std::size_t kToSize = sizeof(typename To::Bits);
  const std::uint8_t* from = bytes_of(from_row);
  std::uint8_t* to = bytes_of(to_row);
  const auto recode = [](hn::Vec<CodeBytesTag<From>> bytes)
                          HWY_ATTR { return encode_bytes<To>(decode_bytes<From>(bytes)); };
  std::size_t i = 0;
  for (; i + num_lanes() <= n; i += num_lanes()) {
    hn::StoreU(recode(hn::LoadU(from_tag, from + i * kFromSize)), to_tag, to + i * kToSize);
  }
  if (i == n) return;
  const auto rest = load_part(from_tag, from + i * kFromSize, (n - i) * kFromSize);
  store_part(recode(rest), to_tag, to + i * kToSize, (n - i) * kToSize);
}

#endif  // HWY_TARGET == HWY_SCALAR

void cast_any(std::byte* to, Dtype to_dtype, const std::byte* from, Dtype from_dtype, std::size_t n) {
  with_format(from_dtype, [&](auto from_format) HWY_ATTR {
    with_format(to_dtype, [&](auto to_format) HWY_ATTR {
      using From = decltype(from_format);
      using To = decltype(to_format);
      if constexpr (!std::is_same_v<From, To>) cast_elements<From, To>(to, from, n);
    });
  });
}

void sum_any(const RowSum& sum) {
  with_format(sum.rows_dtype, [&](auto from) HWY_ATTR {
    with_format(sum.output_dtype, [&](auto to) HWY_ATTR {
      using From = decltype(from);
      using To = decltype(to);
      if constexpr (sizeof(typename To::Bits) > 1) sum_elements<From, To>(sum);
    });
  });
}

}  // namespace tokenyard::engine::host::HWY_NAMESPACE

HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace tokenyard::engine::host {
namespace {

HWY_EXPORT(copy_streaming);
HWY_EXPORT(cast_any);
HWY_EXPORT(sum_any);

bool is_float(Dtype dtype) {
  return protocol::is_wide_float(dtype) || dtype == Dtype::kF8e4m3 || dtype == Dtype::kF8e5m2;
}

[[noreturn]] void refuse(const char* what, Dtype from, Dtype to, const char* instead) {
  throw Error(ErrorCode::kInvalidArgument, std::string(what) + " from " + std::string(name(from)) + " to " +
                                               std::string(name(to)) + " is not defined; " + instead);
}

}  // namespace

void flush_streams() {
  hwy::FlushStream();
}

void copy_row(std::byte* to, const std::byte* from, std::int64_t bytes, bool stream) {
  if (bytes <= 0) return;
  const auto size = static_cast<std::size_t>(bytes);
  const bool aligned = reinterpret_cast<std::uintptr_t>(to) % 64 == 0;
  if (kPlainStores || !stream || bytes < (aligned ? kStreamBytes : kStreamUnalignedBytes)) {
    std::memcpy(to, from, size);
  } else {
    HWY_DYNAMIC_DISPATCH(copy_streaming)(to, from, size);
  }
}

void cast_row(std::byte* to, Dtype to_dtype, const std::byte* from, Dtype from_dtype, std::int64_t n) {
  if (n <= 0) return;
  if (to_dtype == from_dtype) {
    if (to != from) std::memcpy(to, from, static_cast<std::size_t>(n * size_of(to_dtype)));
    return;
  }
  if (!is_float(from_dtype) || !is_float(to_dtype)) {
    refuse("a cast", from_dtype, to_dtype, "casts join bf16, f16, f32, f8e4m3 and f8e5m2");
  }
  HWY_DYNAMIC_DISPATCH(cast_any)(to, to_dtype, from, from_dtype, static_cast<std::size_t>(n));
}

void sum_rows(const RowSum& sum) {
  if (!is_float(sum.rows_dtype) || !protocol::is_wide_float(sum.output_dtype)) {
    refuse("a sum", sum.rows_dtype, sum.output_dtype, "rows are bf16, f16, f32 or fp8, outputs bf16, f16 or f32");
  }
  if (sum.n > 0) HWY_DYNAMIC_DISPATCH(sum_any)(sum);
}

}  // namespace tokenyard::engine::host

#endif  // HWY_ONCE
