// SPDX-License-Identifier: Apache-2.0
// The store's wire format: little-endian frames of a fixed header and a bounded payload. docs/store.md draws it; the
// golden bytes stand in the tests. Sizes are checked before anything is allocated for them.
// Thread rule: pure; a FrameReader is used by one thread at a time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tokenyard/group.h"

namespace tokenyard::group {

inline constexpr std::uint32_t kWireMagic = 0x44594B54;  // the bytes "TKYD"
inline constexpr std::uint16_t kWireVersion = 1;
inline constexpr std::size_t kHeaderBytes = 24;
inline constexpr std::size_t kMaxReasonBytes = 512;

enum class FrameType : std::uint16_t {
  kHello = 1,    // member to store: Hello
  kWelcome = 2,  // store to member, when all have come: the session's nonce, 8 bytes
  kRefused = 3,  // store to anyone: Refusal
  kGather = 4,   // member to store: its bytes for collective `sequence`
  kResult = 5,   // store to member: the bytes of rank `rank` for collective `sequence`
  kWho = 6,      // member to store: who is missing from collective `sequence`? I wait no longer. 0: joining
  kMissing = 7,  // store to member: the missing ranks, 4 bytes each
  kLost = 8,     // store to member: rank `rank` is gone, no collective will complete any more
};

// A set of frame types, to say what may come next.
[[nodiscard]] constexpr std::uint32_t type_bit(FrameType type) {
  return 1U << static_cast<unsigned>(type);
}

struct FrameHeader {
  FrameType type = FrameType::kHello;
  std::uint32_t rank = 0;
  std::uint32_t length = 0;
  std::uint64_t sequence = 0;
};

struct Frame {
  FrameHeader header;
  Bytes payload;
};

enum class WireFault : std::uint8_t { kNone, kMagic, kVersion, kType, kLength };

[[nodiscard]] std::string_view describe(WireFault fault);

// Writes `header` with its length, then `payload`.
void append_frame(Bytes& out, FrameHeader header, std::span<const std::byte> payload);
[[nodiscard]] Bytes make_frame(FrameHeader header, std::span<const std::byte> payload);

// Takes a stream apart. It may stop anywhere in a frame for as long as the peer likes.
class FrameReader {
 public:
  explicit FrameReader(std::uint32_t expected_types) : expected_types_(expected_types) {}

  void expect(std::uint32_t types) { expected_types_ = types; }

  // Takes bytes from the front of `data` until a frame is whole or `data` is used up. After a fault, takes nothing.
  [[nodiscard]] std::optional<Frame> feed(std::span<const std::byte>& data);

  [[nodiscard]] WireFault fault() const { return fault_; }

 private:
  [[nodiscard]] bool read_header(std::span<const std::byte>& data);

  std::uint32_t expected_types_;
  WireFault fault_ = WireFault::kNone;
  std::array<std::byte, kHeaderBytes> raw_header_{};
  std::size_t header_filled_ = 0;
  Frame frame_;
};

struct Hello {
  std::uint32_t num_ranks = 0;
  std::string name;
};

enum class RefusalCode : std::uint32_t {
  kMalformed = 1,   // not a frame, or not one that may come here
  kVersion = 2,     // another version of this format
  kName = 3,        // another group's name
  kSize = 4,        // another group size
  kRank = 5,        // no such rank
  kRankTaken = 6,   // may pass: the rank has a member, perhaps one that is about to go
  kEnded = 7,       // may pass: a member of this session is gone, perhaps a new session follows
  kTooFarAhead = 8  // answers a gather, which then does not count; the frame's `rank` is one that is behind
};

struct Refusal {
  RefusalCode code = RefusalCode::kMalformed;
  std::string reason;
};

[[nodiscard]] Bytes encode(const Hello& hello);
[[nodiscard]] std::optional<Hello> decode_hello(std::span<const std::byte> payload);
[[nodiscard]] Bytes encode(const Refusal& refusal);
[[nodiscard]] std::optional<Refusal> decode_refusal(std::span<const std::byte> payload);
[[nodiscard]] Bytes encode_nonce(std::uint64_t nonce);
[[nodiscard]] std::optional<std::uint64_t> decode_nonce(std::span<const std::byte> payload);
[[nodiscard]] Bytes encode_ranks(std::span<const int> ranks);
// Nothing unless every rank is below `num_ranks`.
[[nodiscard]] std::optional<std::vector<int>> decode_ranks(std::span<const std::byte> payload, int num_ranks);

}  // namespace tokenyard::group
