// SPDX-License-Identifier: Apache-2.0
// How the payloads of one dispatch share the space of its rows: one plane each, back to back.
//
// The space is sized at creation. The split depends on the widths of one call; widths that differ between ranks are
// found by the digest, and before rows of different sources can lie in one area (docs/protocol.md).
#pragma once

#include <array>
#include <cstdint>

#include "protocol/formats.h"
#include "protocol/host_device.h"

namespace tokenyard::protocol {

inline constexpr int kMaxExtraPayloads = 16;

enum PlaneIndex : int { kHiddenPlane, kScalePlane, kIdsPlane, kWeightsPlane, kLogitsPlane, kFirstExtraPlane };

inline constexpr int kMaxPlanes = kFirstExtraPlane + kMaxExtraPayloads;
inline constexpr std::int64_t kPlaneAlignment = 128;
inline constexpr std::int64_t kRowAlignment = 16;

struct Plane {
  std::int64_t offset = 0;
  std::int64_t stride = 0;
  std::int64_t row_bytes = 0;  // 0: the payload is not there
};

struct PlanePlan {
  std::array<Plane, kMaxPlanes> planes{};
  std::int64_t bytes = 0;
};

// Rows of the library's own planes start at multiples of 16 bytes; extras are dense, as their owners expect.
TOKENYARD_HD constexpr std::int64_t plane_stride(int plane, std::int64_t row_bytes) {
  return plane < kFirstExtraPlane ? align_up(row_bytes, kRowAlignment) : row_bytes;
}

TOKENYARD_HD constexpr PlanePlan plan_planes(const std::array<std::int64_t, kMaxPlanes>& row_bytes,
                                             std::int64_t num_rows) {
  PlanePlan plan;
  for (int i = 0; i < kMaxPlanes; ++i) {
    const std::int64_t bytes = row_bytes[static_cast<unsigned>(i)];
    if (bytes == 0) continue;
    const std::int64_t stride = plane_stride(i, bytes);
    plan.planes[static_cast<unsigned>(i)] = {plan.bytes, stride, bytes};
    plan.bytes = align_up(plan.bytes + stride * num_rows, kPlaneAlignment);
  }
  return plan;
}

// Room for `num_rows` rows whose library planes take `row_capacity` bytes (already rounded up) and whose extras take
// `extra_capacity`: no split of them into planes needs more.
TOKENYARD_HD constexpr std::int64_t payload_capacity(std::int64_t num_rows,
                                                     std::int64_t row_capacity,
                                                     std::int64_t extra_capacity) {
  return align_up(num_rows * (row_capacity + extra_capacity), kPlaneAlignment) + kMaxPlanes * kPlaneAlignment;
}

}  // namespace tokenyard::protocol
