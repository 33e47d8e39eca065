// SPDX-License-Identifier: Apache-2.0
#include "cli/safetensors.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <fstream>
#include <limits>
#include <optional>
#include <set>
#include <system_error>
#include <utility>

#include <nlohmann/json.hpp>

#include "tokenyard/error.h"

namespace tokenyard::cli {
namespace {

using Json = nlohmann::json;

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian and read as they are");

constexpr std::uint64_t kLengthBytes = 8;
// The deepest legal value is an array in a tensor's entry in the header.
constexpr int kMaxJsonDepth = 3;

struct DtypeName {
  std::string_view name;
  Dtype dtype;
};

constexpr std::array<DtypeName, 9> kDtypeNames{{{"BF16", Dtype::kBf16},
                                                {"F16", Dtype::kF16},
                                                {"F32", Dtype::kF32},
                                                {"F8_E4M3", Dtype::kF8e4m3},
                                                {"F8_E5M2", Dtype::kF8e5m2},
                                                {"F8_E8M0", Dtype::kE8m0},
                                                {"U8", Dtype::kU8},
                                                {"I32", Dtype::kI32},
                                                {"I64", Dtype::kI64}}};

[[noreturn]] void refuse(std::string_view label, const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, fmt::format("{}: {}", label, what));
}

// Loops and not std::views, which clang-tidy 14 cannot read in libstdc++.
std::string known_dtypes() {
  std::vector<std::string_view> names;
  names.reserve(kDtypeNames.size());
  for (const DtypeName& known : kDtypeNames)
    names.push_back(known.name);
  return fmt::format("{}", fmt::join(names, ", "));
}

std::string names_of(const std::map<std::string, StoredTensor>& tensors) {
  std::vector<std::string_view> names;
  names.reserve(tensors.size());
  for (const auto& [name, unused] : tensors)
    names.push_back(name);
  return fmt::format("{}", fmt::join(names, ", "));
}

Dtype parse_dtype(std::string_view name, std::string_view label, std::string_view tensor) {
  const auto* found = std::ranges::find(kDtypeNames, name, &DtypeName::name);
  if (found == kDtypeNames.end()) {
    refuse(label, fmt::format("tensor \"{}\" has dtype \"{}\"; known are {}", tensor, name, known_dtypes()));
  }
  return found->dtype;
}

// Refuses keys given twice, of which a JSON object silently keeps one, and nesting that no header has.
class HeaderGuard {
 public:
  explicit HeaderGuard(std::string_view label) : label_(label) {}

  bool operator()(int depth, Json::parse_event_t event, Json& parsed) {
    if (depth > kMaxJsonDepth) refuse(label_, fmt::format("header is nested deeper than {} levels", kMaxJsonDepth));
    if (event == Json::parse_event_t::object_start) keys_.emplace_back();
    if (event == Json::parse_event_t::object_end) keys_.pop_back();
    if (event == Json::parse_event_t::key) {
      const auto& key = parsed.get_ref<const std::string&>();
      if (!keys_.back().insert(key).second) refuse(label_, fmt::format("header has key \"{}\" twice", key));
    }
    return true;
  }

