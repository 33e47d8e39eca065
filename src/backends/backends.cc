// SPDX-License-Identifier: Apache-2.0
// The public functions about backends, and creation by config or name.
#include "tokenyard/backends.h"

#include <algorithm>
#include <array>
#include <memory>
#include <vector>

#include "tokenyard/communication.h"
#include "tokenyard/error.h"

#include "backends/registry.h"
#include "communication/byte_budget.h"
#include "communication/core.h"
#include "fabric/window.h"

namespace tokenyard {
namespace {

std::vector<BackendInfo> collect() {
  std::vector<BackendInfo> infos;
  for (const communication::Backend* backend : registry::all())
    infos.push_back(backend->info);
  return infos;
}

// Names of the seed pages' base classes, which users may try.
constexpr std::array<std::string_view, 2> kBaseClasses{"All2AllManagerBase", "DeepEPAll2AllManagerBase"};

communication::Plan plan_of(const MoeParams& params, const BackendConfig& config, int num_ranks) {
  return communication::plan_checked(registry::backend_of(config), params, config, num_ranks);
}

}  // namespace

std::span<const BackendInfo> backends() {
  static const std::vector<BackendInfo> infos = collect();
  return infos;
}

const BackendInfo& find_backend(std::string_view wanted) {
  std::string known;
  for (const BackendInfo& info : backends()) {
    if (wanted == info.name || wanted == info.seed_class ||
        std::ranges::find(info.aliases, wanted) != info.aliases.end()) {
      return info;
    }
    known += (known.empty() ? "" : ", ") + std::string(info.name);
  }
  if (std::ranges::find(kBaseClasses, wanted) != kBaseClasses.end()) {
    throw Error(ErrorCode::kInvalidArgument,
                std::string(wanted) + " is the seeds' base class and no backend; choose one of " + known);
  }
  throw Error(ErrorCode::kInvalidArgument, "no backend is called `" + std::string(wanted) + "`; there are " + known);
}

const BackendInfo& find_backend(const BackendConfig& config) {
  return find_backend(registry::backend_of(config).info.name);
}

Support probe(const BackendInfo& backend) {
  if (!backend.moves_tokens) return {Support::State::kUnusable, std::string(backend.unusable_reason)};
  return fabric::find_fabric(DeviceKind::kCpu).probe();
}

std::int64_t window_bytes(const MoeParams& params, const BackendConfig& config, int num_ranks) {
  const communication::Backend& backend = registry::backend_of(config);
  if (communication::byte_budget_of(backend, config) > 0) {
    return communication::plan_of_budget(backend, {params, config}, num_ranks).shape.budget_bytes;
  }
  return communication::window_bytes(plan_of(params, config, num_ranks));
}

std::int64_t output_bytes(const MoeParams& params, const BackendConfig& config, int num_ranks) {
  return communication::output_bytes(params, protocol::WindowLayout::of(plan_of(params, config, num_ranks).shape));
}

Communication create_communication(const Group& group,
                                   const MoeParams& params,
                                   const BackendConfig& config,
                                   const CommunicationOptions& options) {
  const communication::Backend& backend = registry::backend_of(config);
  if (!backend.info.moves_tokens) {
    throw Error(ErrorCode::kUnsupported,
                "`" + std::string(backend.info.name) + "`: " + std::string(backend.info.unusable_reason), group.rank());
  }
  return Communication(communication::Core::create(group, backend, params, config, options));
}

Communication create_communication(const Group& group,
                                   const MoeParams& params,
                                   std::string_view backend,
                                   const CommunicationOptions& options) {
  return create_communication(group, params, find_backend(backend).default_config, options);
}

}  // namespace tokenyard
