// SPDX-License-Identifier: Apache-2.0
// The safetensors reader. Half of the inputs are files as they stand: an Error, or tensors that account for every byte
// and give the same tensors again when written anew. The other half are files that are made here from the bytes: they
// must be read as they were made, and refused once one thing about them is wrong.
#include <unistd.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "tokenyard/error.h"

#include "cli/safetensors.h"
#include "fuzz/input.h"
#include "fuzz/target.h"
#include "support/check.h"

namespace tokenyard::fuzz {
namespace {

using cli::Safetensors;
using cli::StoredTensor;
using support::check;
using support::check_eq;

struct Kind {
  std::string_view name;
  std::int64_t bytes;
};

constexpr std::array<Kind, 9> kKinds{{{"BF16", 2},
                                      {"F16", 2},
                                      {"F32", 4},
                                      {"F8_E4M3", 1},
                                      {"F8_E5M2", 1},
                                      {"F8_E8M0", 1},
                                      {"U8", 1},
                                      {"I32", 4},
                                      {"I64", 8}}};

std::int64_t bytes_of(const StoredTensor& tensor) {
  std::int64_t bytes = size_of(tensor.dtype);
  for (const std::int64_t extent : tensor.shape) {
    check(extent >= 0, "an extent is negative");
    bytes *= extent == 0 ? 1 : extent;
  }
  for (const std::int64_t extent : tensor.shape)
    bytes = extent == 0 ? 0 : bytes;
  return bytes;
}

// A folder of this process, in memory where the system has such a place.
const std::filesystem::path& scratch() {
  static const std::filesystem::path path = [] {
    const std::filesystem::path memory = "/dev/shm";
    const auto base = std::filesystem::is_directory(memory) ? memory : std::filesystem::temp_directory_path();
    return base / ("tokenyard-fuzz-" + std::to_string(getpid()) + ".safetensors");
  }();
  return path;
}

// What was read, written and read again, is the same.
void check_round_trip(const Safetensors& file) {
  std::vector<cli::NamedTensor> tensors;
  for (const auto& [name, tensor] : file.tensors()) {
    if (tensor.shape.empty() || tensor.shape.size() > kMaxDims) {
      support::check(tensor.bytes.size() == static_cast<std::size_t>(bytes_of(tensor)), "bytes of a tensor");
      continue;  // no TensorView has such a shape
    }
    tensors.push_back({name, tensor.view()});
  }
  cli::write_safetensors(scratch(), tensors);
  const Safetensors again = Safetensors::load(scratch());
  std::filesystem::remove(scratch());
  check_eq(again.tensors().size(), tensors.size(), "tensors after writing");
  for (const auto& [name, view] : tensors) {
    const StoredTensor& before = file.at(name);
    const StoredTensor& after = again.at(name);
    check(before.dtype == after.dtype && before.shape == after.shape && before.bytes == after.bytes,
          "tensor \"" + name + "\" changed on its way through a file");
  }
}

void try_file(std::span<const std::byte> bytes) {
  try {
    const Safetensors file = Safetensors::parse(bytes, "fuzz");
    std::int64_t used = 0;
    for (const auto& [name, tensor] : file.tensors()) {
      check_eq(static_cast<std::int64_t>(tensor.bytes.size()), bytes_of(tensor), "bytes of " + name);
      used += bytes_of(tensor);
    }
    std::uint64_t header = 0;
    std::memcpy(&header, bytes.data(), sizeof header);
    check_eq(static_cast<std::uint64_t>(used), bytes.size() - sizeof header - header, "bytes of all tensors");
    if (!file.tensors().empty()) check_round_trip(file);
  } catch (const Error& error) {
    check(error.code() == ErrorCode::kInvalidArgument, "a bad file is an invalid argument");
    check(std::string_view(error.what()).starts_with("fuzz: "), "the message does not name the file");
  }
}

struct Made {
  std::string name;
  Kind kind{};
  std::vector<std::int64_t> shape;
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

// Names that JSON must escape among them; the number keeps them apart.
std::string draw_name(Input& input, int index) {
  constexpr std::array<std::string_view, 6> kParts{"", "layer.", "\"", "\\", "\n", "\xC3\xA9"};
  return std::string(input.pick(kParts)) + std::string(input.pick(kParts)) + std::to_string(index);
}

std::string json_text(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c == '\n' ? "\\n" : std::string(1, c);
  }
  return out + '"';
}

std::vector<Made> draw_tensors(Input& input) {
  std::vector<Made> tensors;
  const auto count = static_cast<int>(1 + input.below(5));
  std::int64_t at = 0;
  for (int i = 0; i < count; ++i) {
    Made made{.name = draw_name(input, i), .kind = input.pick(kKinds), .shape = {}, .begin = at, .end = 0};
    std::int64_t bytes = made.kind.bytes;
    for (auto left = input.below(5); left > 0; --left) {
      made.shape.push_back(input.below(5));
      bytes *= made.shape.back();
    }
    at += bytes;
    made.end = at;
    tensors.push_back(std::move(made));
  }
  return tensors;
}

std::string entry_of(const Made& made) {
  std::string shape;
  for (const std::int64_t extent : made.shape)
    shape += (shape.empty() ? "" : ", ") + std::to_string(extent);
  return json_text(made.name) + ":{\"dtype\":\"" + std::string(made.kind.name) + "\",\"shape\":[" + shape +
         "],\"data_offsets\":[" + std::to_string(made.begin) + "," + std::to_string(made.end) + "]}";
}

std::string header_of(const std::vector<Made>& tensors, bool backwards) {
  std::string header;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Made& made = tensors[backwards ? tensors.size() - 1 - i : i];
    header.append(header.empty() ? "{" : ",").append(entry_of(made));
  }
  return header + "}";
}

std::vector<std::byte> file_of(const std::string& header, std::int64_t data_bytes) {
  const std::uint64_t length = header.size();
  std::vector<std::byte> file(sizeof length + header.size() + static_cast<std::size_t>(data_bytes));
  std::memcpy(file.data(), &length, sizeof length);
  std::memcpy(file.data() + sizeof length, header.data(), header.size());
  for (std::int64_t i = 0; i < data_bytes; ++i)
    file[file.size() - static_cast<std::size_t>(data_bytes - i)] = static_cast<std::byte>(i * 7 + 3);
  return file;
}

void check_read(const std::vector<Made>& tensors, std::span<const std::byte> bytes, std::int64_t data_bytes) {
  const Safetensors file = Safetensors::parse(bytes, "fuzz");
  check_eq(file.tensors().size(), tensors.size(), "tensors of a good file");
  for (const Made& made : tensors) {
    const StoredTensor& tensor = file.at(made.name);
    check_eq(size_of(tensor.dtype), made.kind.bytes, "bytes of an element");
    support::check_lists_eq(tensor.shape, made.shape, "shape");
    const auto data = bytes.last(static_cast<std::size_t>(data_bytes));
    support::check_bytes(
        tensor.bytes.data(),
        data.subspan(static_cast<std::size_t>(made.begin), static_cast<std::size_t>(made.end - made.begin)),
        "bytes of a tensor");
    check_eq(static_cast<std::int64_t>(tensor.bytes.size()), made.end - made.begin, "size of a tensor");
  }
  check_round_trip(file);
}

// Makes one thing about the file wrong.
std::vector<std::byte> spoiled(Input& input, std::vector<Made> tensors, std::int64_t data_bytes) {
  Made& made = tensors[static_cast<std::size_t>(input.below(std::ssize(tensors)))];
  const std::int64_t change = 1 + input.below(8);
  std::string header;
  switch (input.below(8)) {
    case 0:
      made.begin += change;
      break;
    case 1:
      made.end += change;
      break;
    case 2:
      made.shape.push_back(1 + change);
      if (made.begin == made.end) made.end += 1;
      break;
    case 3:
      made.kind.name = "F64";
      break;
    case 4:
      data_bytes += change;
      break;
    case 5:
      tensors.push_back(made);  // the same name twice
      break;
    case 6:
      header = header_of(tensors, false) + "}";
      break;
    default: {
      auto file = file_of(header_of(tensors, false), data_bytes);
      file.resize(static_cast<std::size_t>(input.below(std::ssize(file))));
      return file;
    }
  }
  return file_of(header.empty() ? header_of(tensors, false) : header, data_bytes);
}

void check_refused(std::span<const std::byte> bytes) {
  bool refused = false;
  try {
    (void)Safetensors::parse(bytes, "fuzz");
  } catch (const Error& error) {
    refused = error.code() == ErrorCode::kInvalidArgument;
  }
  check(refused, "a spoiled file is read");
}

}  // namespace

void run_target(std::span<const std::byte> bytes) {
  // The length of a header, in the first eight bytes of a file, is never so large: these inputs stand for made files.
  if (bytes.size() < 8 || bytes[7] != std::byte{0xFF}) {
    try_file(bytes);
    return;
  }
  Input input(bytes.subspan(8));
  const bool backwards = input.flip();
  const std::vector<Made> tensors = draw_tensors(input);
  const std::int64_t data_bytes = tensors.back().end;
  check_read(tensors, file_of(header_of(tensors, backwards), data_bytes), data_bytes);
  check_refused(spoiled(input, tensors, data_bytes));
}

}  // namespace tokenyard::fuzz
