// SPDX-License-Identifier: Apache-2.0
// What a caller may pass to dispatch: views with any shape, strides, dtype and pointer, and any options, on a
// communication of one rank. Wrong ones are an Error; right ones give exactly the rows that were sent; nothing outside
// a tensor is read, which the address sanitizer watches; and after every call a good round works.
#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "tokenyard/communication.h"

#include "fuzz/input.h"
#include "fuzz/target.h"
#include "support/backends.h"
#include "support/check.h"
#include "support/round.h"
#include "support/world.h"

namespace tokenyard::fuzz {
namespace {

using support::check;
using support::check_eq;

constexpr std::int64_t kMaxTokens = 6;
constexpr std::int64_t kExtraBytes = 24;
// Larger tensors have no memory here: the library must have refused them before it reads a row.
constexpr std::int64_t kMostBytes = 1 << 16;

struct Rank {
  support::World world;
  Communication communication;
  DispatchResult result;  // of the good rounds
};

std::unique_ptr<Rank> make_rank(std::string_view backend, DispatchFormat format) {
  support::WorldSpec spec{.params = {.num_experts = 5,
                                     .top_k = 3,
                                     .hidden_size = 20,
                                     .max_tokens_per_rank = kMaxTokens,
                                     .dispatch_format = format},
                          .num_tokens = {4}};
  if (support::takes_extras(find_backend(backend).contract)) spec.extra_row_bytes = {kExtraBytes};
  if (backend == "one_sided") spec.eplb_entries = 5;
  return std::make_unique<Rank>(
      Rank{.world = support::make_world(spec),
           .communication = support::communication_for(Group::in_process(1).front(), backend, spec),
           .result = {}});
}

std::vector<std::unique_ptr<Rank>>& all_ranks() {
  static std::vector<std::unique_ptr<Rank>> all = [] {
    std::vector<std::unique_ptr<Rank>> made;
    for (const std::string_view backend : support::kMovingBackends) {
      made.push_back(make_rank(backend, DispatchFormat::kNone));
      made.push_back(make_rank(backend, DispatchFormat::kFp8Block128));
    }
    return made;
  }();
  return all;
}

// A view, its memory of exactly the size it says, and what is known to be wrong with it.
struct Drawn {
  TensorView view{};
  std::vector<std::byte> memory;
  bool wrong = false;
};

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

struct Wanted {
  Dtype dtype = Dtype::kU8;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
};

void set_contiguous(TensorView& view) {
  std::int64_t stride = 1;
  for (std::size_t i = static_cast<std::size_t>(view.num_dims); i-- > 0;) {
    view.strides[i] = stride;
    stride *= view.shape[i];
  }
}

// One change; returns whether no call may take the view any more.
bool spoil(Input& input, TensorView& view) {
  const auto last = static_cast<std::size_t>(view.num_dims - 1);
  switch (input.below(9)) {
    case 0:
      view.dtype = static_cast<Dtype>(input.below(12));
      return false;
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
      view.strides[0] = input.hostile<std::int64_t>();
      // Rows of no bytes may lie anywhere.
      return view.shape[0] > 1 && view.strides[0] < 0 && view.row_bytes() > 0;
  }
}

Drawn draw_tensor(Input& input, const Wanted& wanted) {
  Drawn drawn;
  drawn.view = TensorView(nullptr, wanted.dtype, {wanted.rows, wanted.columns});
  if (input.flip()) drawn.view.strides[0] += input.below(5);
  for (auto left = std::max<std::int64_t>(input.below(8) - 5, 0); left > 0 && !drawn.wrong; --left)
    drawn.wrong = spoil(input, drawn.view);
  if (drawn.wrong && (drawn.view.num_dims < 1 || drawn.view.num_dims > kMaxDims)) {
    drawn.memory.resize(64);
    drawn.view.data = drawn.memory.data();
    return drawn;
  }
  const bool negative =
      std::ranges::any_of(std::span(drawn.view.shape).first(static_cast<std::size_t>(drawn.view.num_dims)),
                          [](std::int64_t extent) { return extent < 0; });
  long double bytes = negative ? 64 : span_bytes(drawn.view);
  if (!drawn.wrong && (bytes > kMostBytes || bytes < 0)) {
    // Memory of such a size would not be here, so the strides would be a lie that no library can see.
    set_contiguous(drawn.view);
    bytes = span_bytes(drawn.view);
    if (bytes > kMostBytes) drawn.wrong = true;
  }
  drawn.memory.resize(static_cast<std::size_t>(std::clamp<long double>(bytes, 0, kMostBytes)));
  for (std::size_t i = 0; i < drawn.memory.size(); ++i)
    drawn.memory[i] = static_cast<std::byte>(i * 31 + 1);
  drawn.view.data = drawn.memory.data();
  if (!drawn.memory.empty() && input.below(64) == 63) {
    drawn.view.data = nullptr;
    drawn.wrong = true;
  }
  return drawn;
}

// Ids that are experts or -1, so that the other arguments are looked at; one now and then is not.
void put_ids(Input& input, const MoeParams& params, Drawn& ids) {
  const TensorView& view = ids.view;
  const bool takes_ids = view.dtype == Dtype::kI32 || view.dtype == Dtype::kI64;
  if (ids.wrong || !takes_ids || view.num_dims != 2 || ids.memory.empty()) return;
  const auto element = static_cast<std::size_t>(size_of(view.dtype));
  for (std::int64_t row = 0; row < view.shape[0]; ++row) {
    for (std::int64_t slot = 0; slot < view.shape[1]; ++slot) {
      std::int64_t id = input.below(params.num_experts + 1) - 1;
      if (input.below(64) == 1) id = input.hostile<std::int64_t>();
      const auto at = static_cast<std::size_t>(row * view.strides[0] + slot * view.strides[1]) * element;
      if (at + element <= ids.memory.size()) std::memcpy(ids.memory.data() + at, &id, element);
    }
  }
}

struct Call {
  DispatchInput input{};
  DispatchOptions options{};
  Drawn hidden, ids, weights, scale, logits, stats;
  std::vector<Drawn> extras;
  std::vector<TensorView> extra_views;
  std::vector<std::int64_t> numbers;
  DispatchResult into{};
  Drawn into_hidden;
  Handle dead;
  bool wrong = false;
};

// Whether a member is given: what the contract has no use for is rare, because it hides everything else.
bool is_given(Input& input, bool taken) {
  return taken ? input.below(3) == 1 : input.below(64) == 63;
}

// In [0, most], or a hostile number now and then.
std::int64_t draw_number(Input& input, std::int64_t most) {
  return input.below(4) == 3 ? input.hostile<std::int64_t>() : input.below(most + 1);
}

void draw_options(Input& input, const Contract& contract, Call& call, std::int64_t tokens) {
  DispatchOptions& options = call.options;
  if (is_given(input, contract.takes_runtime_max_tokens)) {
    options.runtime_max_tokens_per_rank = draw_number(input, kMaxTokens);
  }
  if (is_given(input, contract.takes_num_worst_tokens)) options.num_worst_tokens = draw_number(input, kMaxTokens);
  if (is_given(input, contract.takes_expert_alignment)) {
    options.expert_alignment = input.flip() ? static_cast<int>(1 + input.below(128)) : input.hostile<int>();
  }
  if (is_given(input, contract.takes_num_tokens_per_rank)) {
    call.numbers.assign(input.below(8) == 7 ? 2 : 1, input.below(4) == 3 ? input.hostile<std::int64_t>() : tokens);
    options.num_tokens_per_rank = call.numbers;
  }
  if (input.below(16) == 15) options.num_sms = input.hostile<int>();
  if (input.below(64) == 63) {
    options.replay = &call.dead;  // of no dispatch
    call.wrong = true;
  }
}

class MemberDraw {
 public:
  MemberDraw(Input& input, Call& call) : input_(input), call_(call) {}

