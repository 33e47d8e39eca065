// SPDX-License-Identifier: Apache-2.0
#include "cli/cuda/limits.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tokenyard/error.h"

#include "cli/cuda/limit_kernels.h"
#include "cli/cuda/stream_objects.h"
#include "cli/device_fields.h"
#include "engine/cuda/memory.h"

namespace tokenyard::cli {
namespace {

using engine::cuda::DeviceScope;
using engine::cuda::make_device_memory;
using fabric::cuda::require;

constexpr std::int64_t kBytes = std::int64_t{1} << 30;
constexpr int kRepeats = 5;
constexpr int kKernelsOfGraph = 200;
constexpr int kTurns = 10'000;
constexpr std::array kBlocks{8, 16, 48, 132};
// A link of the kind that the bounds are for carries more; see docs/performance.md.
constexpr double kSoundLink = 350;

int current(int device) {
  require(cudaSetDevice(device), "cudaSetDevice");
  return device;
}

// One device's part of a measurement.
struct Side {
  explicit Side(int index) : device(current(index)) {
    load_limit_kernels();
    require(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
    launch_stores(source.get(), kBytes, processors, stream.get());
    require(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize");
  }

  // Each word on a line of its own.
  [[nodiscard]] std::uint64_t* word(int index) const {
    return reinterpret_cast<std::uint64_t*>(words.get() + std::int64_t{128} * index);
  }

  [[nodiscard]] std::uint32_t* failed() const { return reinterpret_cast<std::uint32_t*>(word(4)); }

  [[nodiscard]] std::uint32_t* sink() const { return reinterpret_cast<std::uint32_t*>(word(5)); }

  int device;
  int processors = 0;
  StreamObject<cudaStream_t> stream = make_stream();
  TimedEvent start{}, end{};
  engine::cuda::DeviceMemory source = make_device_memory(device, kBytes);
  engine::cuda::DeviceMemory target = make_device_memory(device, kBytes);
  engine::cuda::DeviceMemory words = make_device_memory(device, std::int64_t{128} * 6);
};

using Sides = std::vector<std::unique_ptr<Side>>;

struct Figure {
  std::string_view name;
  int blocks = 0;                              // 0: not by blocks
  std::vector<double> gigabytes_per_second{};  // of each device, at once; empty: `microseconds` tells
  double microseconds = 0;

  [[nodiscard]] double each_way() const { return std::ranges::min(gigabytes_per_second); }
};

// What a side does, with the other one where there is one.
using Work = std::function<void(const Side& own, const Side& other)>;

void put(const Sides& sides, const Work& work) {
  for (std::size_t i = 0; i < sides.size(); ++i) {
    const DeviceScope scope(sides[i]->device);
    work(*sides[i], *sides[(i + 1) % sides.size()]);
  }
}

// The microseconds of each side for what `work` puts on its stream, all sides at once; warmed by a turn before.
std::vector<double> time_sides(const Sides& sides, const Work& work) {
  const auto wait = [&] {
    for (const auto& side : sides)
      require(cudaStreamSynchronize(side->stream.get()), "cudaStreamSynchronize");
  };
  put(sides, work);
  wait();
  for (std::size_t i = 0; i < sides.size(); ++i) {
    Side& own = *sides[i];
    const DeviceScope scope(own.device);
    own.start.record(own.stream.get());
    work(own, *sides[(i + 1) % sides.size()]);
    own.end.record(own.stream.get());
  }
  wait();
  std::vector<double> times;
  for (const auto& side : sides) {
    std::uint32_t failed = 0;
    require(cudaMemcpy(&failed, side->failed(), sizeof(failed), cudaMemcpyDefault), "cudaMemcpy");
    if (failed != 0) {
      throw Error(ErrorCode::kTimeout,
                  fmt::format("device {} waited in vain for a word of the other device", side->device));
    }
    times.push_back(side->end.microseconds_since(side->start));
  }
  return times;
}

Figure rate(std::string_view name, int blocks, const Sides& sides, const Work& work) {
  Figure figure{.name = name, .blocks = blocks};
  const std::vector<double> times = time_sides(sides, [&](const Side& own, const Side& other) {
    for (int i = 0; i < kRepeats; ++i)
      work(own, other);
  });
  for (const double time : times)
    figure.gigabytes_per_second.push_back(static_cast<double>(kBytes) * kRepeats / (time * 1e3));
  return figure;
}

// Of one kernel among many of a graph, which each side replays at once.
Figure kernel_in_graph(std::string_view name, const Sides& sides, const Work& work) {
  std::vector<StreamObject<cudaGraphExec_t>> graphs(sides.size());
  std::size_t next = 0;
  put(sides, [&](const Side& own, const Side& other) {
    graphs[next++] = capture_graph(own.stream.get(), [&] {
      for (int i = 0; i < kKernelsOfGraph; ++i)
        work(own, other);
    });
  });
  const std::vector<double> times = time_sides(sides, [&](const Side& own, const Side& /*other*/) {
    const auto at = std::ranges::find(sides, &own, [](const auto& side) { return side.get(); }) - sides.begin();
    launch(own.stream.get(), graphs[static_cast<std::size_t>(at)]);
  });
  return {.name = name, .gigabytes_per_second = {}, .microseconds = std::ranges::max(times) / kKernelsOfGraph};
}

PairWords ping_words(const Side& own, const Side& other) {
  return {.own = own.word(0), .peer = other.word(0), .epoch = own.word(1), .failed = own.failed()};
}

PairWords barrier_words(const Side& own, const Side& other) {
  return {.own = own.word(2), .peer = other.word(2), .epoch = own.word(3), .failed = own.failed()};
}

using Report = std::function<void(const Figure&)>;

void measure_local(const Sides& one, const Report& report) {
  Figure copy = rate("local_copy", 2 * one.front()->processors, one, [](const Side& own, const Side& /*other*/) {
    launch_copy(own.target.get(), own.source.get(), kBytes, 2 * own.processors, own.stream.get());
  });
  copy.gigabytes_per_second.front() *= 2;  // read and written
  report(copy);
  report(kernel_in_graph("empty_kernel", one,
                         [](const Side& own, const Side& /*other*/) { launch_nothing(own.stream.get()); }));
}

// Returns the best rate that both directions had at once.
double measure_link(const Sides& pair, const Report& report) {
  double best = 0;
  const auto link = [&](std::string_view name, int blocks, const Work& work) {
    const Figure figure = rate(name, blocks, pair, work);
    best = std::max(best, figure.each_way());
    report(figure);
  };
  link("copy_engine", 0, [](const Side& own, const Side& other) {
    require(cudaMemcpyPeerAsync(other.target.get(), other.device, own.source.get(), own.device,
                                static_cast<std::size_t>(kBytes), own.stream.get()),
            "cudaMemcpyPeerAsync");
  });
  for (const int blocks : kBlocks) {
    link("peer_stores", blocks, [blocks](const Side& own, const Side& other) {
      launch_stores(other.target.get(), kBytes, blocks, own.stream.get());
    });
  }
  for (const int blocks : kBlocks) {
    link("peer_bulk_stores", blocks, [blocks](const Side& own, const Side& other) {
      launch_bulk_stores(other.target.get(), kBytes, blocks, own.stream.get());
    });
  }
  for (const int blocks : kBlocks) {
    link("peer_loads", blocks, [blocks](const Side& own, const Side& other) {
      launch_loads(other.source.get(), kBytes, blocks, own.sink(), own.stream.get());
    });
  }
  const std::vector<double> turns = time_sides(pair, [&](const Side& own, const Side& other) {
    launch_ping_pong(ping_words(own, other), kTurns, &own == pair.front().get(), own.stream.get());
  });
  report({.name = "flag_one_way", .gigabytes_per_second = {}, .microseconds = std::ranges::max(turns) / kTurns / 2});
  report(kernel_in_graph("pair_barrier", pair, [](const Side& own, const Side& other) {
    launch_pair_barrier(barrier_words(own, other), own.stream.get());
  }));
  return best;
}

void print_json(const EngineChoice& engine, const Figure& figure) {
  nlohmann::ordered_json line{{"limit", figure.name}};
  add_devices(line, engine);
  if (figure.blocks > 0) line["blocks"] = figure.blocks;
  if (figure.gigabytes_per_second.empty()) {
    line["us"] = figure.microseconds;
  } else {
    line["bytes"] = kBytes;
    line["gb_per_s"] = figure.each_way();
    line["gb_per_s_of_each"] = figure.gigabytes_per_second;
  }
  fmt::print("{}\n", line.dump());
  std::fflush(stdout);
}

void print_line(const Figure& figure) {
  fmt::print("{:<18} {:>6} {:>14}\n", figure.name, figure.blocks > 0 ? std::to_string(figure.blocks) : "-",
             figure.gigabytes_per_second.empty() ? fmt::format("{:.2f} us", figure.microseconds)
                                                 : fmt::format("{:.1f} GB/s", figure.each_way()));
  std::fflush(stdout);
}

void print_verdict(const EngineChoice& engine, double best, bool json) {
  const bool sound = best >= kSoundLink;
  if (json) {
    nlohmann::ordered_json line{{"limit", "link"}};
    add_devices(line, engine);
    line["gb_per_s"] = best;
    line["void"] = !sound;
    fmt::print("{}\n", line.dump());
  } else {
    fmt::print("\nlink: {:.1f} GB/s each way at best{}\n", best,
               sound ? "" : fmt::format("; below {}: figures from this machine are void", kSoundLink));
  }
}

// What keeps the two from reaching each other; empty when nothing does.
std::string connect(int device, int other) {
  for (const auto& [from, to] : {std::pair(device, other), std::pair(other, device)}) {
    int can = 0;
    require(cudaDeviceCanAccessPeer(&can, from, to), "cudaDeviceCanAccessPeer");
    if (can == 0) return fmt::format("device {} does not reach the memory of device {}", from, to);
    require(cudaSetDevice(from), "cudaSetDevice");
    require(cudaDeviceEnablePeerAccess(to, 0), "cudaDeviceEnablePeerAccess");
  }
  return {};
}

}  // namespace

int run_limits(const EngineChoice& engine, bool json) {
  EngineChoice chosen = engine;
  std::ranges::sort(chosen.devices);
  chosen.devices.erase(std::unique(chosen.devices.begin(), chosen.devices.end()), chosen.devices.end());
  std::string no_pair = chosen.devices.size() < 2 ? "one device was chosen or is there" : "";
  if (no_pair.empty()) no_pair = connect(chosen.devices[0], chosen.devices[1]);
  chosen.devices.resize(no_pair.empty() ? 2 : 1);
  const Report report = [&](const Figure& figure) { json ? print_json(chosen, figure) : print_line(figure); };
  if (!json) {
    fmt::print("limits{}: buffers of 1 GiB; rates between devices are each way, both ways at once\n\n",
               describe_devices(chosen));
    fmt::print("{:<18} {:>6} {:>14}\n", "limit", "blocks", "");
  }
  Sides sides;
  sides.push_back(std::make_unique<Side>(chosen.devices.front()));
  measure_local(sides, report);
  if (!no_pair.empty()) {
    fmt::print(stderr, "tokenyard: nothing of a link is measured: {}\n", no_pair);
    return 0;
  }
  sides.push_back(std::make_unique<Side>(chosen.devices.back()));
  print_verdict(chosen, measure_link(sides, report), json);
  return 0;
}

}  // namespace tokenyard::cli
