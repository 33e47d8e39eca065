// SPDX-License-Identifier: Apache-2.0
// Reads and writes safetensors files: a JSON header that names tensors, then their bytes.
//
// The reader trusts nothing in the file: every length and offset is checked before it is used, and what is wrong is an
// Error(kInvalidArgument) that names the file. Tensors of a loaded file own their memory, so they are aligned for their
// dtype wherever the file put them. Thread rule: values; one loaded file may be read from many threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tokenyard/tensor.h"

namespace tokenyard::cli {

inline constexpr std::uint64_t kMaxSafetensorsHeaderBytes = 100'000'000;

struct StoredTensor {
  Dtype dtype = Dtype::kU8;
  std::vector<std::int64_t> shape;
  std::vector<std::byte> bytes;

  // Throws kInvalidArgument for a shape that a TensorView cannot have (no dimension, or more than kMaxDims).
  [[nodiscard]] TensorView view() const;
};

class Safetensors {
 public:
  // `label` stands for the file in messages.
  static Safetensors parse(std::span<const std::byte> file, std::string_view label);
  static Safetensors load(const std::filesystem::path& path);

  [[nodiscard]] const std::map<std::string, StoredTensor>& tensors() const { return tensors_; }

  // Throws kInvalidArgument that lists the names there are.
  [[nodiscard]] const StoredTensor& at(const std::string& name) const;

 private:
  std::string label_;
  std::map<std::string, StoredTensor> tensors_;
};

struct NamedTensor {
  std::string name;
  TensorView view;
};

// Writes contiguous CPU tensors. The file appears whole or not at all.
void write_safetensors(const std::filesystem::path& path, std::span<const NamedTensor> tensors);

}  // namespace tokenyard::cli
