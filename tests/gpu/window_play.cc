// SPDX-License-Identifier: Apache-2.0
#include "gpu/window_play.h"

#include <string>
#include <vector>

#include "fabric/cuda/driver.h"
#include "gpu/gpu_ranks.h"
#include "gpu/pattern.h"
#include "support/check.h"

namespace tokenyard::gpu_tests {
namespace {

using support::check_bytes;
using support::check_eq;

// Whose turn it is, and how it writes.
struct Turn {
  int writer = 0;
  bool by_kernel = false;
};

std::uint64_t seed_of(const Turn& turn, int owner) {
  return static_cast<std::uint64_t>((turn.writer * 2 + (turn.by_kernel ? 1 : 0)) * 1000 + owner + 1);
}

void write_all(const Group& group, const fabric::Window& window, const Turn& turn) {
  for (int peer = 0; peer < group.num_ranks(); ++peer) {
    const std::uint64_t seed = seed_of(turn, peer);
    if (turn.by_kernel) {
      store_pattern(window.peer(peer), window.bytes(), seed);
    } else {
      copy_to_device(window.peer(peer), pattern(seed, window.bytes()));
    }
  }
}

void look_at_all(const Group& group, const fabric::Window& window, const Turn& turn) {
  const std::string what =
      std::string(turn.by_kernel ? "stores" : "copies") + " of rank " + std::to_string(turn.writer);
  const std::vector<std::byte> expected = pattern(seed_of(turn, group.rank()), window.bytes());
  check_bytes(copy_from_device(window.own(), window.bytes()).data(), expected, what);
  for (int peer = 0; peer < group.num_ranks(); ++peer) {
    check_eq(count_differences(window.peer(peer), window.bytes(), seed_of(turn, peer)), 0,
             what + " to the window of rank " + std::to_string(peer) + ", bytes that differ");
  }
}

}  // namespace

std::unique_ptr<fabric::Window> make_window(const Group& group, const fabric::WindowRequest& request) {
  fabric::cuda::require(cudaSetDevice(request.device.index), "cudaSetDevice");
  auto window = fabric::find_fabric(DeviceKind::kCuda).allocate(request);
  window->connect(group, kDeadline);
  group.barrier(kDeadline);
  return window;
}

void play_with_window(const Group& group, const fabric::Window& window) {
  const std::vector<std::byte> zeros(static_cast<std::size_t>(window.bytes()));
  check_bytes(copy_from_device(window.own(), window.bytes()).data(), zeros, "a new window");
  check_eq(window.peer(group.rank()), window.own(), "the own window among the peers'");
  group.barrier(kDeadline);
  for (int writer = 0; writer < group.num_ranks(); ++writer) {
    for (const bool by_kernel : {false, true}) {
      const Turn turn{.writer = writer, .by_kernel = by_kernel};
      if (group.rank() == writer) write_all(group, window, turn);
      group.barrier(kDeadline);
      look_at_all(group, window, turn);
      group.barrier(kDeadline);
    }
  }
}

std::uint64_t last_seed(int num_ranks, int owner) {
  return seed_of({.writer = num_ranks - 1, .by_kernel = true}, owner);
}

}  // namespace tokenyard::gpu_tests
