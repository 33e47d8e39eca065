// SPDX-License-Identifier: Apache-2.0
// Arguments of on_host cannot be swapped unseen.
#include "tokenyard/tokenyard.h"

tokenyard::Group go() {
#ifdef BAD
  return tokenyard::Group::on_host(0, "name", 2);
#else
  return tokenyard::Group::on_host("name", 0, 2);
#endif
}