  void operator()(Drawn& drawn, TensorView& member, const Wanted& wanted) {
    drawn = draw_tensor(input_, wanted);
    member = drawn.view;
    call_.wrong = call_.wrong || drawn.wrong;
  }

 private:
  Input& input_;
  Call& call_;
};

void draw_stats(Input& input, Call& call) {
  call.stats = draw_tensor(input, {Dtype::kI32, 1, 5});
  call.wrong = call.wrong || call.stats.wrong;
  TensorView& view = call.stats.view;
  if (!call.stats.wrong) {  // the columns are the entries
    for (std::size_t i = 0; i + 1 < view.shape.size(); ++i) {
      view.shape[i] = view.shape[i + 1];
      view.strides[i] = view.strides[i + 1];
    }
    --view.num_dims;
  }
  call.input.eplb_local_stats = view;
}

void draw_extras(Input& input, Call& call, std::int64_t tokens) {
  call.extras.resize(static_cast<std::size_t>(input.below(4) == 3 ? input.below(20) : 1));
  for (Drawn& extra : call.extras) {
    extra = draw_tensor(input, {static_cast<Dtype>(input.below(9)), tokens, input.below(5)});
    call.wrong = call.wrong || extra.wrong;
    call.extra_views.push_back(extra.view);
  }
  call.input.extra_payloads = call.extra_views;
}

void draw_members(Input& input, const Rank& rank, Call& call) {
  const MoeParams& params = rank.world.spec.params;
  const Contract& contract = rank.communication.contract();
  const bool quantised = params.dispatch_format != DispatchFormat::kNone && input.flip();
  const std::int64_t tokens = input.below(16) == 15 ? kMaxTokens + 1 : input.below(kMaxTokens + 1);
  MemberDraw draw(input, call);
  draw(call.hidden, call.input.hidden_states, {quantised ? Dtype::kF8e4m3 : params.dtype, tokens, params.hidden_size});
  if (input.below(16) != 15) {
    draw(call.ids, call.input.topk_ids, {input.flip() ? Dtype::kI64 : Dtype::kI32, tokens, params.top_k});
    put_ids(input, params, call.ids);
  }
  if (is_given(input, true)) draw(call.weights, call.input.topk_weights, {Dtype::kF32, tokens, params.top_k});
  if (quantised) draw(call.scale, call.input.hidden_states_scale, {Dtype::kF32, tokens, 1});
  if (is_given(input, contract.takes_router_logits)) {
    draw(call.logits, call.input.router_logits, {Dtype::kF32, tokens, params.num_experts});
  }
  if (is_given(input, contract.takes_eplb_stats)) draw_stats(input, call);
  if (is_given(input, contract.takes_extra_payloads)) draw_extras(input, call, tokens);
  draw_options(input, contract, call, tokens);
  if (is_given(input, true)) {
    const std::int64_t rows = std::max<std::int64_t>(kMaxTokens + 1 - input.below(3), 0);
    draw(call.into_hidden, call.into.hidden_states, {call.input.hidden_states.dtype, rows, params.hidden_size});
    call.options.into = &call.into;
  }
}

std::int64_t id_at(const TensorView& ids, std::int64_t row, std::int64_t slot) {
  const auto* bytes = ids.as<const std::byte>() + (row * ids.strides[0] + slot * ids.strides[1]) * size_of(ids.dtype);
  std::int64_t wide = 0;
  std::int32_t narrow = 0;
  ids.dtype == Dtype::kI64 ? std::memcpy(&wide, bytes, sizeof wide) : std::memcpy(&narrow, bytes, sizeof narrow);
  return ids.dtype == Dtype::kI64 ? wide : narrow;
}

// The rows that a rank that is alone must get: in order, those of tokens with an expert, or all.
void check_rows_came(const Rank& rank, const Call& call, const DispatchResult& result) {
  const Contract& contract = rank.communication.contract();
  const TensorView& sent = call.input.hidden_states;
  const bool routed = contract.id_space != IdSpace::kCargo;
  const bool rank_major = contract.output_layout == OutputLayout::kRankMajor;
  std::int64_t row = 0;
  for (std::int64_t token = 0; token < sent.shape[0]; ++token) {
    bool travels = !routed;
    for (std::int64_t slot = 0; routed && slot < call.input.topk_ids.shape[1]; ++slot)
      travels = travels || id_at(call.input.topk_ids, token, slot) >= 0;
    if (!travels) continue;
    const std::int64_t place = rank_major ? token : row;
    ++row;
    if (row > result.counts.num_rows) continue;  // beyond num_worst_tokens
    const std::byte* from = sent.as<const std::byte>() + token * sent.row_stride_bytes();
    support::check_bytes(support::row_of(result.hidden_states, place),
                         {from, static_cast<std::size_t>(sent.row_bytes())}, "row " + std::to_string(place));
  }
  const std::int64_t rows = call.options.num_worst_tokens.value_or(row);
  check(rank_major || result.hidden_states.shape[0] == rows, "the result is " + result.hidden_states.describe());
  check_eq(result.counts.num_rows + result.counts.dropped_rows, row, "rows of the result");
  check_eq(result.counts.tokens_per_source.at(0), sent.shape[0], "tokens of the source");
}

}  // namespace

void run_target(std::span<const std::byte> bytes) {
  Input input(bytes);
  auto& ranks = all_ranks();
  Rank& rank = *ranks[static_cast<std::size_t>(input.below(std::ssize(ranks)))];
  Call call;
  draw_members(input, rank, call);
  DispatchResult result;
  try {
    const Status status = rank.communication.dispatch(call.input, call.options, result);
    check(!call.wrong, "a dispatch takes what is wrong: hidden_states " + call.input.hidden_states.describe());
    check(status.ok() || status.code == StatusCode::kOverflow, "a rank that is alone waits: " + status.message());
    if (status.ok()) check_rows_came(rank, call, result);
  } catch (const Error& error) {
    const ErrorCode code = error.code();
    check(code == ErrorCode::kInvalidArgument || code == ErrorCode::kCapacity || code == ErrorCode::kInvalidState,
          "an Error of another kind: " + std::string(name(code)) + ": " + error.what());
  }
  result.handle = Handle();
  (void)support::play_round(rank.communication, rank.world, {}, rank.result);
}

}  // namespace tokenyard::fuzz
