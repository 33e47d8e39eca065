// SPDX-License-Identifier: Apache-2.0
// The store's wire format. Any bytes: the reader finds the frames and the fault that a plain reading of docs/store.md
// finds, however the stream is cut. Any frames: what is written is read back, byte for byte.
#include <algorithm>
#include <string>
#include <vector>

#include "fuzz/input.h"
#include "fuzz/target.h"
#include "group/store_session.h"
#include "group/store_wire.h"
#include "support/check.h"

namespace tokenyard::fuzz {
namespace {

using group::Frame;
using group::FrameReader;
using group::FrameType;
using group::WireFault;
using support::check;
using support::check_eq;

std::uint64_t number_at(std::span<const std::byte> bytes, std::size_t at, std::size_t width) {
  std::uint64_t value = 0;
  for (std::size_t i = width; i-- > 0;)
    value = value * 256 + std::to_integer<std::uint64_t>(bytes[at + i]);
  return value;
}

struct Reading {
  std::vector<Frame> frames;
  WireFault fault = WireFault::kNone;
};

// The table of docs/store.md; -1 for a type that it does not have.
std::int64_t longest_payload(std::uint64_t type) {
  constexpr std::array<std::int64_t, 9> kLongest{-1, 68, 8, 516, 1 << 20, 1 << 20, 0, 4096, 0};
  return type < kLongest.size() ? kLongest[type] : -1;
}

Reading read_plainly(std::span<const std::byte> bytes, std::uint32_t expected) {
  Reading reading;
  while (bytes.size() >= 4) {
    if (number_at(bytes, 0, 4) != 0x44594B54) return {reading.frames, WireFault::kMagic};
    if (bytes.size() < 24) break;
    const std::uint64_t type = number_at(bytes, 6, 2);
    const std::uint64_t length = number_at(bytes, 12, 4);
    const std::int64_t longest = longest_payload(type);
    if (number_at(bytes, 4, 2) != 1) return {reading.frames, WireFault::kVersion};
    if (longest < 0 || ((expected >> type) & 1U) == 0) return {reading.frames, WireFault::kType};
    if (length > static_cast<std::uint64_t>(longest)) return {reading.frames, WireFault::kLength};
    if (bytes.size() - 24 < length) break;
    Frame& frame = reading.frames.emplace_back();
    frame.header = {.type = static_cast<FrameType>(type),
                    .rank = static_cast<std::uint32_t>(number_at(bytes, 8, 4)),
                    .length = static_cast<std::uint32_t>(length),
                    .sequence = number_at(bytes, 16, 8)};
    const auto payload = bytes.subspan(24, length);
    frame.payload.assign(payload.begin(), payload.end());
    bytes = bytes.subspan(24 + length);
  }
  return reading;
}

void check_frame(const Frame& frame, const Frame& expected, const std::string& what) {
  check(frame.header.type == expected.header.type, what + ": its type");
  check_eq(frame.header.rank, expected.header.rank, what + ": its rank");
  check_eq(frame.header.length, expected.header.length, what + ": its length");
  check_eq(frame.header.sequence, expected.header.sequence, what + ": its sequence");
  check(frame.payload == expected.payload, what + ": its payload");
}

// Feeds the stream in pieces of the sizes that `cuts` says, again and again.
void check_reading(std::span<const std::byte> stream, std::span<const std::byte> cuts, std::uint32_t expected_types) {
  const Reading expected = read_plainly(stream, expected_types);
  FrameReader reader(expected_types);
  std::size_t count = 0;
  for (std::size_t piece = 0; !stream.empty(); ++piece) {
    const std::size_t wanted =
        cuts.empty() ? stream.size() : 1 + std::to_integer<std::size_t>(cuts[piece % cuts.size()]);
    std::span<const std::byte> data = stream.first(std::min(wanted, stream.size()));
    stream = stream.subspan(data.size());
    while (!data.empty() && reader.fault() == WireFault::kNone) {
      const std::size_t before = data.size();
      const auto frame = reader.feed(data);
      check(data.size() < before, "the reader takes nothing and goes on");
      if (!frame) continue;
      check(count < expected.frames.size(), "more frames than the stream holds");
      check_frame(*frame, expected.frames[count], "frame " + std::to_string(count));
      ++count;
    }
  }
  check_eq(count, expected.frames.size(), "frames");
  check(reader.fault() == expected.fault,
        "fault: got " + std::string(describe(reader.fault())) + ", expected " + std::string(describe(expected.fault)));
}

// What a payload says, said again, is the same payload.
void check_payload(std::span<const std::byte> payload, int num_ranks) {
  const Bytes bytes(payload.begin(), payload.end());
  const auto hello = group::decode_hello(payload);
  check_eq(hello.has_value(), payload.size() >= 4, "whether it is a hello");
  if (hello) check(encode(*hello) == bytes, "a hello changed");
  const auto refusal = group::decode_refusal(payload);
  check_eq(refusal.has_value(), payload.size() >= 4, "whether it is a refusal");
  if (refusal && payload.size() <= 516) check(encode(*refusal) == bytes, "a refusal changed");
  if (refusal) check(encode(*refusal).size() <= 516, "a refusal is longer than its frame may be");
  const auto nonce = group::decode_nonce(payload);
  check_eq(nonce.has_value(), payload.size() == 8, "whether it is a nonce");
  if (nonce) check(group::encode_nonce(*nonce) == bytes, "a nonce changed");
  bool all_ranks = payload.size() % 4 == 0;
  for (std::size_t at = 0; all_ranks && at < payload.size(); at += 4)
    all_ranks = number_at(payload, at, 4) < static_cast<std::uint64_t>(num_ranks);
  const auto ranks = group::decode_ranks(payload, num_ranks);
  check_eq(ranks.has_value(), all_ranks, "whether they are ranks");
  if (ranks) check(group::encode_ranks(*ranks) == bytes, "ranks changed");
}

Bytes draw_stream(Input& input) {
  Bytes stream;
  while (!input.empty()) {
    group::FrameHeader header{.type = static_cast<FrameType>(1 + input.below(8)),
                              .rank = input.take<std::uint32_t>(),
                              .sequence = input.take<std::uint64_t>()};
    const std::int64_t longest = longest_payload(static_cast<std::uint64_t>(header.type));
    const auto payload =
        input.take_bytes(static_cast<std::size_t>(input.below(std::min<std::int64_t>(longest, 300) + 1)));
    const std::size_t before = stream.size();
    append_frame(stream, header, payload);
    header.length = static_cast<std::uint32_t>(payload.size());
    const Reading reading = read_plainly(std::span(stream).subspan(before), 0x1FE);
    check_eq(reading.frames.size(), std::size_t{1}, "frames in what was written");
    check_frame(reading.frames[0], {header, Bytes(payload.begin(), payload.end())}, "what was written");
  }
  return stream;
}

// Strangers and members talk to a store: whatever they say, what it answers are frames that a member may read.
void check_session(Input& input) {
  const int num_ranks = static_cast<int>(1 + input.below(3));
  group::StoreSession session({.name = "fuzz", .num_ranks = num_ranks, .nonce = 7});
  std::vector<group::Reply> replies;
  std::vector<bool> gone(4, false);
  while (!input.empty()) {
    const auto from = static_cast<group::ConnectionId>(input.below(4));
    if (gone[from]) {
      (void)input.take<std::uint8_t>();
      continue;
    }
    replies.clear();
    const std::uint32_t expected = session.expected_types(from);
    Frame frame;
    frame.header = {.type = static_cast<FrameType>(1 + input.below(8)),
                    .rank = input.flip() ? static_cast<std::uint32_t>(from) : input.take<std::uint32_t>(),
                    .sequence = static_cast<std::uint64_t>(input.below(20))};
    if (frame.header.type == FrameType::kHello && input.flip()) {
      frame.payload = encode(group::Hello{.num_ranks = static_cast<std::uint32_t>(num_ranks), .name = "fuzz"});
    } else {
      const auto payload = input.take_bytes(static_cast<std::size_t>(input.below(9)));
      frame.payload.assign(payload.begin(), payload.end());
    }
    frame.header.length = static_cast<std::uint32_t>(frame.payload.size());
    if ((expected & type_bit(frame.header.type)) != 0) {
      session.on_frame(from, std::move(frame), replies);
    } else if (input.flip()) {
      session.on_fault(from, WireFault::kType, replies);
    } else {
      session.on_closed(from, replies);
      gone[from] = true;
    }
    for (const group::Reply& reply : replies) {
      constexpr std::uint32_t kFromStore = (1U << 2) | (1U << 3) | (1U << 5) | (1U << 7) | (1U << 8);
      const Reading reading = read_plainly(*reply.bytes, kFromStore);
      check(reading.fault == WireFault::kNone && !reading.frames.empty(), "the store answers with no frame");
      if (reply.last) gone.at(reply.to) = true;
    }
  }
}

}  // namespace

void run_target(std::span<const std::byte> bytes) {
  Input input(bytes);
  const auto mode = input.below(4);
  const auto expected = static_cast<std::uint32_t>(input.take<std::uint16_t>());
  const auto cuts = input.take_bytes(static_cast<std::size_t>(input.below(5)));
  if (mode == 0) {
    const std::uint32_t types = input.flip() ? 0x1FE : expected;
    check_reading(input.rest(), cuts, types);
  } else if (mode == 1) {
    const Bytes stream = draw_stream(input);
    check_reading(stream, cuts, 0x1FE);
    check_reading(stream, cuts, expected);
  } else if (mode == 2) {
    const int num_ranks = static_cast<int>(1 + input.below(1024));
    check_payload(input.rest(), num_ranks);
  } else {
    check_session(input);
  }
}

}  // namespace tokenyard::fuzz
