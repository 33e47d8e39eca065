// SPDX-License-Identifier: Apache-2.0
#include "fuzz/drawn_tensor.h"

#include <algorithm>
#include <span>

namespace tokenyard::fuzz {
namespace {

// Bytes from the first element to the end of the last, in numbers that do not overflow; 0 for an empty tensor.
long double span_bytes(const TensorView& view) {
  long double last = 0;
  for (int i = 0; i < view.num_dims; ++i) {
    const auto at = static_cast<std::size_t>(i);
    if (view.shape[at] == 0) return 0;
    last += static_cast<long double>(view.shape[at] - 1) * static_cast<long double>(view.strides[at]);
  }
  return (last + 1) * static_cast<long double>(size_of(view.dtype));
}

void set_contiguous(TensorView& view) {
  std::int64_t stride = 1;
  for (std::size_t i = static_cast<std::size_t>(view.num_dims); i-- > 0;) {
    view.strides[i] = stride;
    stride *= view.shape[i];
  }
}

// A stride of rows, or of blocks. Rows of no bytes may lie anywhere.
bool spoil_stride(Input& input, TensorView& view, std::size_t at) {
  view.strides[at] = input.hostile<std::int64_t>();
  return view.shape[at] > 1 && view.strides[at] < 0 && view.num_elements() > 0;
}

// One change; returns whether no call may take the view any more.
bool spoil(Input& input, TensorView& view) {
  const auto last = static_cast<std::size_t>(view.num_dims - 1);
  switch (input.below(9)) {
    case 0:
      view.dtype = static_cast<Dtype>(input.below(12));
      return view.dtype > Dtype::kI64;
    case 1:
      view.shape[static_cast<std::size_t>(input.below(view.num_dims))] = input.below(40);
      set_contiguous(view);
      return false;
    case 2: {  // an extent that no tensor has
      std::int64_t& extent = view.shape[static_cast<std::size_t>(input.below(view.num_dims))];
      extent = -1 - static_cast<std::int64_t>(input.hostile<std::uint64_t>() >> 2);
      return true;
    }
    case 3:  // or none that has its bytes
      view.shape[last] = (std::int64_t{1} << 56) + static_cast<std::int64_t>(input.hostile<std::uint64_t>() >> 2);
      return true;
    case 4:  // numbers of dimensions that no view has
      view.num_dims =
          input.flip() ? kMaxDims + 1 + static_cast<int>(input.below(200)) : -1 - static_cast<int>(input.below(200));
      return true;
    case 5:
      if (view.num_dims == kMaxDims) return false;
      ++view.num_dims;
      view.shape[last + 1] = input.below(4);
      set_contiguous(view);
      return false;
    case 6:
      view.device.kind = DeviceKind::kCuda;
      return true;
    case 7:
      view.strides[last] = input.hostile<std::int64_t>();
      return view.shape[last] > 1 && view.strides[last] != 1 && last > 0;
    default:
      return spoil_stride(input, view, view.num_dims == 3 && input.flip() ? 1 : 0);
  }
}

// The memory that the view says it has, and now and then none, or one that starts a byte too late.
void give_memory(Input& input, Drawn& drawn, long double bytes) {
  drawn.memory.resize(static_cast<std::size_t>(std::clamp<long double>(bytes, 0, kMostBytes)));
  for (std::size_t i = 0; i < drawn.memory.size(); ++i)
    drawn.memory[i] = static_cast<std::byte>(i * 31 + 1);
  drawn.view.data = drawn.memory.data();
  if (drawn.memory.empty()) return;
  const std::int64_t fate = input.below(64);
  if (fate == 63) {
    drawn.view.data = nullptr;
    drawn.wrong = true;
  } else if (fate == 62 && size_of(drawn.view.dtype) > 1) {
    drawn.memory.resize(drawn.memory.size() + 1);
    drawn.view.data = drawn.memory.data() + 1;
    drawn.wrong = true;
  }
}

}  // namespace

Drawn draw_tensor(Input& input, const Wanted& wanted) {
  Drawn drawn;
  TensorView& view = drawn.view;
  view = TensorView(nullptr, wanted.dtype, {wanted.rows, wanted.columns});
  if (wanted.blocks > 0) view = TensorView(nullptr, wanted.dtype, {wanted.blocks, wanted.rows, wanted.columns});
  if (input.flip()) view.strides[0] += input.below(5);
  for (auto left = std::max<std::int64_t>(input.below(8) - 5, 0); left > 0 && !drawn.wrong; --left)
    drawn.wrong = spoil(input, view);
  if (drawn.wrong && (view.num_dims < 1 || view.num_dims > kMaxDims)) {
    drawn.memory.resize(64);
    view.data = drawn.memory.data();
    return drawn;
  }
  const bool negative = std::ranges::any_of(std::span(view.shape).first(static_cast<std::size_t>(view.num_dims)),
                                            [](std::int64_t extent) { return extent < 0; });
  long double bytes = negative ? 64 : span_bytes(view);
  if (!drawn.wrong && (bytes > kMostBytes || bytes < 0)) {
    // Memory of such a size would not be here, so the strides would be a lie that no library can see.
    set_contiguous(view);
    bytes = span_bytes(view);
    if (bytes > kMostBytes) drawn.wrong = true;
  }
  give_memory(input, drawn, bytes);
  return drawn;
}

Drawn draw_list(Input& input, Dtype dtype, std::int64_t entries) {
  Drawn drawn = draw_tensor(input, {.dtype = dtype, .rows = 1, .columns = entries});
  TensorView& view = drawn.view;
  if (drawn.wrong) return drawn;
  for (std::size_t i = 0; i + 1 < view.shape.size(); ++i) {  // the columns are the entries
    view.shape[i] = view.shape[i + 1];
    view.strides[i] = view.strides[i + 1];
  }
  --view.num_dims;
  drawn.wrong = view.num_elements() > 0 && drawn.memory.empty();  // there were no rows
  return drawn;
}

}  // namespace tokenyard::fuzz
