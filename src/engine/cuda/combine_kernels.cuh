// SPDX-License-Identifier: Apache-2.0
// The kernel of a combine by the dtypes of its rows and its output. `Kernels::get<Wire, To>()` gives each, all of one
// type.
#pragma once

#include "engine/cuda/kernels.h"
#include "engine/cuda/tasks.h"
#include "protocol/casts.h"

namespace tokenyard::engine::cuda {

using CombineKernel = void (*)(CombineTask);

template <class Kernels, class Wire>
auto combine_kernel_to(Dtype output) {
  switch (output) {
    case Dtype::kBf16:
      return Kernels::template get<Wire, protocol::Bf16>();
    case Dtype::kF16:
      return Kernels::template get<Wire, protocol::F16>();
    default:
      return Kernels::template get<Wire, protocol::F32>();
  }
}

template <class Kernels>
auto combine_kernel(Dtype rows, Dtype output) {
  switch (rows) {
    case Dtype::kBf16:
      return combine_kernel_to<Kernels, protocol::Bf16>(output);
    case Dtype::kF16:
      return combine_kernel_to<Kernels, protocol::F16>(output);
    case Dtype::kF8e4m3:
      return combine_kernel_to<Kernels, protocol::F8e4m3>(output);
    default:
      return combine_kernel_to<Kernels, protocol::F32>(output);
  }
}

template <class Kernels>
void load_combine_kernels() {
  for (const Dtype rows : {Dtype::kBf16, Dtype::kF16, Dtype::kF32, Dtype::kF8e4m3}) {
    for (const Dtype output : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
      cudaFuncAttributes attributes{};
      check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(combine_kernel<Kernels>(rows, output))),
            "loading a kernel of combine");
    }
  }
}

}  // namespace tokenyard::engine::cuda
