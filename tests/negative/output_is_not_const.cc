// SPDX-License-Identifier: Apache-2.0
// The output of combine is written through its view, so a const view is refused.
#include "tokenyard/tokenyard.h"

tokenyard::Status go(tokenyard::Communication& communication,
                     tokenyard::Handle& handle,
                     const tokenyard::TensorView& given) {
#ifdef BAD
  return communication.combine(handle, {}, {}, given);
#else
  tokenyard::TensorView output = given;
  return communication.combine(handle, {}, {}, output);
#endif
}
