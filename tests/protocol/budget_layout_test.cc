// SPDX-License-Identifier: Apache-2.0
// What must hold of windows with a byte budget: whatever the rows, sections start where they always do, rows that fit
// are apart and inside, and the figures that errors name are exact.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "protocol/layout.h"
#include "protocol/slots.h"

namespace tokenyard::protocol {
namespace {

// RapidCheck starts with small values; this size gives the whole range at once.
constexpr int kFullRange = 2000;

// Rows of any kind, one token per rank.
WindowShape draw_rows(int num_ranks) {
  WindowShape shape{.num_ranks = num_ranks, .max_tokens = 1};
  shape.tokens_per_chunk = 1 << *rc::gen::inRange(0, 7);
  shape.row_capacity = kRowAlignment * *rc::gen::inRange<std::int64_t>(1, 2000);
  shape.combine_row_bytes = *rc::gen::inRange<std::int64_t>(1, 30'000);
  shape.weights_row_bytes = 4 * *rc::gen::inRange<std::int64_t>(1, 65);
  return shape;
}

void assert_apart_and_inside(const WindowLayout& layout, std::int64_t budget) {
  RC_ASSERT(layout.fits());
  RC_ASSERT(layout.bytes() == budget);
  std::vector<Slot> slots;
  for_each_slot(layout, [&](const Slot& slot) { slots.push_back(slot); });
  RC_ASSERT(disjoint_aligned_inside(slots, budget));
}

WindowLayout draw_layout(int num_ranks, std::int64_t budget) {
  WindowShape shape = *rc::gen::resize(kFullRange, rc::gen::exec([&] { return draw_rows(num_ranks); }));
  shape.budget_bytes = budget;
  shape.max_tokens = std::max<std::int64_t>(1, most_tokens_within_budget(shape, 500));
  return WindowLayout::of(shape);
}

TEST(BudgetLayout, SectionsStayWhereTheyAre) {
  EXPECT_TRUE(rc::check("two shapes of one budget", [] {
    const int num_ranks = *rc::gen::resize(kFullRange, rc::gen::inRange(1, 33));
    const std::int64_t budget = *rc::gen::resize(kFullRange, rc::gen::inRange<std::int64_t>(20'000, 4'000'000));
    const WindowLayout one = draw_layout(num_ranks, budget);
    const WindowLayout other = draw_layout(num_ranks, budget);
    for (const WindowLayout* layout : {&one, &other}) {
      if (layout->fits()) assert_apart_and_inside(*layout, budget);
    }
    const int last = num_ranks - 1;
    RC_ASSERT(one.life(last) == other.life(last));
    RC_ASSERT(one.released(kWeightsPhase, last) == other.released(kWeightsPhase, last));
    RC_ASSERT(one.header(kWeightsPhase, 1, last) == other.header(kWeightsPhase, 1, last));
    RC_ASSERT(one.counts(1, last) == other.counts(1, last));
    RC_ASSERT(one.chunk(last, 0) == other.chunk(last, 0));
    RC_ASSERT(one.rows() == other.rows());
    RC_ASSERT(one.payload(last) == other.payload(last));
    RC_ASSERT(one.combine_row(0) == other.combine_row(0));
    RC_ASSERT(one.bytes() == other.bytes());
  }));
}

TEST(BudgetLayout, FiguresAreExact) {
  EXPECT_TRUE(rc::check("most tokens, and the least budget", [] {
    const int num_ranks = *rc::gen::inRange(1, 65);
    WindowShape shape = *rc::gen::resize(kFullRange, rc::gen::exec([&] { return draw_rows(num_ranks); }));
    const std::int64_t least = least_budget(shape);
    shape.budget_bytes = least - 1;
    RC_ASSERT(!WindowLayout::of(shape).fits());
    RC_ASSERT(most_tokens_within_budget(shape, 1000) == 0);
    shape.budget_bytes = least;
    assert_apart_and_inside(WindowLayout::of(shape), least);
    shape.budget_bytes = least + *rc::gen::inRange<std::int64_t>(0, 3'000'000);
    const std::int64_t most = most_tokens_within_budget(shape, 1 << 20);
    RC_ASSERT(most >= 1);
    shape.max_tokens = most;
    RC_ASSERT(WindowLayout::of(shape).fits());
    shape.max_tokens = most + 1;
    RC_ASSERT(!WindowLayout::of(shape).fits());
    RC_ASSERT(most_tokens_within_budget(shape, most - 1) == most - 1);  // the limit holds
  }));
}

// At compile time too.
constexpr bool holds() {
  WindowShape shape{
      .num_ranks = 3, .tokens_per_chunk = 4, .row_capacity = 48, .combine_row_bytes = 26, .weights_row_bytes = 12};
  shape.budget_bytes = 20'000;
  shape.max_tokens = most_tokens_within_budget(shape, 20);
  const WindowLayout layout = WindowLayout::of(shape);
  std::array<Slot, 320> slots{};
  std::size_t count = 0;
  for_each_slot(layout, [&](const Slot& slot) { slots.at(count++) = slot; });
  return layout.fits() && disjoint_aligned_inside(std::span(slots).first(count), 20'000);
}

static_assert(holds());

}  // namespace
}  // namespace tokenyard::protocol