 private:
  std::string_view label_;
  std::vector<std::set<std::string>> keys_;
};

Json parse_header(std::span<const std::byte> file, std::string_view label) {
  if (file.size() < kLengthBytes) {
    refuse(label, fmt::format("is {} bytes long; a safetensors file has at least {}", file.size(), kLengthBytes));
  }
  std::uint64_t length = 0;
  std::memcpy(&length, file.data(), sizeof length);
  if (length > kMaxSafetensorsHeaderBytes) {
    refuse(label,
           fmt::format("says its header is {} bytes long; at most {} are read", length, kMaxSafetensorsHeaderBytes));
  }
  if (length > file.size() - kLengthBytes) {
    refuse(label, fmt::format("says its header is {} bytes long, and {} bytes follow: the file is cut short", length,
                              file.size() - kLengthBytes));
  }
  const auto* text = reinterpret_cast<const char*>(file.data() + kLengthBytes);
  Json header;
  try {
    header = Json::parse(text, text + length, HeaderGuard(label));
  } catch (const Json::exception& error) {
    refuse(label, fmt::format("header is not valid JSON: {}", error.what()));
  }
  if (!header.is_object()) refuse(label, "header is not a JSON object");
  return header;
}

const Json& field(const Json& entry, const char* key, std::string_view label, std::string_view tensor) {
  const auto found = entry.find(key);
  if (found == entry.end()) refuse(label, fmt::format("tensor \"{}\" has no \"{}\"", tensor, key));
  return *found;
}

std::vector<std::uint64_t> unsigned_array(const Json& value, std::string_view label, const std::string& what) {
  const bool fits =
      value.is_array() && std::ranges::all_of(value, [](const Json& v) { return v.is_number_unsigned(); });
  if (!fits) refuse(label, fmt::format("{} is {}; an array of non-negative integers is right", what, value.dump()));
  return value.get<std::vector<std::uint64_t>>();
}

// Bytes of a tensor, or nothing when they do not fit into 63 bits.
std::optional<std::uint64_t> tensor_bytes(std::span<const std::uint64_t> shape, std::uint64_t element_bytes) {
  std::uint64_t bytes = element_bytes;
  bool empty = false;
  for (const std::uint64_t extent : shape) {
    if (extent > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) return std::nullopt;
    empty = empty || extent == 0;
    if (extent != 0 && bytes > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()) / extent) {
      return std::nullopt;
    }
    bytes *= std::max<std::uint64_t>(extent, 1);
  }
  return empty ? 0 : bytes;
}

struct Extent {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::string name;
};

struct Entry {
  Extent extent;
  StoredTensor tensor;  // without bytes
};

Entry parse_entry(const std::string& name, const Json& entry, std::uint64_t data_bytes, std::string_view label) {
  if (!entry.is_object()) refuse(label, fmt::format("tensor \"{}\" is not described by an object", name));
  const Json& dtype = field(entry, "dtype", label, name);
  if (!dtype.is_string()) refuse(label, fmt::format("tensor \"{}\" has a dtype that is no string", name));
  Entry result;
  result.tensor.dtype = parse_dtype(dtype.get_ref<const std::string&>(), label, name);

  const auto shape =
      unsigned_array(field(entry, "shape", label, name), label, fmt::format("shape of tensor \"{}\"", name));
  const auto offsets =
      unsigned_array(field(entry, "data_offsets", label, name), label, fmt::format("data_offsets of \"{}\"", name));
  if (offsets.size() != 2 || offsets[0] > offsets[1] || offsets[1] > data_bytes) {
    refuse(label, fmt::format("tensor \"{}\" has data_offsets [{}]; two rising numbers up to {} are right", name,
                              fmt::join(offsets, ", "), data_bytes));
  }
  const auto bytes = tensor_bytes(shape, static_cast<std::uint64_t>(size_of(result.tensor.dtype)));
  if (!bytes)
    refuse(label, fmt::format("tensor \"{}\" has shape [{}], which is too large", name, fmt::join(shape, ", ")));
  if (*bytes != offsets[1] - offsets[0]) {
    refuse(label,
           fmt::format("tensor \"{}\" has shape [{}] of {}, which is {} bytes, and data_offsets that span {}", name,
                       fmt::join(shape, ", "), tokenyard::name(result.tensor.dtype), *bytes, offsets[1] - offsets[0]));
  }
  result.extent = {.begin = offsets[0], .end = offsets[1], .name = name};
  result.tensor.shape.assign(shape.begin(), shape.end());
  return result;
}

// The format allows neither overlaps nor holes, so that a file has one meaning and no hidden bytes.
void check_extents(std::vector<Extent> extents, std::uint64_t data_bytes, std::string_view label) {
  std::ranges::sort(extents, {}, [](const Extent& e) { return std::pair(e.begin, e.end); });
  std::uint64_t covered = 0;
  for (const Extent& extent : extents) {
    if (extent.begin < covered) refuse(label, fmt::format("tensor \"{}\" overlaps the one before it", extent.name));
    if (extent.begin > covered) {
      refuse(label, fmt::format("bytes {} to {} belong to no tensor", covered, extent.begin));
    }
    covered = extent.end;
  }
  if (covered != data_bytes) {
    refuse(label, fmt::format("bytes {} to {} belong to no tensor", covered, data_bytes));
  }
}

}  // namespace

