// SPDX-License-Identifier: Apache-2.0
// Misuse that one rank sees is announced: the peers, which may already wait for this rank's part of the operation, are
// told that it gives up, and only then does the call throw. So epochs stay aligned and nobody waits in vain.
#pragma once

#include "communication/core.h"

namespace tokenyard::communication {

template <class Checks, class Announce>
void Core::announcing_misuse(const Stream& stream, Checks&& checks, Announce&& announce) const {
  const auto tell = [&] {
    if (engine_->records(stream)) return;  // nothing runs, so nobody waits
    engine_->turn_to(stream);
    announce();
  };
  try {
    checks();
  } catch (const Error& error) {
    tell();
    throw with_rank(error);
  } catch (const std::exception& exception) {  // no memory for a larger call
    tell();
    throw failure_of(exception);
  }
}

}  // namespace tokenyard::communication
