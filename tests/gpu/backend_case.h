// SPDX-License-Identifier: Apache-2.0
// Which backends the tests of graphs, several communications and faults drive on GPUs: a line each.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "tokenyard/backends.h"
#include "tokenyard/dispatch.h"

#include "gpu/device_ranks.h"
#include "support/tensor.h"
#include "support/world.h"

namespace tokenyard::gpu_tests {

// Whose rounds can be captured, and look alike: rank-major rows.
inline const std::array kCapturableOnGpu{std::string_view("one_sided"), std::string_view("two_sided")};

struct BackendCase {
  std::string_view backend;
  Shape shape;
};

inline std::vector<BackendCase> cases_of(const std::vector<Shape>& shapes) {
  std::vector<BackendCase> cases;
  for (const std::string_view backend : kCapturableOnGpu) {
    const int multiple = find_backend(backend).contract.num_experts_multiple_of;
    for (const Shape& shape : shapes) {
      if (shape.num_experts % multiple == 0) cases.push_back({backend, shape});
    }
  }
  return cases;
}

inline std::string title_of_case(const BackendCase& of) {
  return std::string(of.backend) + "_" + title_of(of.shape) + "_" + std::to_string(of.shape.max_tokens) + "_tokens";
}

inline std::ostream& operator<<(std::ostream& out, const BackendCase& of) {
  return out << title_of_case(of);
}

// Expert output in the layout of the result, whatever stands in it.
[[nodiscard]] inline support::Tensor expert_output_for(const Shape& shape, const DispatchResult& result) {
  const TensorView& rows = result.hidden_states;
  std::vector<std::int64_t> dims(rows.shape.begin(), rows.shape.begin() + rows.num_dims - 1);
  dims.push_back(shape.hidden_size);
  return {shape.dtype, dims};
}

// A world in which each rank has some number of tokens up to `most`, none now and then.
inline support::World world_up_to(const Shape& shape, std::int64_t most, std::uint64_t seed) {
  support::WorldSpec spec{.params = params_of(shape),
                          .num_ranks = shape.num_ranks,
                          .skew = static_cast<support::Skew>(seed % support::kNumSkews),
                          .seed = seed};
  for (int rank = 0; rank < shape.num_ranks; ++rank) {
    const auto drawn = static_cast<std::int64_t>((seed * 7919 + static_cast<std::uint64_t>(rank) * 104729) % 1009);
    spec.num_tokens.push_back((seed + static_cast<std::uint64_t>(rank)) % 5 == 0 ? most : drawn % (most + 1));
  }
  return support::make_world(spec);
}

}  // namespace tokenyard::gpu_tests
