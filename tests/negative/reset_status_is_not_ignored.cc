// SPDX-License-Identifier: Apache-2.0
// A reset that failed must not go unseen.
#include "tokenyard/tokenyard.h"

bool go(tokenyard::Communication& communication) {
#ifdef BAD
  communication.reset();
  return true;
#else
  return communication.reset().ok();
#endif
}
