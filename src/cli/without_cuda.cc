// SPDX-License-Identifier: Apache-2.0
// In place of src/cli/cuda, for builds without CUDA.
#include "tokenyard/error.h"

#include "cli/cuda/devices.h"
#include "cli/cuda/limits.h"
#include "cli/rank_device.h"

namespace tokenyard::cli {
namespace {

[[noreturn]] void refuse() {
  throw Error(ErrorCode::kUnsupported,
              "this program was built without CUDA: --engine cuda needs one configured with TOKENYARD_CUDA=ON");
}

}  // namespace

CudaDevices cuda_devices() {
  refuse();
}

std::unique_ptr<RankDevice> make_cuda_rank_device(int /*device*/, bool /*mapped_host*/) {
  refuse();
}

LinkLimit measure_link_limit(const EngineChoice& /*engine*/) {
  refuse();
}

int run_limits(const EngineChoice& /*engine*/, bool /*json*/) {
  refuse();
}

}  // namespace tokenyard::cli
