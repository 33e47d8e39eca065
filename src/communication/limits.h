// SPDX-License-Identifier: Apache-2.0
// What the arguments of a call are checked against, and its rows sized by. Plain data.
#pragma once

#include "tokenyard/params.h"
#include "tokenyard/tensor.h"

#include "communication/backend.h"

namespace tokenyard::communication {

struct Limits {
  const Backend* backend = nullptr;
  MoeParams params{};
  Plan plan{};
  int rank = 0;
  int num_ranks = 1;
  Device device{};             // whose memory tensors are in: the window's
  bool narrower_rows = false;  // combine may have fewer elements a row than params.hidden_size
};

}  // namespace tokenyard::communication
