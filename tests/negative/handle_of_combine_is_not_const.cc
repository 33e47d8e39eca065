// SPDX-License-Identifier: Apache-2.0
// Combine uses the handle up.
#include "tokenyard/tokenyard.h"

#ifdef BAD
using Taken = const tokenyard::Handle;
#else
using Taken = tokenyard::Handle;
#endif

tokenyard::Status go(tokenyard::Communication& communication, Taken& handle, tokenyard::TensorView& output) {
  return communication.combine(handle, {}, {}, output);
}
