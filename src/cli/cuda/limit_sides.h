// SPDX-License-Identifier: Apache-2.0
// Devices that are measured at once, each with buffers, a stream and words that others reach.
// Thread rule: one thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cli/cuda/limit_kernels.h"
#include "cli/cuda/stream_objects.h"
#include "engine/cuda/memory.h"

namespace tokenyard::cli {

// One device's part of a measurement.
struct Side {
  Side(int index, std::int64_t bytes);

  // Each word on a line of its own.
  [[nodiscard]] std::uint64_t* word(int index) const {
    return reinterpret_cast<std::uint64_t*>(words.get() + std::int64_t{128} * index);
  }

  [[nodiscard]] std::uint32_t* failed() const { return reinterpret_cast<std::uint32_t*>(word(4)); }

  [[nodiscard]] std::uint32_t* sink() const { return reinterpret_cast<std::uint32_t*>(word(5)); }

  int device;
  int processors = 0;
  std::int64_t bytes;  // of a buffer
  StreamObject<cudaStream_t> stream = make_stream();
  TimedEvent start{}, end{};
  engine::cuda::DeviceMemory source, target, words;
};

using Sides = std::vector<std::unique_ptr<Side>>;

// Of one buffer: 1 GiB, or less where one of the devices is short of memory.
[[nodiscard]] std::int64_t buffer_bytes(const std::vector<int>& devices);

struct Figure {
  std::string_view name;
  int blocks = 0;                              // 0: not by blocks
  std::int64_t bytes = 0;                      // of each device
  std::vector<double> gigabytes_per_second{};  // of each device, at once; empty: `microseconds` tells
  double microseconds = 0;

  [[nodiscard]] double each_way() const;
};

// What a side does, with the next one of the ring.
using Work = std::function<void(const Side& own, const Side& other)>;

void put_on_streams(const Sides& sides, const Work& work);

// The microseconds of each side for what `work` puts on its stream, all sides at once; warmed by a turn before. Throws
// kTimeout when a side waited in vain.
[[nodiscard]] std::vector<double> time_sides(const Sides& sides, const Work& work);

// How fast `bytes` of each side move, again and again.
[[nodiscard]] Figure rate(std::string_view name, int blocks, const Sides& sides, const Work& work);

// Lets every two devices reach each other. Says what keeps them from it; empty when nothing does.
[[nodiscard]] std::string connect(const std::vector<int>& devices);

}  // namespace tokenyard::cli
