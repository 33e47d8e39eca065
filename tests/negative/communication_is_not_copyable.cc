// SPDX-License-Identifier: Apache-2.0
// Two copies of a communication would send under one epoch.
#include <utility>

#include "tokenyard/tokenyard.h"

tokenyard::Communication take(tokenyard::Communication& communication) {
#ifdef BAD
  return communication;
#else
  return std::move(communication);
#endif
}
