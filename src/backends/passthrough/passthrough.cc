// SPDX-License-Identifier: Apache-2.0
// Nothing to manage: the MoE backend does its own dispatch and combine (the seed's PassThroughAll2AllManager).
#include "tokenyard/error.h"

#include "communication/backend.h"

namespace tokenyard::registry {
namespace {

constexpr std::string_view kReason =
    "there is nothing to create: with this backend the MoE kernels dispatch and combine tokens themselves";

communication::Plan plan(const MoeParams& /*params*/, const BackendConfig& /*config*/, int /*num_ranks*/) {
  throw Error(ErrorCode::kUnsupported, "`passthrough`: " + std::string(kReason));
}

communication::Fields fields(const BackendConfig& /*config*/) {
  return {};
}

}  // namespace

const communication::Backend& passthrough();

const communication::Backend& passthrough() {
  static const communication::Backend backend{
      .info = {.name = "passthrough",
               .seed_class = "PassThroughAll2AllManager",
               .aliases = {},
               .use_when = "the MoE kernels move tokens themselves, and the engine only needs a name for that",
               .contract = {},
               .default_config = PassthroughConfig{},
               .moves_tokens = false,
               .unusable_reason = kReason},
      .plan = plan,
      .fields = fields,
  };
  return backend;
}

}  // namespace tokenyard::registry
