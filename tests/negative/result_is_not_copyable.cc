// SPDX-License-Identifier: Apache-2.0
// A result holds its handle.
#include <utility>

#include "tokenyard/tokenyard.h"

tokenyard::DispatchResult take(tokenyard::DispatchResult& result) {
#ifdef BAD
  return result;
#else
  return std::move(result);
#endif
}
