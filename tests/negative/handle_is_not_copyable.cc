// SPDX-License-Identifier: Apache-2.0
// A handle is used up by one combine, so there must be only one of it.
#include <utility>

#include "tokenyard/tokenyard.h"

tokenyard::Handle take(tokenyard::Handle& handle) {
#ifdef BAD
  return handle;
#else
  return std::move(handle);
#endif
}
