// SPDX-License-Identifier: Apache-2.0
// One call of dispatch, and one of combine, out of the fuzzer's bytes: tensors and options of a rank that is alone.
// Thread rule: plain values; see input.h.
#pragma once

#include <cstdint>
#include <vector>

#include "tokenyard/communication.h"

#include "fuzz/drawn_tensor.h"
#include "fuzz/input.h"

namespace tokenyard::fuzz {

inline constexpr std::int64_t kMaxTokens = 6;
inline constexpr std::int64_t kExtraBytes = 24;

struct Call {
  DispatchInput input{};
  DispatchOptions options{};
  Drawn hidden, ids, weights, scale, logits, stats, routes, waits;
  std::vector<Drawn> extras;
  std::vector<TensorView> extra_views;
  std::vector<std::int64_t> numbers;
  DispatchResult into{};
  Drawn into_hidden;
  Handle dead;
  bool wrong = false;  // dispatch must refuse it
};

void draw_call(Input& input, const Communication& communication, Call& call);

struct CombineCall {
  CombineInput input{};
  Drawn rows, weights, output;
  bool wrong = false;  // combine must refuse it
};

// Of the round of `result`, whose dispatch was `call`.
void draw_combine(Input& input,
                  const Communication& communication,
                  const Call& call,
                  const DispatchResult& result,
                  CombineCall& combine);

}  // namespace tokenyard::fuzz
