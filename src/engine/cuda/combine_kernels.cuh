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

// Of rows as they cross; not all combines have `kLowPrecision` ones.
template <class Kernels, bool kLowPrecision = true>
auto combine_kernel(Dtype rows, Dtype output) {
  if constexpr (kLowPrecision) {
    if (rows == Dtype::kF8e4m3) return combine_kernel_to<Kernels, protocol::F8e4m3>(output);
  }
  switch (rows) {
    case Dtype::kBf16:
      return combine_kernel_to<Kernels, protocol::Bf16>(output);
    case Dtype::kF16:
      return combine_kernel_to<Kernels, protocol::F16>(output);
    default:
      return combine_kernel_to<Kernels, protocol::F32>(output);
  }
}

// Calls load(kernel) for each.
template <class Kernels, bool kLowPrecision = true, class Load>
void for_each_combine_kernel(const Load& load) {
  for (const Dtype rows : {Dtype::kBf16, Dtype::kF16, Dtype::kF32, Dtype::kF8e4m3}) {
    if (rows == Dtype::kF8e4m3 && !kLowPrecision) continue;
    for (const Dtype output : {Dtype::kBf16, Dtype::kF16, Dtype::kF32})
      load(reinterpret_cast<const void*>(combine_kernel<Kernels, kLowPrecision>(rows, output)));
  }
}

template <class Kernels, bool kLowPrecision = true>
void load_combine_kernels() {
  for_each_combine_kernel<Kernels, kLowPrecision>([](const void* kernel) {
    cudaFuncAttributes attributes{};
    check(cudaFuncGetAttributes(&attributes, kernel), "loading a kernel of combine");
  });
}

}  // namespace tokenyard::engine::cuda
