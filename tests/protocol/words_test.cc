// SPDX-License-Identifier: Apache-2.0
// Stamps, release words, chunks and owners: golden words written out by hand, and properties.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <cstdint>
#include <type_traits>
#include <vector>

#include "backends/registry.h"
#include "protocol/chunk.h"
#include "protocol/life.h"
#include "protocol/owner.h"
#include "protocol/queue_layout.h"
#include "protocol/stamp.h"

namespace tokenyard::protocol {
namespace {

constexpr std::uint32_t kLastEpoch = 0xFFFFFFFF;

static_assert(encode_stamp(0, 0) == 0x0000'0000'0000'0001);
static_assert(encode_stamp(1, 0) == 0x0000'0001'0000'0001);
static_assert(encode_stamp(0x12345678, 0x9ABCDEF0) == 0x1234'5678'9ABC'DEF1);
static_assert(encode_stamp(kLastEpoch, 41) == 0xFFFF'FFFF'0000'002A);
static_assert(encode_stamp(kLastEpoch, 0x7FFFFFFF) == 0xFFFF'FFFF'8000'0000);

// A word that nobody has written is no stamp, least of all of epoch 0.
static_assert(!stamp_is(0, 0));
static_assert(!stamp_is(0xFFFF'FFFF'0000'0000, kLastEpoch));
static_assert(stamp_is(encode_stamp(0, 0), 0));
// A wrapped epoch is as good as any, and no epoch is taken for its neighbour.
static_assert(stamp_is(encode_stamp(kLastEpoch, 3), kLastEpoch));
static_assert(!stamp_is(encode_stamp(kLastEpoch, 3), 0));
static_assert(!stamp_is(encode_stamp(0, 3), kLastEpoch));
static_assert(header_slot(kLastEpoch) != header_slot(kLastEpoch + 1));

static_assert(reached(0, kLastEpoch), "epoch 0 comes after the last one");
static_assert(!reached(kLastEpoch, 0));
static_assert(reached(1, 0xFFFFFFFD));
static_assert(reached(0xFFFFFFFD, 0xFFFFFFFD));
static_assert(!reached(0xFFFFFFFC, 0xFFFFFFFD));

static_assert(encode_progress(0x89ABCDEF, 0x01234567) == 0x0123'4567'89AB'CDEF);
static_assert(rows_released(0x0123'4567'89AB'CDEF) == 0x89ABCDEF);
static_assert(headers_read(0x0123'4567'89AB'CDEF) == 0x01234567);

static_assert(encode_life({.kind = LifeKind::kFaulted, .phase = 2, .heartbeat = 0xBEEF, .peer = kNobody, .epoch = 7}) ==
              0x0000'0007'AFFF'BEEF);

// A ring is open to the turn after the one that its receiver needs no more of, and to the first when nobody wrote.
static_assert(turn_released(0, 41) == 41);
static_assert(turn_released(0xFFFF'FFFF'0000'0000, 41) == 41);
static_assert(turn_released(0x0000'0007'FFFF'FFFF, 41) == 7, "needs no more of turn 7");
static_assert(turn_released(0x0000'0007'0000'0001, 41) == 6, "drained none of turn 7 yet");
static_assert(turn_released(0x0000'0000'0000'0005, 41) == kLastEpoch, "turn 0 comes after the last one");
static_assert(entries_told(0x0000'0007'0000'0005, 7) == 4);
static_assert(entries_told(0x0000'0007'0000'0005, 8) == 0);
static_assert(entries_told(0, 0) == 0);
static_assert(encode_begun(0x89ABCDEF, 0x01234567) == 0x89AB'CDEF'0123'4567);
static_assert(begun_turn(0x89AB'CDEF'0123'4567) == 0x89ABCDEF && begun_user(0x89AB'CDEF'0123'4567) == 0x01234567);

TEST(StampTest, IsReadBackForEveryEpochAndRowCount) {
  EXPECT_TRUE(rc::check("stamps round trip", [](std::uint32_t epoch, std::uint32_t other) {
    const auto rows = *rc::gen::resize(2000, rc::gen::inRange<std::uint32_t>(0, 0x80000000U));
    const std::uint64_t word = encode_stamp(epoch, rows);
    RC_ASSERT(stamp_is(word, epoch));
    RC_ASSERT(stamp_rows(word) == rows);
    RC_ASSERT(stamp_is(word, other) == (epoch == other));
  }));
}

TEST(StampTest, ProgressIsOrderedAcrossTheWrap) {
  EXPECT_TRUE(rc::check("reached() follows the count of operations", [](std::uint32_t epoch, std::uint32_t other) {
    const auto ahead = *rc::gen::resize(2000, rc::gen::inRange<std::uint32_t>(1, 0x7FFFFFFFU));
    RC_ASSERT(reached(epoch, epoch));
    RC_ASSERT(reached(epoch + ahead, epoch));
    RC_ASSERT(!reached(epoch, epoch + ahead));
    RC_ASSERT(rows_released(encode_progress(epoch, other)) == epoch);
    RC_ASSERT(headers_read(encode_progress(epoch, other)) == other);
  }));
}

TEST(StampTest, LifeWordsRoundTrip) {
  EXPECT_TRUE(rc::check("life words round trip", [](std::uint16_t heartbeat, std::uint32_t epoch) {
    const Life life{.kind = LifeKind::kWaiting,
                    .phase = *rc::gen::inRange<std::uint8_t>(0, 4),
                    .heartbeat = heartbeat,
                    .peer = *rc::gen::inRange<std::uint16_t>(0, 0x1000),
                    .epoch = epoch};
    const Life read = decode_life(encode_life(life));
    RC_ASSERT(read.kind == life.kind && read.phase == life.phase && read.heartbeat == life.heartbeat);
    RC_ASSERT(read.peer == life.peer && read.epoch == life.epoch);
  }));
}

static_assert(chunk_tokens(1) == 64);
static_assert(chunk_tokens(4096) == 64);
static_assert(chunk_tokens(4097) == 32);
static_assert(chunk_tokens(14336) == 16);
static_assert(chunk_tokens(7392) == 32);
static_assert(chunk_tokens(262144) == 1);
static_assert(chunk_tokens(262145) == 1);
static_assert(chunk_tokens(std::int64_t{1} << 40) == 1);
static_assert(num_chunks(0, 64) == 0 && num_chunks(1, 64) == 1 && num_chunks(64, 64) == 1 && num_chunks(65, 64) == 2);

TEST(ChunkTest, IsTheLargestPowerOfTwoWithinItsBytes) {
  EXPECT_TRUE(rc::check("chunk size", [] {
    const auto bytes = *rc::gen::resize(2000, rc::gen::inRange<std::int64_t>(1, 600'000));
    const std::int64_t tokens = chunk_tokens(bytes);
    RC_ASSERT(tokens >= 1 && tokens <= kMaxChunkTokens && (tokens & (tokens - 1)) == 0);
    RC_ASSERT(tokens == 1 || tokens * bytes <= kChunkBytes);
    RC_ASSERT(tokens == kMaxChunkTokens || 2 * tokens * bytes > kChunkBytes);
  }));
}

// Not on ranks, threads, backends or their configs: any two ranks and any two launches agree on it.
TEST(ChunkTest, DependsOnTheParamsOnly) {
  static_assert(std::is_same_v<decltype(&chunk_tokens), int (*)(std::int64_t)>);
  for (const int hidden : {8, 2048, 7168, 200'000}) {
    const MoeParams params{.num_experts = 64, .top_k = 4, .hidden_size = hidden, .max_tokens_per_rank = 100};
    const int expected = chunk_tokens(dispatch_bytes_per_token(params));
    for (const communication::Backend* backend : registry::all()) {
      if (!backend->info.moves_tokens) continue;
      for (const int num_ranks : {1, 2, 3, 8, 64}) {
        const auto plan = backend->plan(params, backend->info.default_config, num_ranks);
        EXPECT_EQ(plan.shape.tokens_per_chunk, expected) << backend->info.name << ", " << num_ranks << " ranks";
      }
    }
  }
}

TEST(OwnerTest, BlocksAreContiguousAndBalanced) {
  EXPECT_TRUE(rc::check("owners", [] {
    const auto num_experts = *rc::gen::resize(2000, rc::gen::inRange(1, 2049));
    const auto num_ranks = *rc::gen::resize(2000, rc::gen::inRange(1, 1025));
    int next = 0;
    for (int rank = 0; rank < num_ranks; ++rank) {
      const int count = num_local_experts(num_experts, num_ranks, rank);
      // The first num_experts % num_ranks ranks hold one more.
      RC_ASSERT(count == num_experts / num_ranks + (rank < num_experts % num_ranks ? 1 : 0));
      RC_ASSERT(first_local_expert(num_experts, num_ranks, rank) == next);
      for (int expert = next; expert < next + count; ++expert)
        RC_ASSERT(owner_of(num_experts, num_ranks, expert) == rank);
      next += count;
    }
    RC_ASSERT(next == num_experts);
  }));
}

TEST(OwnerTest, PublicFunctionsAreTheSameRule) {
  for (const int num_experts : {1, 7, 64, 257}) {
    const MoeParams params{.num_experts = num_experts, .top_k = 1, .hidden_size = 1, .max_tokens_per_rank = 1};
    for (const int num_ranks : {1, 2, 5, 8, 300}) {
      for (int rank = 0; rank < num_ranks; ++rank) {
        EXPECT_EQ(tokenyard::num_local_experts(params, rank, num_ranks),
                  num_local_experts(num_experts, num_ranks, rank));
        EXPECT_EQ(tokenyard::first_local_expert(params, rank, num_ranks),
                  first_local_expert(num_experts, num_ranks, rank));
      }
    }
  }
}

}  // namespace
}  // namespace tokenyard::protocol
