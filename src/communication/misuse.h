// SPDX-License-Identifier: Apache-2.0
// Misuse that one rank sees is announced: the peers, which may already wait for this rank's part of the operation, are
// told that it gives up, and only then does the call throw. So epochs stay aligned and nobody waits in vain.
#pragma once

#include "communication/core.h"

namespace tokenyard::communication {

template <class Checks, class Announce>
void Core::announcing_misuse(Checks&& checks, Announce&& announce) const {
  try {
    checks();
  } catch (const Error& error) {
    announce();
    throw with_rank(error);
  } catch (const std::exception& exception) {  // no memory for a larger call
    announce();
    throw failure_of(exception);
  }
}

}  // namespace tokenyard::communication
