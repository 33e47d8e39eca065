// SPDX-License-Identifier: Apache-2.0
// How ranks agree before they make something together: each brings a text, or the reason why it cannot, and all
// succeed or all throw.
// Thread rule: as the group's, one thread at a time per rank.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tokenyard/error.h"
#include "tokenyard/group.h"
#include "tokenyard/params.h"

#include "communication/backend.h"

namespace tokenyard::communication {

[[nodiscard]] Fields fields_of(const MoeParams& params);
// One "field=value" line for each.
[[nodiscard]] std::string joined(const Fields& fields);

// The error with "rank N: " before its message, once.
[[nodiscard]] Error named(const Error& error, int rank);
// What a failed collective is on the data path.
[[nodiscard]] Status status_of(const Error& error, int rank, Phase phase);

// Collective, one all_gather: every rank's text. A rank that brings a `failure` throws it, also when the others do not
// come; the others then throw kPeerFailed with its reason. Texts must not begin with '!'.
std::vector<std::string> gather_texts(const Group& group,
                                      const std::string& text,
                                      const std::optional<Error>& failure = std::nullopt);
// Throws kMismatch with the first field in which `joined` texts differ and each rank's value.
void require_equal(const std::vector<std::string>& texts, int rank);

}  // namespace tokenyard::communication