TensorView StoredTensor::view() const {
  if (shape.empty() || shape.size() > kMaxDims) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("a tensor of {} dimensions; 1 to {} are right", shape.size(), kMaxDims));
  }
  // Views are not const by type; whoever takes one as input does not write it.
  return {const_cast<std::byte*>(bytes.data()), dtype, std::span<const std::int64_t>(shape)};
}

Safetensors Safetensors::parse(std::span<const std::byte> file, std::string_view label) {
  const Json header = parse_header(file, label);
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, file.data(), sizeof header_bytes);
  const auto data = file.subspan(kLengthBytes + header_bytes);

  Safetensors result;
  result.label_ = label;
  std::vector<Extent> extents;
  std::vector<Entry> entries;
  for (const auto& [name, value] : header.items()) {
    if (name == "__metadata__") continue;
    entries.push_back(parse_entry(name, value, data.size(), label));
    extents.push_back(entries.back().extent);
  }
  check_extents(std::move(extents), data.size(), label);
  for (Entry& entry : entries) {
    const auto bytes = data.subspan(entry.extent.begin, entry.extent.end - entry.extent.begin);
    entry.tensor.bytes.assign(bytes.begin(), bytes.end());
    result.tensors_.emplace(std::move(entry.extent.name), std::move(entry.tensor));
  }
  return result;
}

Safetensors Safetensors::load(const std::filesystem::path& path) {
  const std::string label = path.string();
  std::error_code error;
  const auto size = std::filesystem::file_size(path, error);
  if (error) refuse(label, fmt::format("cannot be read: {}", error.message()));
  std::vector<std::byte> bytes(size);
  std::ifstream stream(path, std::ios::binary);
  stream.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(size));
  if (!stream) refuse(label, fmt::format("cannot be read: {} of {} bytes came", stream.gcount(), size));
  return parse(bytes, label);
}

const StoredTensor& Safetensors::at(const std::string& name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) {
    refuse(label_, fmt::format("has no tensor \"{}\"; it has {}", name, names_of(tensors_)));
  }
  return found->second;
}

void write_safetensors(const std::filesystem::path& path, std::span<const NamedTensor> tensors) {
  // Wide elements first: every tensor is then aligned for its dtype.
  std::vector<NamedTensor> sorted(tensors.begin(), tensors.end());
  std::ranges::stable_sort(sorted, std::greater{}, [](const NamedTensor& t) { return size_of(t.view.dtype); });

  Json header = Json::object();
  std::int64_t offset = 0;
  for (const auto& [name, view] : sorted) {
    if (!view.defined() || !view.contiguous() || view.device.kind != DeviceKind::kCpu || header.contains(name)) {
      refuse(path.string(), fmt::format("tensor \"{}\" is {}; contiguous CPU tensors with names of their own are right",
                                        name, view.describe()));
    }
    const auto* dtype = std::ranges::find(kDtypeNames, view.dtype, &DtypeName::dtype);
    const std::int64_t end = offset + view.num_elements() * size_of(view.dtype);
    header[name] = {{"dtype", dtype->name},
                    {"shape", std::vector(view.shape.begin(), view.shape.begin() + view.num_dims)},
                    {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = header.dump();
  text.resize((text.size() + kLengthBytes - 1) / kLengthBytes * kLengthBytes, ' ');

  std::filesystem::path unfinished = path;
  unfinished += ".part";
  std::ofstream stream(unfinished, std::ios::binary | std::ios::trunc);
  const std::uint64_t length = text.size();
  stream.write(reinterpret_cast<const char*>(&length), sizeof length);
  stream.write(text.data(), static_cast<std::streamsize>(text.size()));
  for (const auto& [name, view] : sorted) {
    stream.write(view.as<const char>(), static_cast<std::streamsize>(view.num_elements() * size_of(view.dtype)));
  }
  stream.close();
  std::error_code error;
  if (stream) std::filesystem::rename(unfinished, path, error);
  if (!stream || error) {
    std::error_code ignored;
    std::filesystem::remove(unfinished, ignored);
    throw Error(ErrorCode::kSystem, fmt::format("{}: cannot be written{}{}", path.string(), error ? ": " : "",
                                                error ? error.message() : ""));
  }
}

}  // namespace tokenyard::cli
