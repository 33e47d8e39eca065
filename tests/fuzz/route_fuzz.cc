// SPDX-License-Identifier: Apache-2.0
// Route arithmetic against plain recounts: owners, chunks, planes, window layouts and stamps, of any shape whose slots
// can be counted one by one.
#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "fuzz/input.h"
#include "fuzz/target.h"
#include "protocol/chunk.h"
#include "protocol/layout.h"
#include "protocol/owner.h"
#include "protocol/planes.h"
#include "protocol/slots.h"
#include "protocol/stamp.h"
#include "support/check.h"

namespace tokenyard::fuzz {
namespace {

using namespace protocol;  // NOLINT(google-build-using-namespace): it is what is tested here
using support::check;
using support::check_eq;

// Deals the experts out one block after the other, as design and params.h say.
void check_owners(Input& input) {
  const auto num_ranks = static_cast<int>(1 + input.below(1024));
  const auto num_experts = static_cast<int>(1 + input.below(4096));
  int expert = 0;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const int own = num_experts / num_ranks + (rank < num_experts % num_ranks ? 1 : 0);
    check_eq(num_local_experts(num_experts, num_ranks, rank), own, "experts of a rank");
    check_eq(first_local_expert(num_experts, num_ranks, rank), expert, "first expert of a rank");
    for (int i = 0; i < own; ++i, ++expert)
      check_eq(owner_of(num_experts, num_ranks, expert), rank, "owner of expert " + std::to_string(expert));
  }
  check_eq(expert, num_experts, "experts of all ranks");
}

// Numbers of any size: the owner's block holds the expert.
void check_large_owners(Input& input) {
  const int num_ranks = std::max(1, input.hostile<int>() & 0x3FF);
  const int num_experts = std::max(1, input.hostile<int>() & 0x7FFF'FFFF);
  const int expert = static_cast<int>((input.hostile<int>() & 0x7FFF'FFFF) % num_experts);
  const int owner = owner_of(num_experts, num_ranks, expert);
  check(owner >= 0 && owner < num_ranks, "the owner is no rank");
  const std::int64_t first = first_local_expert(num_experts, num_ranks, owner);
  check(first <= expert && expert < first + num_local_experts(num_experts, num_ranks, owner),
        "expert " + std::to_string(expert) + " is outside its owner's block");
}

void check_chunks(Input& input) {
  const std::int64_t row = input.below(1'000'000'000'000);
  const int tokens = chunk_tokens(row);
  check(tokens == 1 || tokens * row <= 262'144, "a chunk of several tokens is larger than 256 KiB");
  check(tokens == 64 || tokens * 2 * row > 262'144, "a chunk could have twice as many tokens");
  check(tokens >= 1 && tokens <= 64 && (tokens & (tokens - 1)) == 0, "a chunk is a power of two up to 64");
  const std::int64_t num_tokens = input.below(100'000);
  const std::int64_t chunks = num_chunks(num_tokens, tokens);
  check(chunks * tokens >= num_tokens && (chunks == 0 || (chunks - 1) * tokens < num_tokens), "number of chunks");
}

void check_stamps(Input& input) {
  const auto epoch = input.hostile<std::uint32_t>();
  const auto rows = static_cast<std::uint32_t>(input.hostile<std::uint32_t>() & 0x7FFF'FFFFU);
  const auto other = input.hostile<std::uint32_t>();
  const std::uint64_t stamp = encode_stamp(epoch, rows);
  check(stamp_is(stamp, epoch), "a stamp is of its epoch");
  check_eq(stamp_rows(stamp), rows, "rows of a stamp");
  check_eq(stamp_is(stamp, other), other == epoch, "whether a stamp is of another epoch");
  check(!stamp_is(0, epoch) && !stamp_is(std::uint64_t{epoch} << 32, epoch), "an unwritten word is a stamp");
  const std::uint64_t progress = encode_progress(rows, other);
  check_eq(rows_released(progress), rows, "rows released");
  check_eq(headers_read(progress), other, "headers read");
  // Ahead by less than half the epochs, also around the end of the numbers.
  const auto step = static_cast<std::uint32_t>(input.hostile<std::uint32_t>() & 0x7FFF'FFFFU);
  check(reached(epoch + step, epoch), "an epoch ahead has been reached");
  check_eq(reached(epoch, epoch + step), step == 0, "whether an epoch behind has been reached");
  check(header_slot(epoch) != header_slot(epoch + 1), "two operations in a row share a header");
}

void check_planes(Input& input) {
  std::array<std::int64_t, kMaxPlanes> widths{};
  std::int64_t library = 0;
  std::int64_t extras = 0;
  for (std::size_t i = 0; i < widths.size(); ++i) {
    const std::int64_t width = input.flip() ? input.below(70'000) : input.below(64);
    widths[i] = input.flip() ? width : 0;
    if (i < kFirstExtraPlane) {
      library += (widths[i] + 15) / 16 * 16;
    } else {
      extras += widths[i];
    }
  }
  const std::int64_t rows = 1 + input.below(0x7FFF'FFFF);
  const PlanePlan plan = plan_planes(widths, rows);
  std::int64_t end = 0;
  for (std::size_t i = 0; i < widths.size(); ++i) {
    const Plane& plane = plan.planes[i];
    check_eq(plane.row_bytes, widths[i], "width of plane " + std::to_string(i));
    if (widths[i] == 0) continue;
    check(plane.offset >= end && plane.offset % 128 == 0, "a plane starts inside the one before it");
    check(plane.stride >= widths[i] && (i >= kFirstExtraPlane || plane.stride % 16 == 0), "stride of a plane");
    check(i < kFirstExtraPlane || plane.stride == widths[i], "extras are dense");
    end = plane.offset + plane.stride * rows;
  }
  check(end <= plan.bytes && plan.bytes < end + 128, "bytes of all planes");
  check(plan.bytes <= payload_capacity(rows, library, extras), "planes do not fit the room made for them");
}

WindowShape draw_shape(Input& input) {
  WindowShape shape;
  shape.num_ranks = static_cast<int>(1 + input.below(24));
  shape.tokens_per_chunk = 1 << input.below(7);
  shape.max_tokens = 1 + input.below(40);
  shape.placement = static_cast<Placement>(input.below(4));
  shape.row_capacity = 16 * (1 + input.below(60'000));
  shape.extra_capacity = input.below(60'000);
  shape.stats_entries = input.below(4000);
  shape.combine_row_bytes = 1 + input.below(60'000);
  shape.weights_row_bytes = 4 * input.below(65);
  shape.depth = static_cast<int>(1 + input.below(3));
  if (input.flip()) shape.given_weights_row_bytes = 4 * input.below(65);
  if (input.flip()) shape.queue_bytes = 64 * (1 + input.below(4096));
  return shape;
}

void check_layout(Input& input) {
  const WindowShape shape = draw_shape(input);
  const WindowLayout layout = WindowLayout::of(shape);
  std::vector<Slot> slots;
  std::int64_t needed = 0;
  for_each_slot(layout, [&](const Slot& slot) {
    slots.push_back(slot);
    needed += slot.bytes;
  });
  check(disjoint_aligned_inside(slots, layout.bytes()), "slots overlap, are not aligned or lie outside");
  check(needed <= layout.bytes(), "the window is smaller than its slots");
  const std::int64_t ranks = shape.num_ranks;
  check_eq(layout.combine_rows(), ranks * shape.max_tokens, "rows of combine");
  const bool spaces = shape.placement == Placement::kRankMajor || shape.placement == Placement::kExpertMajor;
  const std::int64_t rows = spaces ? shape.max_tokens : ranks * shape.max_tokens;
  check(layout.payload_bytes() >= rows * (shape.row_capacity + shape.extra_capacity), "room for all rows of a source");
  // Lines come before rows: they are zeroed together when a communication starts anew.
  for (const Slot& slot : slots)
    check(slot.alignment != kLineBytes || slot.begin + slot.bytes <= layout.payload(0), "a line lies among the rows");
}

}  // namespace

void run_target(std::span<const std::byte> bytes) {
  Input input(bytes);
  switch (input.below(6)) {
    case 0:
      return check_owners(input);
    case 1:
      return check_large_owners(input);
    case 2:
      return check_chunks(input);
    case 3:
      return check_stamps(input);
    case 4:
      return check_planes(input);
    default:
      return check_layout(input);
  }
}

}  // namespace tokenyard::fuzz
