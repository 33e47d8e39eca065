// SPDX-License-Identifier: Apache-2.0
#include "group/store_wire.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <initializer_list>

#include "unit/group_helpers.h"

namespace tokenyard::group {

namespace {

using testing_groups::to_bytes;

constexpr std::uint32_t kAllTypes = 0x1FE;

Bytes raw(std::initializer_list<unsigned> values) {
  Bytes bytes;
  for (const unsigned value : values)
    bytes.push_back(static_cast<std::byte>(value));
  return bytes;
}

// Feeds everything and returns the frames.
std::vector<Frame> read_all(FrameReader& reader, std::span<const std::byte> data) {
  std::vector<Frame> frames;
  while (!data.empty() && reader.fault() == WireFault::kNone) {
    if (std::optional<Frame> frame = reader.feed(data)) frames.push_back(std::move(*frame));
  }
  return frames;
}

// What a wrong header leads to; `at` is the byte that is changed.
WireFault fault_of(std::size_t at, unsigned value, FrameType type = FrameType::kGather) {
  Bytes frame = make_frame({.type = type}, {});
  frame[at] = static_cast<std::byte>(value);
  FrameReader reader(kAllTypes);
  EXPECT_TRUE(read_all(reader, frame).empty());
  return reader.fault();
}

TEST(StoreWire, AHelloHasTheseBytes) {
  const Bytes frame =
      make_frame({.type = FrameType::kHello, .rank = 3}, encode(Hello{.num_ranks = 0x0102, .name = "ab"}));
  EXPECT_EQ(frame, raw({'T', 'K', 'Y', 'D', 1,   0,  1, 0,  //
                        3,   0,   0,   0,   6,   0,  0, 0,  //
                        0,   0,   0,   0,   0,   0,  0, 0,  //
                        2,   1,   0,   0,   'a', 'b'}));
}

TEST(StoreWire, EveryOtherFrameHasTheseBytes) {
  EXPECT_EQ(make_frame({.type = FrameType::kGather, .rank = 1, .sequence = 0x0807060504030201}, raw({9})),
            raw({'T', 'K', 'Y', 'D', 1, 0, 4, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
  EXPECT_EQ(make_frame({.type = FrameType::kLost, .rank = 1023}, {}),
            raw({'T', 'K', 'Y', 'D', 1, 0, 8, 0, 255, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(encode_nonce(0x1122334455667788), raw({0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11}));
  const std::vector<int> ranks{1, 258};
  EXPECT_EQ(encode_ranks(ranks), raw({1, 0, 0, 0, 2, 1, 0, 0}));
  EXPECT_EQ(encode(Refusal{.code = RefusalCode::kSize, .reason = "no"}), raw({4, 0, 0, 0, 'n', 'o'}));
  EXPECT_EQ(static_cast<int>(FrameType::kWelcome), 2);
  EXPECT_EQ(static_cast<int>(FrameType::kRefused), 3);
  EXPECT_EQ(static_cast<int>(FrameType::kResult), 5);
  EXPECT_EQ(static_cast<int>(FrameType::kWho), 6);
  EXPECT_EQ(static_cast<int>(FrameType::kMissing), 7);
}

TEST(StoreWire, FramesMayBeCutAnywhere) {
  Bytes stream;
  append_frame(stream, {.type = FrameType::kGather, .rank = 5, .sequence = 7}, to_bytes("payload"));
  append_frame(stream, {.type = FrameType::kWho, .rank = 6, .sequence = 8}, {});
  append_frame(stream, {.type = FrameType::kMissing, .sequence = 9}, raw({1, 0, 0, 0}));
  for (std::size_t step = 1; step <= stream.size(); ++step) {
    FrameReader reader(kAllTypes);
    std::vector<Frame> frames;
    for (std::size_t at = 0; at < stream.size(); at += step) {
      for (Frame& frame : read_all(reader, std::span(stream).subspan(at, std::min(step, stream.size() - at)))) {
        frames.push_back(std::move(frame));
      }
    }
    ASSERT_EQ(reader.fault(), WireFault::kNone);
    ASSERT_EQ(frames.size(), 3U);
    EXPECT_EQ(frames[0].header.type, FrameType::kGather);
    EXPECT_EQ(frames[0].header.rank, 5U);
    EXPECT_EQ(frames[0].header.sequence, 7U);
    EXPECT_EQ(frames[0].payload, to_bytes("payload"));
    EXPECT_EQ(frames[1].header.type, FrameType::kWho);
    EXPECT_TRUE(frames[1].payload.empty());
    EXPECT_EQ(frames[2].payload, raw({1, 0, 0, 0}));
  }
}

TEST(StoreWire, ATruncatedFrameIsNoFrame) {
  const Bytes whole = make_frame({.type = FrameType::kGather}, to_bytes("four"));
  for (std::size_t size = 0; size < whole.size(); ++size) {
    FrameReader reader(kAllTypes);
    EXPECT_TRUE(read_all(reader, std::span(whole).first(size)).empty());
    EXPECT_EQ(reader.fault(), WireFault::kNone);
  }
}

TEST(StoreWire, FaultsAreToldApart) {
  EXPECT_EQ(fault_of(0, 'G'), WireFault::kMagic);
  EXPECT_EQ(fault_of(3, 0), WireFault::kMagic);
  EXPECT_EQ(fault_of(4, 2), WireFault::kVersion);
  EXPECT_EQ(fault_of(5, 1), WireFault::kVersion);
  for (const unsigned type : {0U, 9U, 33U, 255U})
    EXPECT_EQ(fault_of(6, type), WireFault::kType);
  EXPECT_EQ(fault_of(7, 1), WireFault::kType);
  EXPECT_EQ(fault_of(15, 1), WireFault::kLength);
}

TEST(StoreWire, EveryTypeHasItsLimit) {
  const auto longest_taken = [](FrameType type) {
    for (std::uint32_t length : {0U, 8U, 68U, 516U, 4096U, 1U << 20}) {
      FrameReader reader(kAllTypes);
      Bytes header = make_frame({.type = type}, {});
      for (std::size_t i = 0; i < 4; ++i)
        header[12 + i] = static_cast<std::byte>(((length + 1) >> (8 * i)) & 0xFFU);
      EXPECT_TRUE(read_all(reader, header).empty());
      if (reader.fault() == WireFault::kLength) return length;
    }
    return ~0U;
  };
  EXPECT_EQ(longest_taken(FrameType::kWho), 0U);
  EXPECT_EQ(longest_taken(FrameType::kLost), 0U);
  EXPECT_EQ(longest_taken(FrameType::kWelcome), 8U);
  EXPECT_EQ(longest_taken(FrameType::kHello), 68U);
  EXPECT_EQ(longest_taken(FrameType::kRefused), 516U);
  EXPECT_EQ(longest_taken(FrameType::kMissing), 4096U);
  EXPECT_EQ(longest_taken(FrameType::kGather), 1U << 20);
  EXPECT_EQ(longest_taken(FrameType::kResult), 1U << 20);
}

TEST(StoreWire, AFaultIsSticky) {
  FrameReader reader(type_bit(FrameType::kHello));
  Bytes stream = make_frame({.type = FrameType::kGather}, {});
  append_frame(stream, {.type = FrameType::kHello}, encode(Hello{.num_ranks = 1, .name = "x"}));
  EXPECT_TRUE(read_all(reader, stream).empty());
  EXPECT_EQ(reader.fault(), WireFault::kType);
  EXPECT_TRUE(read_all(reader, make_frame({.type = FrameType::kHello}, {})).empty());
}

TEST(StoreWire, PayloadsAreChecked) {
  EXPECT_FALSE(decode_hello(raw({1, 0, 0})).has_value());
  EXPECT_FALSE(decode_refusal(raw({1, 0, 0})).has_value());
  EXPECT_FALSE(decode_nonce(raw({1, 0, 0, 0, 0, 0, 0})).has_value());
  EXPECT_FALSE(decode_ranks(raw({1, 0, 0}), 4).has_value());
  EXPECT_FALSE(decode_ranks(raw({4, 0, 0, 0}), 4).has_value());
  EXPECT_EQ(decode_ranks(raw({3, 0, 0, 0}), 4), std::vector<int>{3});
  const Refusal refusal{.code = RefusalCode::kEnded, .reason = std::string(1000, 'x')};
  EXPECT_EQ(decode_refusal(encode(refusal))->reason.size(), kMaxReasonBytes);
  const std::optional<Hello> hello = decode_hello(encode(Hello{.num_ranks = 7, .name = "name"}));
  EXPECT_EQ(hello->num_ranks, 7U);
  EXPECT_EQ(hello->name, "name");
}

}  // namespace

}  // namespace tokenyard::group
