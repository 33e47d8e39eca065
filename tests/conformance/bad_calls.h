// SPDX-License-Identifier: Apache-2.0
// Calls that one rank makes wrongly, as data: what is wrong, which Error it deserves and what its message must hold.
// Thread rule: each BadDispatch belongs to one rank.
#pragma once

#include <functional>
#include <list>
#include <string>
#include <vector>

#include "tokenyard/backends.h"
#include "tokenyard/error.h"

#include "support/world.h"

namespace tokenyard::support {

// A right call of one rank, to be spoilt. The tensors that spoiling brings live in `storage`.
struct BadDispatch {
  const World* world = nullptr;
  int rank = 0;
  DispatchInput input{};
  DispatchOptions options{};
  std::list<Tensor> storage{};
  std::vector<TensorView> extras{};
  std::vector<std::int64_t> numbers{};

  TensorView add(Dtype dtype, std::vector<std::int64_t> shape);

  [[nodiscard]] std::int64_t num_tokens() const { return world->rank(rank).num_tokens; }
};

struct BadDispatchCase {
  std::string name;
  ErrorCode code = ErrorCode::kInvalidArgument;
  std::vector<std::string> message_parts;
  std::function<void(BadDispatch&)> spoil;
  std::function<bool(const Contract&)> applies = [](const Contract&) { return true; };
};

// For `all_to_all_spec(3)`: 3 experts, top-3, rows of 24 bf16, 6 tokens.
[[nodiscard]] const std::vector<BadDispatchCase>& bad_dispatches();

}  // namespace tokenyard::support
