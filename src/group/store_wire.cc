// SPDX-License-Identifier: Apache-2.0
#include "group/store_wire.h"

#include <algorithm>

namespace tokenyard::group {

namespace {

constexpr std::size_t kMaxHelloName = 64;

template <class Integer>
void put(Bytes& out, Integer value) {
  for (std::size_t i = 0; i < sizeof(Integer); ++i) {
    out.push_back(static_cast<std::byte>((value >> (8 * i)) & 0xFFU));
  }
}

template <class Integer>
Integer get(std::span<const std::byte> bytes, std::size_t offset) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < sizeof(Integer); ++i) {
    value |= std::to_integer<std::uint64_t>(bytes[offset + i]) << (8 * i);
  }
  return static_cast<Integer>(value);
}

std::string text_of(std::span<const std::byte> bytes) {
  std::string text(bytes.size(), '\0');
  std::transform(bytes.begin(), bytes.end(), text.begin(), [](std::byte b) { return static_cast<char>(b); });
  return text;
}

void put_text(Bytes& out, std::string_view text) {
  for (const char c : text)
    out.push_back(static_cast<std::byte>(c));
}

// Nothing for a type that does not exist.
std::optional<std::size_t> max_payload(std::uint16_t type) {
  switch (static_cast<FrameType>(type)) {
    case FrameType::kHello:
      return 4 + kMaxHelloName;
    case FrameType::kWelcome:
      return 8;
    case FrameType::kRefused:
      return 4 + kMaxReasonBytes;
    case FrameType::kGather:
    case FrameType::kResult:
      return static_cast<std::size_t>(Group::kMaxGatherBytes);
    case FrameType::kWho:
    case FrameType::kLost:
      return 0;
    case FrameType::kMissing:
      return 4 * static_cast<std::size_t>(Group::kMaxRanks);
  }
  return std::nullopt;
}

}  // namespace

std::string_view describe(WireFault fault) {
  switch (fault) {
    case WireFault::kNone:
      return "no fault";
    case WireFault::kMagic:
      return "it does not begin with the magic bytes TKYD";
    case WireFault::kVersion:
      return "its version is not 1";
    case WireFault::kType:
      return "a frame of its type may not come here";
    case WireFault::kLength:
      return "its payload is longer than its type allows";
  }
  return "unknown fault";
}

void append_frame(Bytes& out, FrameHeader header, std::span<const std::byte> payload) {
  out.reserve(out.size() + kHeaderBytes + payload.size());
  put(out, kWireMagic);
  put(out, kWireVersion);
  put(out, static_cast<std::uint16_t>(header.type));
  put(out, header.rank);
  put(out, static_cast<std::uint32_t>(payload.size()));
  put(out, header.sequence);
  out.insert(out.end(), payload.begin(), payload.end());
}

Bytes make_frame(FrameHeader header, std::span<const std::byte> payload) {
  Bytes out;
  append_frame(out, header, payload);
  return out;
}

bool FrameReader::read_header(std::span<const std::byte>& data) {
  const std::size_t take = std::min(data.size(), kHeaderBytes - header_filled_);
  std::copy_n(data.begin(), take, raw_header_.begin() + static_cast<std::ptrdiff_t>(header_filled_));
  data = data.subspan(take);
  header_filled_ += take;
  // A stranger's first bytes are judged as soon as they are here: it may never send a whole header.
  if (header_filled_ >= 4 && get<std::uint32_t>(raw_header_, 0) != kWireMagic) fault_ = WireFault::kMagic;
  if (fault_ != WireFault::kNone || header_filled_ < kHeaderBytes) return false;
  const auto type = get<std::uint16_t>(raw_header_, 6);
  const std::optional<std::size_t> limit = max_payload(type);
  frame_.header = {.type = static_cast<FrameType>(type),
                   .rank = get<std::uint32_t>(raw_header_, 8),
                   .length = get<std::uint32_t>(raw_header_, 12),
                   .sequence = get<std::uint64_t>(raw_header_, 16)};
  if (get<std::uint16_t>(raw_header_, 4) != kWireVersion) {
    fault_ = WireFault::kVersion;
  } else if (!limit || (expected_types_ & type_bit(frame_.header.type)) == 0) {
    fault_ = WireFault::kType;
  } else if (frame_.header.length > *limit) {
    fault_ = WireFault::kLength;
  }
  return fault_ == WireFault::kNone;
}

std::optional<Frame> FrameReader::feed(std::span<const std::byte>& data) {
  if (fault_ != WireFault::kNone) return std::nullopt;
  if (header_filled_ < kHeaderBytes) {
    if (data.empty() || !read_header(data)) return std::nullopt;
    frame_.payload.reserve(frame_.header.length);
  }
  const std::size_t take = std::min<std::size_t>(data.size(), frame_.header.length - frame_.payload.size());
  const auto part = data.first(take);
  frame_.payload.insert(frame_.payload.end(), part.begin(), part.end());
  data = data.subspan(take);
  if (frame_.payload.size() < frame_.header.length) return std::nullopt;
  header_filled_ = 0;
  Frame whole = std::move(frame_);
  frame_ = Frame{};
  return whole;
}

Bytes encode(const Hello& hello) {
  Bytes out;
  put(out, hello.num_ranks);
  put_text(out, hello.name);
  return out;
}

std::optional<Hello> decode_hello(std::span<const std::byte> payload) {
  if (payload.size() < 4) return std::nullopt;
  return Hello{.num_ranks = get<std::uint32_t>(payload, 0), .name = text_of(payload.subspan(4))};
}

Bytes encode(const Refusal& refusal) {
  Bytes out;
  put(out, static_cast<std::uint32_t>(refusal.code));
  put_text(out, std::string_view(refusal.reason).substr(0, kMaxReasonBytes));
  return out;
}

std::optional<Refusal> decode_refusal(std::span<const std::byte> payload) {
  if (payload.size() < 4) return std::nullopt;
  return Refusal{.code = static_cast<RefusalCode>(get<std::uint32_t>(payload, 0)),
                 .reason = text_of(payload.subspan(4))};
}

Bytes encode_nonce(std::uint64_t nonce) {
  Bytes out;
  put(out, nonce);
  return out;
}

std::optional<std::uint64_t> decode_nonce(std::span<const std::byte> payload) {
  if (payload.size() != 8) return std::nullopt;
  return get<std::uint64_t>(payload, 0);
}

Bytes encode_ranks(std::span<const int> ranks) {
  Bytes out;
  for (const int rank : ranks)
    put(out, static_cast<std::uint32_t>(rank));
  return out;
}

std::optional<std::vector<int>> decode_ranks(std::span<const std::byte> payload, int num_ranks) {
  if (payload.size() % 4 != 0) return std::nullopt;
  std::vector<int> ranks;
  for (std::size_t offset = 0; offset < payload.size(); offset += 4) {
    const auto rank = get<std::uint32_t>(payload, offset);
    if (rank >= static_cast<std::uint32_t>(num_ranks)) return std::nullopt;
    ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

}  // namespace tokenyard::group
