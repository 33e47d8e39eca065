// SPDX-License-Identifier: Apache-2.0
// TOKENYARD_HD marks functions that both machines run: plain C++ on the host, host and device code under nvcc.
#pragma once

#if defined(__CUDACC__)
  #define TOKENYARD_HD __host__ __device__
#else
  #define TOKENYARD_HD
#endif
