// SPDX-License-Identifier: Apache-2.0
// Windows in host memory: anonymous memory files, reached by direct pointer between ranks of one process and mapped
// from descriptors between processes of one host. Importers keep a window's memory alive, so a rank may free its own,
// or die, while others still look at it; the last one to go frees it.
#pragma once

#include <memory>

#include "fabric/window.h"

namespace tokenyard::fabric::host {

std::unique_ptr<Window> allocate_host_window(const WindowRequest& request);
Support probe_host_fabric();

inline constexpr FabricInfo kHostFabric{
    .name = "host",
    .description = "threads by direct pointer, processes of one host by shared memory files",
    .kind = DeviceKind::kCpu,
    .probe = probe_host_fabric,
    .allocate = allocate_host_window,
};

}  // namespace tokenyard::fabric::host
