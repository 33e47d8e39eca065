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

#include "cli/cuda/limit_kernels.h"
#include "cli/cuda/limit_sides.h"
#include "cli/cuda/own_process.h"
#include "cli/device_fields.h"

namespace tokenyard::cli {
namespace {

using fabric::cuda::require;

constexpr int kKernelsOfGraph = 200;
constexpr int kTurns = 10'000;
constexpr std::array kBlocks{8, 16, 32, 48, 132};

// Of one kernel among many of a graph, which each side replays at once.
Figure kernel_in_graph(std::string_view name, const Sides& sides, const Work& work) {
  std::vector<StreamObject<cudaGraphExec_t>> graphs(sides.size());
  std::size_t next = 0;
  put_on_streams(sides, [&](const Side& own, const Side& other) {
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

using Report = std::function<void(const Figure&)>;

void measure_local(const Sides& one, const Report& report) {
  const auto copy = [&](int blocks) {
    Figure figure = rate("local_copy", blocks, one, [blocks](const Side& own, const Side& /*other*/) {
      launch_copy(own.target.get(), own.source.get(), own.bytes, blocks, own.stream.get());
    });
    figure.gigabytes_per_second.front() *= 2;  // read and written
    report(figure);
  };
  for (const int blocks : kBlocks)
    copy(blocks);
  copy(2 * one.front()->processors);
  report(kernel_in_graph("empty_kernel", one,
                         [](const Side& own, const Side& /*other*/) { launch_nothing(own.stream.get()); }));
}

void put_stores(const Side& own, const Side& other, int blocks) {
  launch_stores(other.target.get(), own.bytes, blocks, own.stream.get());
}

void put_bulk_stores(const Side& own, const Side& other, int blocks) {
  launch_bulk_stores(other.target.get(), own.bytes, blocks, own.stream.get());
}

void put_loads(const Side& own, const Side& other, int blocks) {
  launch_loads(other.source.get(), own.bytes, blocks, own.sink(), own.stream.get());
}

// Returns the best rate that stores of all sides had at once.
double measure_rates(const Sides& sides, const Report& report) {
  report(rate("copy_engine", 0, sides, [](const Side& own, const Side& other) {
    require(cudaMemcpyPeerAsync(other.target.get(), other.device, own.source.get(), own.device,
                                static_cast<std::size_t>(own.bytes), own.stream.get()),
            "cudaMemcpyPeerAsync");
  }));
  double best = 0;
  using Move = void (*)(const Side& own, const Side& other, int blocks);
  constexpr std::array<std::pair<std::string_view, Move>, 3> kMoves{
      {{"peer_stores", put_stores}, {"peer_bulk_stores", put_bulk_stores}, {"peer_loads", put_loads}}};
  for (const auto& [name, move] : kMoves) {
    for (const int blocks : kBlocks) {
      const Figure figure = rate(
          name, blocks, sides, [move = move, blocks](const Side& own, const Side& other) { move(own, other, blocks); });
      if (move != put_loads) best = std::max(best, figure.each_way());
      report(figure);
    }
  }
  return best;
}

PairWords ping_words(const Side& own, const Side& other) {
  return {.own = own.word(0), .peer = other.word(0), .epoch = own.word(1), .failed = own.failed()};
}

PairWords barrier_words(const Side& own, const Side& other) {
  return {.own = own.word(2), .peer = other.word(2), .epoch = own.word(3), .failed = own.failed()};
}

void measure_flags(const Sides& pair, const Report& report) {
  const std::vector<double> turns = time_sides(pair, [&](const Side& own, const Side& other) {
    launch_ping_pong(ping_words(own, other), kTurns, &own == pair.front().get(), own.stream.get());
  });
  report({.name = "flag_one_way", .gigabytes_per_second = {}, .microseconds = std::ranges::max(turns) / kTurns / 2});
  report(kernel_in_graph("pair_barrier", pair, [](const Side& own, const Side& other) {
    launch_pair_barrier(barrier_words(own, other), own.stream.get());
  }));
}

void print_json(const EngineChoice& engine, const Figure& figure) {
  nlohmann::ordered_json line{{"limit", figure.name}};
  add_devices(line, engine);
  if (figure.blocks > 0) line["blocks"] = figure.blocks;
  if (figure.gigabytes_per_second.empty()) {
    line["us"] = figure.microseconds;
  } else {
    line["bytes"] = figure.bytes;
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

void print_link(const EngineChoice& engine, const LinkLimit& link, bool json) {
  if (json) {
    nlohmann::ordered_json line{{"limit", "link"}};
    add_devices(line, engine);
    line["link"] = link.state();
    if (link.there()) line["gb_per_s"] = link.gb_per_s;
    if (!link.there()) line["reason"] = link.reason;
    line["void"] = link.there() && !link.sound();
    fmt::print("{}\n", line.dump());
  } else if (!link.there()) {
    fmt::print("\nno link: {}\n", link.reason);
  } else {
    fmt::print("\nlink: {:.1f} GB/s each way by stores{}\n\n", link.gb_per_s,
               link.sound() ? "" : fmt::format("; below {}: figures from this machine are void", kSoundLink));
  }
}

EngineChoice without_repeats(const EngineChoice& engine) {
  EngineChoice chosen = engine;
  std::ranges::sort(chosen.devices);
  chosen.devices.erase(std::unique(chosen.devices.begin(), chosen.devices.end()), chosen.devices.end());
  return chosen;
}

// What keeps the devices from being measured as a ring; empty when nothing does.
std::string missing_for_link(const std::vector<int>& devices) {
  return devices.size() < 2 ? "one device was chosen or is there" : connect(devices);
}

Sides sides_of(const std::vector<int>& devices) {
  Sides sides;
  const std::int64_t bytes = buffer_bytes(devices);
  for (const int device : devices)
    sides.push_back(std::make_unique<Side>(device, bytes));
  return sides;
}

// The rates of these devices, and the flags of a pair.
void run_link_limits(EngineChoice chosen, std::size_t num_devices, bool json) {
  chosen.devices.resize(num_devices);
  const Report report = [&](const Figure& figure) { json ? print_json(chosen, figure) : print_line(figure); };
  const Sides sides = sides_of(chosen.devices);
  const double best = measure_rates(sides, report);
  if (num_devices == 2) measure_flags(sides, report);
  print_link(chosen, {.gb_per_s = best, .reason = {}}, json);
}

struct LinkAnswer {
  std::array<char, 512> reason{};
  double gb_per_s = 0;
};

void look(const std::vector<int>& devices, LinkAnswer& answer) {
  const std::string missing = missing_for_link(devices);
  if (!missing.empty()) return put(answer.reason, missing);
  const Sides sides = sides_of(devices);
  for (const int blocks : {sides.front()->processors / 2, sides.front()->processors}) {
    for (const auto move : {put_stores, put_bulk_stores}) {
      const Figure figure =
          rate("link", blocks, sides, [&](const Side& own, const Side& other) { move(own, other, blocks); });
      answer.gb_per_s = std::max(answer.gb_per_s, figure.each_way());
    }
  }
}

}  // namespace

LinkLimit measure_link_limit(const EngineChoice& engine) {
  const std::vector<int> devices = without_repeats(engine).devices;
  const auto answer = ask_in_own_process<LinkAnswer>([&](LinkAnswer& to) { look(devices, to); });
  return {.gb_per_s = answer.gb_per_s, .reason = answer.reason.data()};
}

int run_limits(const EngineChoice& engine, bool json) {
  const EngineChoice chosen = without_repeats(engine);
  const std::string missing = missing_for_link(chosen.devices);
  EngineChoice first = chosen;
  first.devices.resize(1);
  if (!json) {
    fmt::print("limits{}: buffers of at most 1 GiB; rates between devices are each way, both ways at once\n\n",
               describe_devices(chosen));
    fmt::print("{:<18} {:>6} {:>14}\n", "limit", "blocks", "");
  }
  measure_local(sides_of(first.devices),
                [&](const Figure& figure) { json ? print_json(first, figure) : print_line(figure); });
  if (!missing.empty()) {
    print_link(first, {.gb_per_s = 0, .reason = missing}, json);
    return 0;
  }
  run_link_limits(chosen, 2, json);
  if (chosen.devices.size() > 2) run_link_limits(chosen, chosen.devices.size(), json);
  return 0;
}

}  // namespace tokenyard::cli
