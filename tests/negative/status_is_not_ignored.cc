// SPDX-License-Identifier: Apache-2.0
// Whoever drops a Status does not learn of a lost peer.
#include "tokenyard/tokenyard.h"

void go(tokenyard::Communication& communication, tokenyard::DispatchResult& result) {
#ifdef BAD
  communication.dispatch({}, {}, result);
#else
  (void)communication.dispatch({}, {}, result);
#endif
}
