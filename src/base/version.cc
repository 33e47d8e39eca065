// SPDX-License-Identifier: Apache-2.0
#include "tokenyard/version.h"

namespace tokenyard {

std::string_view version() {
  return "0.1.0";
}

}  // namespace tokenyard
