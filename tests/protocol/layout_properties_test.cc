// SPDX-License-Identifier: Apache-2.0
// What must hold of every window layout: all slots apart, aligned and inside, whatever the shape; and in 64 bits.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tokenyard/error.h"

#include "backends/registry.h"
#include "engine/host/window_view.h"
#include "protocol/layout.h"
#include "protocol/slots.h"

namespace tokenyard::protocol {
namespace {

// RapidCheck starts with small values; this size gives the whole range at once.
constexpr int kFullRange = 2000;
constexpr std::int64_t kInt32Max = 0x7FFFFFFF;

constexpr WindowShape small_shape(Placement placement) {
  return {.num_ranks = 3,
          .tokens_per_chunk = 4,
          .max_tokens = 9,
          .placement = placement,
          .row_capacity = 48,
          .extra_capacity = 5,
          .stats_entries = 7,
          .combine_row_bytes = 26,
          .weights_row_bytes = 12};
}

constexpr WindowShape deep_shape() {
  WindowShape shape = small_shape(Placement::kExpertMajor);
  shape.depth = 2;
  shape.given_weights_row_bytes = 12;
  return shape;
}

constexpr WindowShape queued_shape() {
  WindowShape shape = small_shape(Placement::kRankMajor);
  shape.queue_bytes = 200;
  return shape;
}

// At compile time: nothing that a device compiler could not do as well.
template <class Layout>
constexpr bool layout_holds(const Layout& layout) {
  std::array<Slot, 320> slots{};
  std::size_t count = 0;
  for_each_slot(layout, [&](const Slot& slot) { slots.at(count++) = slot; });
  return disjoint_aligned_inside(std::span(slots).first(count), layout.bytes());
}

constexpr bool holds(const WindowShape& shape) {
  return layout_holds(WindowLayout::of(shape));
}

static_assert(holds(small_shape(Placement::kEveryRank)));
static_assert(holds(small_shape(Placement::kCompact)));
static_assert(holds(small_shape(Placement::kRankMajor)));
static_assert(holds(deep_shape()));
static_assert(holds(queued_shape()));
static_assert(layout_holds(QueueLayout::of(3, 200)));

// The check itself can fail.
constexpr bool checked(std::array<Slot, 2> slots, std::int64_t bytes) {
  return disjoint_aligned_inside(slots, bytes);
}

static_assert(checked({Slot{0, 64, 64}, Slot{64, 64, 64}}, 128));
static_assert(!checked({Slot{0, 65, 64}, Slot{64, 64, 64}}, 128));
static_assert(!checked({Slot{0, 64, 64}, Slot{65, 62, 64}}, 128));
static_assert(!checked({Slot{0, 64, 64}, Slot{64, 64, 64}}, 127));

WindowShape draw_shape(int most_ranks, std::int64_t most_tokens) {
  WindowShape shape;
  shape.num_ranks = *rc::gen::inRange(1, most_ranks + 1);
  shape.tokens_per_chunk = 1 << *rc::gen::inRange(0, 7);
  shape.max_tokens = *rc::gen::inRange<std::int64_t>(1, most_tokens + 1);
  shape.placement =
      *rc::gen::element(Placement::kEveryRank, Placement::kCompact, Placement::kRankMajor, Placement::kExpertMajor);
  shape.depth = *rc::gen::inRange(1, 3);
  shape.given_weights_row_bytes = 4 * *rc::gen::inRange<std::int64_t>(0, 65);
  shape.queue_bytes = *rc::gen::inRange(0, 4) == 0 ? *rc::gen::inRange<std::int64_t>(1, 100'000) : 0;
  shape.row_capacity = kRowAlignment * *rc::gen::inRange<std::int64_t>(1, 1000);
  shape.extra_capacity = *rc::gen::inRange<std::int64_t>(0, 3000);
  shape.stats_entries = *rc::gen::inRange<std::int64_t>(0, 300);
  shape.combine_row_bytes = *rc::gen::inRange<std::int64_t>(1, 30'000);
  shape.weights_row_bytes = 4 * *rc::gen::inRange<std::int64_t>(0, 65);
  return shape;
}

void assert_slots_hold(const WindowShape& shape) {
  const WindowLayout layout = WindowLayout::of(shape);
  std::vector<Slot> slots;
  for_each_slot(layout, [&](const Slot& slot) { slots.push_back(slot); });
  RC_ASSERT(disjoint_aligned_inside(slots, layout.bytes()));
  // Nothing but the padding of the last section is left over.
  const Slot& last = slots.back();
  RC_ASSERT(layout.bytes() - (last.begin + last.bytes) < kSectionAlignment + kRowAlignment);
}

TEST(LayoutPropertiesTest, AllSlotsAreApartAlignedAndInside) {
  EXPECT_TRUE(rc::check("slots of up to 64 ranks", [] {
    assert_slots_hold(*rc::gen::resize(kFullRange, rc::gen::exec([] { return draw_shape(64, 200); })));
  }));
}

TEST(LayoutPropertiesTest, AllSlotsOfQueuesAreApartAlignedAndInside) {
  EXPECT_TRUE(rc::check("queues of up to 1024 ranks", [] {
    const int num_ranks = *rc::gen::resize(kFullRange, rc::gen::inRange(1, 1025));
    const auto bytes = *rc::gen::resize(kFullRange, rc::gen::inRange<std::int64_t>(1, std::int64_t{1} << 40));
    const QueueLayout layout = QueueLayout::of(num_ranks, bytes);
    std::vector<Slot> slots;
    for_each_slot(layout, [&](const Slot& slot) { slots.push_back(slot); });
    RC_ASSERT(disjoint_aligned_inside(slots, layout.bytes()));
    RC_ASSERT(layout.bytes() - (slots.back().begin + slots.back().bytes) < kSectionAlignment);
    // Words are set back to zero without a look at the queues.
    for (const Slot& slot : slots)
      RC_ASSERT((slot.begin >= layout.queues()) == (slot.bytes == bytes && slot.alignment == kSectionAlignment));
  }));
}

TEST(LayoutPropertiesTest, HoldForALotOfRanks) {
  for (const int num_ranks : {72, 256, 1000, 1024}) {
    for (const Placement placement : {Placement::kEveryRank, Placement::kCompact, Placement::kRankMajor}) {
      WindowShape shape = small_shape(placement);
      shape.num_ranks = num_ranks;
      const WindowLayout layout = WindowLayout::of(shape);
      std::vector<Slot> slots;
      for_each_slot(layout, [&](const Slot& slot) { slots.push_back(slot); });
      EXPECT_TRUE(disjoint_aligned_inside(slots, layout.bytes())) << num_ranks;
    }
  }
}

// Whoever asks gets the same place: a sender that views the receiver's window, and the receiver that views its own. No
// rank's number enters a layout, so two that are made from the same params are equal (C77: two sides, two strides).
TEST(LayoutPropertiesTest, SenderAndReceiverHaveOneTable) {
  alignas(128) static std::array<std::byte, 128> window{};  // only addresses are worked out
  for (const communication::Backend* backend : registry::all()) {
    if (!backend->info.moves_tokens) continue;
    for (const int num_ranks : {2, 6, 12, 32}) {
      for (const int local_experts : {1, 2, 9}) {
        const MoeParams params{
            .num_experts = 4 * num_ranks * local_experts, .top_k = 1, .hidden_size = 40, .max_tokens_per_rank = 130};
        const auto layout_of = [&] {
          return WindowLayout::of(backend->plan(params, backend->info.default_config, num_ranks).shape);
        };
        const WindowLayout senders = layout_of();
        const WindowLayout receivers = layout_of();
        const engine::host::WindowView as_sender(window.data(), senders);
        const engine::host::WindowView as_receiver(window.data(), receivers);
        for (int source = 0; source < num_ranks; ++source) {
          for (std::uint32_t epoch = 0; epoch < kHeaderSlots; ++epoch) {
            for (int phase = 0; phase < kNumPhases; ++phase) {
              EXPECT_EQ(&as_sender.header(phase, epoch, source), &as_receiver.header(phase, epoch, source));
              EXPECT_EQ(&as_sender.released(phase, source), &as_receiver.released(phase, source));
            }
            EXPECT_EQ(as_sender.counts(epoch, source), as_receiver.counts(epoch, source));
          }
          EXPECT_EQ(&as_sender.chunk(source, 1, 0), &as_receiver.chunk(source, 1, 0));
          EXPECT_EQ(as_sender.payload(source, 0), as_receiver.payload(source, 0));
          EXPECT_EQ(as_sender.given_weights(source, 0), as_receiver.given_weights(source, 0));
          EXPECT_EQ(as_sender.stats(source), as_receiver.stats(source));
          EXPECT_EQ(as_sender.combine_row(130 * source, 0), as_receiver.combine_row(130 * source, 0));
        }
        EXPECT_EQ(senders.bytes(), receivers.bytes());
      }
    }
  }
}

// C73: 32 ranks with 10240 tokens of 7168 elements are 2,348,810,240 elements, more than 2^31 - 1.
constexpr WindowShape kLargeGroup{.num_ranks = 32,
                                  .tokens_per_chunk = 16,
                                  .max_tokens = 10'240,
                                  .placement = Placement::kRankMajor,
                                  .row_capacity = 14'336,
                                  .combine_row_bytes = 14'336};
static_assert(WindowLayout::of(kLargeGroup).combine_rows() == 327'680);
static_assert(WindowLayout::of(kLargeGroup).combine_row(327'680) - WindowLayout::of(kLargeGroup).combine_row(0) ==
              2 * 2'348'810'240);
static_assert(WindowLayout::of(kLargeGroup).payload(31) - WindowLayout::of(kLargeGroup).payload(0) ==
              31 * (10'240 * std::int64_t{14'336} + kMaxPlanes * kPlaneAlignment));
static_assert(WindowLayout::of(kLargeGroup).bytes() > 4 * 2'348'810'240);

// C74: row 1,048,575 of 7168 bytes.
constexpr WindowShape kManyRows{.num_ranks = 8,
                                .tokens_per_chunk = 32,
                                .max_tokens = 131'072,
                                .placement = Placement::kCompact,
                                .row_capacity = 7168,
                                .combine_row_bytes = 7168};
static_assert(WindowLayout::of(kManyRows).combine_row(1'048'575) - WindowLayout::of(kManyRows).combine_row(0) ==
              7'516'185'600);
static_assert(WindowLayout::of(kManyRows).payload_bytes() > 7'516'192'768 - 1);
static_assert(plan_planes({7168, 0, 32}, 1'048'576).planes[kIdsPlane].offset == 7'516'192'768);

TEST(LayoutPropertiesTest, PublicSizesAreOfSixtyFourBits) {
  const MoeParams params{.num_experts = 256, .top_k = 8, .hidden_size = 7168, .max_tokens_per_rank = 10'240};
  for (const communication::Backend* backend : registry::all()) {
    if (!backend->info.moves_tokens) continue;
    // Queues do not grow with the tokens.
    if (backend->plan(params, backend->info.default_config, 32).spec.transport == Transport::kWindow) {
      EXPECT_GT(window_bytes(params, backend->info.default_config, 32), 4 * 2'348'810'240) << backend->info.name;
    }
    EXPECT_GT(output_bytes(params, backend->info.default_config, 32), 2 * 2'348'810'240) << backend->info.name;
  }
}

// C76: 32 ranks, 9 experts each, two slots: offsets beyond the 8191 that a packed field would hold, all different.
TEST(LayoutPropertiesTest, HeadersOfBothSlotsAreAllDifferent) {
  WindowShape shape = small_shape(Placement::kCompact);
  shape.num_ranks = 32;
  const WindowLayout layout = WindowLayout::of(shape);
  std::vector<std::int64_t> offsets;
  for (int phase = 0; phase < kNumPhases; ++phase) {
    for (int slot = 0; slot < kHeaderSlots; ++slot) {
      for (int source = 0; source < 32; ++source)
        offsets.push_back(layout.header(phase, slot, source));
    }
  }
  std::ranges::sort(offsets);
  EXPECT_EQ(std::ranges::adjacent_find(offsets), offsets.end());
  EXPECT_GT(offsets.back(), 8191);
  EXPECT_LT(offsets.back(), layout.bytes());
}

// The one capacity function says what the layout ends at.
TEST(LayoutPropertiesTest, WindowBytesIsTheLayoutsEnd) {
  for (const communication::Backend* backend : registry::all()) {
    if (!backend->info.moves_tokens) continue;
    EXPECT_TRUE(rc::check("window_bytes of " + std::string(backend->info.name), [&] {
      const MoeParams params = *rc::gen::resize(kFullRange, rc::gen::exec([] {
                                                  return MoeParams{.num_experts = 4 * *rc::gen::inRange(1, 80),
                                                                   .top_k = *rc::gen::inRange(1, 17),
                                                                   .hidden_size = *rc::gen::inRange(1, 9000),
                                                                   .max_tokens_per_rank = *rc::gen::inRange(1, 9000)};
                                                }));
      const int num_ranks = *rc::gen::inRange(1, 65);
      const auto plan = backend->plan(params, backend->info.default_config, num_ranks);
      const WindowLayout layout = WindowLayout::of(plan.shape);
      const std::int64_t queue = plan.shape.queue_bytes;
      const std::int64_t queues = queue > 0 ? QueueLayout::of(num_ranks, queue).bytes() : 0;
      RC_ASSERT(window_bytes(params, backend->info.default_config, num_ranks) == layout.bytes() + queues);
      std::int64_t end = 0;
      const std::int64_t rows = layout.combine_rows();
      for_each_slot(layout, [&](const Slot& slot) { end = std::max(end, slot.begin + slot.bytes); });
      RC_ASSERT(end <= layout.bytes());
      RC_ASSERT(layout.bytes() - end < kSectionAlignment + kRowAlignment);
      RC_ASSERT(rows <= kInt32Max);
    }));
  }
}

TEST(LayoutPropertiesTest, MoreRowsThanThirtyTwoBitsCountAreRefused) {
  const MoeParams params{.num_experts = 64, .top_k = 1, .hidden_size = 8, .max_tokens_per_rank = 33'554'432};
  EXPECT_GT(window_bytes(params, AllGatherConfig{}, 63), 0);
  EXPECT_THROW((void)window_bytes(params, AllGatherConfig{}, 64), Error);
}

}  // namespace
}  // namespace tokenyard::protocol
