// SPDX-License-Identifier: Apache-2.0
// A dtype is not an integer: a byte count in its place is refused.
#include "tokenyard/tokenyard.h"

tokenyard::TensorView go(void* data) {
#ifdef BAD
  return tokenyard::TensorView(data, 2, {4, 8});
#else
  return tokenyard::TensorView(data, tokenyard::Dtype::kBf16, {4, 8});
#endif
}
