// SPDX-License-Identifier: Apache-2.0
// Replay takes a handle, not a result.
#include "tokenyard/tokenyard.h"

tokenyard::DispatchOptions go(const tokenyard::DispatchResult& result) {
#ifdef BAD
  return {.replay = &result};
#else
  return {.replay = &result.handle};
#endif
}
