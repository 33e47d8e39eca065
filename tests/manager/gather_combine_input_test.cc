// SPDX-License-Identifier: Apache-2.0
// Memory for the next combine of gathered rows: of the window, at one address, good until that combine.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>

#include "manager/gather_ranks.h"
#include "support/errors.h"
#include "support/run_ranks.h"

namespace tokenyard::manager_tests {
namespace {

using support::check;
using support::check_eq;
using support::run_ranks;

void fill(const TensorView& memory, const Matrix<float>& rows) {
  for (std::int64_t row = 0; row < rows.rows; ++row) {
    std::memcpy(support::row_of(memory, row), &rows.values[static_cast<std::size_t>(row * rows.columns)],
                static_cast<std::size_t>(rows.columns) * 4);
  }
}

TEST(GatherCombineInput, IsWindowMemoryAtOneAddress) {
  EXPECT_NO_THROW(run_ranks(4, [](const Group& group) {
    Flat flat(group);
    const void* address = nullptr;
    flat.step({3, 3, 3, 3});
    check(!flat.calls.allocate_combine_input(12, 10, Dtype::kF32).defined(), "nothing was dispatched");
    for (const std::int64_t rows : {3, 1, 8}) {
      flat.step({rows, rows, rows, rows});
      flat.dispatch(10);
      const TensorView memory = flat.calls.allocate_combine_input(4 * rows, 10, Dtype::kF32);
      check(memory.defined(), "equal rows have window memory");
      check_eq(memory.shape[0], 4 * rows, "rows");
      check_eq(memory.shape[1], 10, "hidden");
      if (address == nullptr) address = memory.data;
      check(memory.data == address, "the memory moved");
      fill(memory, expert_output(flat.rank, 4 * rows, 10));
      TensorView output;
      support::check_ok(flat.calls.combine(memory, output), "combine");
      check_combined(output, flat.ranks, flat.sizes, static_cast<std::size_t>(flat.rank));
    }
    const auto nothing = [&](std::int64_t rows, std::int64_t hidden, Dtype dtype) {
      check(!flat.calls.allocate_combine_input(rows, hidden, dtype).defined(), "memory that there is no room for");
    };
    flat.dispatch(10);
    nothing(31, 10, Dtype::kF32);   // not the step's rows
    nothing(32, 12, Dtype::kF32);   // no window of this width
    nothing(32, 10, Dtype::kBf16);  // nor of this dtype
    flat.step({8, 8, 8, 7});
    flat.dispatch(10);
    nothing(31, 10, Dtype::kF32);  // not all equal
    flat.manager.set_step_num_tokens({});
    nothing(31, 10, Dtype::kF32);  // no list at all
  }));
}

// Whatever is dispatched between the call and its combine, the memory keeps what is written to it.
TEST(GatherCombineInput, IsThereBeforeTheDispatch) {
  EXPECT_NO_THROW(run_ranks(4, [](const Group& group) {
    Flat flat(group);
    flat.step({8, 8, 8, 8});
    flat.combine(10);  // makes the window
    const void* address = nullptr;
    for (const int dispatches : {0, 1, 2, 1}) {
      const std::int64_t rows = dispatches == 2 ? 3 : 8;
      flat.step({rows, rows, rows, rows});
      const TensorView memory = flat.calls.allocate_combine_input(4 * rows, 10, Dtype::kF32);
      check(memory.defined() && memory.shape[0] == 4 * rows, "memory before the dispatch");
      if (address == nullptr) address = memory.data;
      check(memory.data == address, "the memory moved");
      fill(memory, expert_output(flat.rank, 4 * rows, 10));
      for (int i = 0; i < dispatches; ++i)
        flat.dispatch(10);
      check(flat.calls.allocate_combine_input(4 * rows, 10, Dtype::kF32).data == address, "asked for twice, it moved");
      flat.combine(24);  // a combine of another width goes through another window
      TensorView output;
      support::check_ok(flat.calls.combine(memory, output), "combine");
      check_combined(output, flat.ranks, flat.sizes, static_cast<std::size_t>(flat.rank));
    }
    flat.step({9, 9, 9, 9});
    check(!flat.calls.allocate_combine_input(36, 10, Dtype::kF32).defined(),
          "memory for more rows than the window has");
  }));
}

// The step's dispatch needs a larger window: where memory of the old one was given out, that memory stays until the
// combine, and no longer.
TEST(GatherCombineInput, OutlivesGrowth) {
  const std::int64_t before = memfd_mappings();
  EXPECT_NO_THROW(run_ranks(4, [&](const Group& group) {
    Flat flat(group);
    flat.step({2, 2, 2, 2});
    flat.combine(10);
    for (const int columns : {300, 600}) {
      TensorView memory;
      if (flat.rank % 2 == 0) memory = flat.calls.allocate_combine_input(8, 10, Dtype::kF32);
      flat.dispatch(10, columns);  // more cargo than there is room for
      group.barrier();
      // Ranks that keep the old window keep it whole: every rank's part.
      check_eq(memfd_mappings(), before + 4 + 4, "windows, with those that are kept");
      group.barrier();
      auto experts = expert_output(flat.rank, 8, 10);
      if (memory.defined()) fill(memory, experts);
      TensorView output;
      support::check_ok(flat.calls.combine(memory.defined() ? memory : experts.view(), output), "combine");
      check_combined(output, flat.ranks, flat.sizes, static_cast<std::size_t>(flat.rank));
      group.barrier();
      check_eq(memfd_mappings(), before + 4, "windows after the combine");
      group.barrier();
    }
    check(flat.manager.destroy().ok(), "destroy");
  }));
  EXPECT_EQ(memfd_mappings(), before);
}

}  // namespace
}  // namespace tokenyard::manager_tests
