// SPDX-License-Identifier: Apache-2.0
// What the program needs of CUDA. In builds without it src/cli/without_cuda.cc refuses each of these.
// Thread rule: cuda_devices is for the main thread; a rank's device is for the thread that made it.
#pragma once

#include <memory>
#include <string>
#include <vector>

namespace tokenyard::cli {

class RankDevice;

struct CudaDevices {
  std::vector<std::string> names;
  int num_sms = 0;  // multiprocessors of the device that has fewest
};

// The machine's devices, of which there is at least one. Asked in a process of its own; this one is made ready for
// ranks that are threads. Throws kUnsupported with the reason where there is none.
[[nodiscard]] CudaDevices cuda_devices();

// Makes `device` the current one of the thread.
[[nodiscard]] std::unique_ptr<RankDevice> make_cuda_rank_device(int device, bool mapped_host);

}  // namespace tokenyard::cli
