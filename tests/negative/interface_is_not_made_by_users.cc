// SPDX-License-Identifier: Apache-2.0
// Interfaces come from a communication only.
#include "tokenyard/tokenyard.h"

#ifdef BAD
tokenyard::SmBudget make() {
  return tokenyard::SmBudget(4);
}
#else
tokenyard::SmBudget* make(tokenyard::Communication& communication) {
  return communication.get<tokenyard::SmBudget>();
}
#endif
