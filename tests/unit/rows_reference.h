// SPDX-License-Identifier: Apache-2.0
// What the tests of the row operations share: rows with canaries, random content, and the operations by definition.
// Thread rule: the choice of an instruction set is process-wide, so one test at a time.
#pragma once

#include <gtest/gtest.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <random>
#include <set>
#include <vector>

#include "engine/host/rows.h"
#include "protocol/casts.h"

namespace tokenyard::engine::host {

using protocol::Bf16;
using protocol::decode;
using protocol::encode;
using protocol::F16;
using protocol::F32;
using protocol::F8e4m3;
using protocol::F8e5m2;

inline constexpr Dtype kFloats[] = {Dtype::kBf16, Dtype::kF16, Dtype::kF32, Dtype::kF8e4m3, Dtype::kF8e5m2};
inline constexpr Dtype kOutputs[] = {Dtype::kBf16, Dtype::kF16, Dtype::kF32};
inline constexpr std::byte kCanary{0xA5};
inline constexpr std::size_t kCanaries = 64;

// A row with canaries around it that starts `misalignment` bytes after a line boundary.
class Row {
 public:
  Row(std::size_t bytes, std::size_t misalignment) : bytes_(bytes), memory_(bytes + 3 * kCanaries + 128, kCanary) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data() + kCanaries);
    start_ = kCanaries + (64 - address % 64) % 64 + misalignment;
  }

  explicit Row(const std::vector<std::byte>& content, std::size_t misalignment = 0)
      : Row(content.size(), misalignment) {
    if (!content.empty()) std::memcpy(data(), content.data(), content.size());
  }

  std::byte* data() { return memory_.data() + start_; }

  const std::byte* data() const { return memory_.data() + start_; }

  bool canaries_live() const {
    const auto is_canary = [](std::byte b) { return b == kCanary; };
    const auto end = memory_.begin() + static_cast<std::ptrdiff_t>(start_ + bytes_);
    return std::all_of(memory_.begin(), memory_.begin() + static_cast<std::ptrdiff_t>(start_), is_canary) &&
           std::all_of(end, memory_.end(), is_canary);
  }

  std::vector<std::byte> content() const { return {data(), data() + bytes_}; }

 private:
  std::size_t bytes_;
  std::vector<std::byte> memory_;
  std::size_t start_ = 0;
};

inline std::size_t bytes_of(Dtype dtype, std::size_t n) {
  return n * static_cast<std::size_t>(size_of(dtype));
}

template <class Format>
float load_as(const std::byte* row, std::size_t i) {
  typename Format::Bits bits;
  std::memcpy(&bits, row + i * sizeof(bits), sizeof(bits));
  return decode<Format>(bits);
}

template <class Format>
void store_as(std::byte* row, std::size_t i, float value) {
  const auto bits = encode<Format>(value);
  std::memcpy(row + i * sizeof(bits), &bits, sizeof(bits));
}

inline float load(Dtype dtype, const std::byte* row, std::size_t i) {
  switch (dtype) {
    case Dtype::kBf16:
      return load_as<Bf16>(row, i);
    case Dtype::kF16:
      return load_as<F16>(row, i);
    case Dtype::kF32:
      return load_as<F32>(row, i);
    case Dtype::kF8e4m3:
      return load_as<F8e4m3>(row, i);
    default:
      return load_as<F8e5m2>(row, i);
  }
}

inline void store(Dtype dtype, std::byte* row, std::size_t i, float value) {
  switch (dtype) {
    case Dtype::kBf16:
      return store_as<Bf16>(row, i, value);
    case Dtype::kF16:
      return store_as<F16>(row, i, value);
    case Dtype::kF32:
      return store_as<F32>(row, i, value);
    case Dtype::kF8e4m3:
      return store_as<F8e4m3>(row, i, value);
    default:
      return store_as<F8e5m2>(row, i, value);
  }
}

inline std::uint32_t random_bits(std::mt19937& random) {
  return static_cast<std::uint32_t>(random());
}

// Half of the elements are random codes (NaN, infinities, denormals, all exponents), half are near 1 so that sums
// round and tie, and some are exactly those that casts get wrong.
inline std::vector<std::byte> random_row(Dtype dtype, std::size_t n, std::mt19937& random) {
  std::vector<std::byte> row(bytes_of(dtype, n));
  for (std::byte& b : row)
    b = std::byte(random() & 0xFF);
  constexpr float kHard[] = {0.0f, -0.0f, 0x1p-25f, 0x1.8p-25f, 0x1p-10f, -0x1p-17f, 464.0f, 65520.0f, 61440.0f, 1e38f};
  for (std::size_t i = 0; i < n; ++i) {
    const auto kind = random() % 8;
    if (kind < 4) store(dtype, row.data(), i, float(int(random() % 4096) - 2048) * 0x1p-9f);
    if (kind == 4) store(dtype, row.data(), i, kHard[random() % std::size(kHard)]);
  }
  return row;
}

inline std::vector<std::byte> cast_by_definition(const std::vector<std::byte>& from, Dtype from_dtype, Dtype to_dtype) {
  const std::size_t n = from.size() / static_cast<std::size_t>(size_of(from_dtype));
  std::vector<std::byte> to(bytes_of(to_dtype, n));
  for (std::size_t i = 0; i < n; ++i)
    store(to_dtype, to.data(), i, load(from_dtype, from.data(), i));
  return to;
}

inline std::vector<std::byte> sum_by_definition(const RowSum& sum) {
  const auto n = static_cast<std::size_t>(sum.n);
  std::vector<std::byte> output(bytes_of(sum.output_dtype, n));
  for (std::size_t i = 0; i < n; ++i) {
    float total = 0.0f;
    for (const std::byte* row : sum.rows)
      total += load(sum.rows_dtype, row, i);
    for (const std::byte* bias : sum.biases)
      total += load(sum.output_dtype, bias, i);
    store(sum.output_dtype, output.data(), i, total);
  }
  return output;
}

// Runs a check once per instruction set that was compiled and that this machine has.
inline void on_every_target(const std::function<void()>& check) {
  std::set<std::size_t> entries;
  const std::vector<std::int64_t> targets = hwy::SupportedAndGeneratedTargets();
  for (const std::int64_t target : targets) {
    SCOPED_TRACE(hwy::TargetName(target));
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    entries.insert(hwy::GetChosenTarget().GetIndex());
    check();
    if (::testing::Test::HasFatalFailure()) break;
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().DeInit();
  if (!::testing::Test::HasFatalFailure()) {
    EXPECT_EQ(entries.size(), targets.size()) << "a target was not really chosen";
  }
}

inline std::vector<std::size_t> sizes() {
  std::vector<std::size_t> result;
  for (std::size_t n = 0; n <= 67; ++n)
    result.push_back(n);
  for (const std::size_t n : {127, 128, 129, 2880, 7171})
    result.push_back(n);
  return result;
}

}  // namespace tokenyard::engine::host
