// SPDX-License-Identifier: Apache-2.0
// bench_nccl: rounds of the exchange in exchange.h, one thread per GPU of this process, with the options and the JSON
// line of `tokenyard bench`.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "checked.h"
#include "cli/time_statistics.h"
#include "exchange.h"
#include "measure.h"

namespace tokenyard::bench {
namespace {

using Json = nlohmann::ordered_json;

struct Options {
  cli::BenchShape shape{};
  std::vector<std::int64_t> num_tokens{512};
  std::string skew = "uniform";
  ExchangeOptions exchange{};
  RoundOptions rounds{};
};

const std::map<std::string, ExchangeKind> kExchanges{{"all_gather", ExchangeKind::kAllGather},
                                                     {"all_to_all", ExchangeKind::kAllToAll}};
const std::map<std::string, MemoryKind> kMemories{
    {"plain", MemoryKind::kPlain}, {"registered", MemoryKind::kRegistered}, {"symmetric", MemoryKind::kSymmetric}};

template <typename Kind>
std::string name_of(const std::map<std::string, Kind>& names, Kind kind) {
  const auto found = std::find_if(names.begin(), names.end(), [&](const auto& entry) { return entry.second == kind; });
  return found->first;
}

// What all ranks share.
struct Run {
  const Options& options;
  std::vector<Routing> routings{};  // of each number of tokens
  ncclUniqueId id{};
  SpinBarrier barrier;
  std::vector<RankTimes> times{};  // of each rank, in the shape at hand
  std::string device{};
};

class Device {
 public:
  Device(const Run& run, int rank) {
    check("cudaSetDevice", cudaSetDevice(rank));
    check("cudaSetDeviceFlags", cudaSetDeviceFlags(cudaDeviceScheduleSpin));
    check("cudaStreamCreateWithFlags", cudaStreamCreateWithFlags(&place_.stream, cudaStreamNonBlocking));
    check("ncclCommInitRank", ncclCommInitRank(&place_.comm, run.options.shape.num_ranks, run.id, rank));
    place_.rank = rank;
  }

  ~Device() {
    report("ncclCommDestroy", ncclCommDestroy(place_.comm));
    report("cudaStreamDestroy", cudaStreamDestroy(place_.stream));
  }

  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  Device(Device&&) = delete;
  Device& operator=(Device&&) = delete;

  [[nodiscard]] const Place& place() const { return place_; }

 private:
  Place place_;
};

// The slowest rank of each round.
Json slowest(const Run& run, std::vector<double> RankTimes::*times) {
  std::vector<double> most = run.times.front().*times;
  for (const RankTimes& of_rank : run.times) {
    for (std::size_t i = 0; i < most.size(); ++i)
      most[i] = std::max(most[i], (of_rank.*times)[i]);
  }
  if (most.empty()) return nullptr;
  const cli::BenchTime summary = cli::summarise_times(most);
  return {{"median", summary.median}, {"p95", summary.p95}};
}

// NCCL_* of the environment: they decide what NCCL does.
Json nccl_settings() {
  Json settings = Json::object();
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const std::size_t equals = text.find('=');
    if (text.starts_with("NCCL_") && equals != std::string_view::npos)
      settings[std::string(text.substr(0, equals))] = std::string(text.substr(equals + 1));
  }
  return settings;
}

void print_json(const Run& run, const Routing& routing, bool registered) {
  const Options& options = run.options;
  const ExchangeKind kind = options.exchange.kind;
  const Traffic dispatch = dispatch_traffic(routing, kind);
  const Traffic combine = combine_traffic(routing, kind);
  const Json line{{"backend", "nccl_" + name_of(kExchanges, kind)},
                  {"engine", "cuda"},
                  {"device", run.device},
                  {"nccl_version", nccl_version()},
                  {"nccl_settings", nccl_settings()},
                  {"num_ranks", routing.shape.num_ranks},
                  {"rank_kind", "threads"},
                  {"num_tokens", routing.shape.num_tokens},
                  {"hidden_size", routing.shape.hidden_size},
                  {"num_experts", routing.shape.num_experts},
                  {"top_k", routing.shape.top_k},
                  {"dtype", "bf16"},
                  {"layout", kind == ExchangeKind::kAllGather ? "every_rank" : "compact"},
                  {"skew", options.skew},
                  {"seed", routing.shape.seed},
                  {"graph", options.rounds.graph},
                  {"known_counts", options.exchange.known_counts},
                  {"memory", name_of(kMemories, options.exchange.memory)},
                  {"registered", registered},
                  {"num_rounds", options.rounds.num_rounds},
                  {"dispatch_us", slowest(run, &RankTimes::dispatch)},
                  {"combine_us", slowest(run, &RankTimes::combine)},
                  {"round_us", slowest(run, &RankTimes::round)},
                  {"pipelined_us", slowest(run, &RankTimes::pipelined)},
                  {"dispatch_bytes", dispatch.total},
                  {"combine_bytes", combine.total},
                  {"dispatch_bytes_per_direction", dispatch.per_direction},
                  {"combine_bytes_per_direction", combine.per_direction}};
  fmt::print("{}\n", line.dump());
  std::fflush(stdout);
}

void measure_all(Run& run, int rank) {
  const Device device(run, rank);
  for (const Routing& routing : run.routings) {
    Exchange exchange(run.options.exchange, routing, device.place());
    run.times[static_cast<std::size_t>(rank)] =
        measure_rank(exchange, run.options.rounds, device.place().stream, run.barrier);
    run.barrier.wait();
    if (rank == 0) print_json(run, routing, exchange.registered());
    run.barrier.wait();
  }
}

void run_rank(Run& run, int rank) {
  try {
    measure_all(run, rank);
  } catch (const std::exception& error) {
    fmt::print(stderr, "bench_nccl: rank {}: {}\n", rank, error.what());
    std::fflush(stderr);
    // The other ranks wait for this one inside NCCL, and would for ever.
    std::_Exit(1);
  }
}

// Throws std::invalid_argument.
void require_sound(const Options& options) {
  const cli::BenchShape& shape = options.shape;
  if (shape.hidden_size % 8 != 0) {
    throw std::invalid_argument(
        fmt::format("--hidden-size is {}; rows of whole 16 bytes are taken, a multiple of 8", shape.hidden_size));
  }
  if (shape.top_k > shape.num_experts) {
    throw std::invalid_argument(
        fmt::format("--top-k is {}; at most --num-experts = {} can be picked", shape.top_k, shape.num_experts));
  }
  const bool all_to_all = options.exchange.kind == ExchangeKind::kAllToAll;
  if (options.exchange.known_counts && !all_to_all)
    throw std::invalid_argument("--known-counts is for all_to_all; all_gather has no counts");
  if (options.rounds.graph && all_to_all && !options.exchange.known_counts)
    throw std::invalid_argument("all_to_all waits for counts on the host, which no graph can: add --known-counts");
  int devices = 0;
  check("cudaGetDeviceCount", cudaGetDeviceCount(&devices));
  if (shape.num_ranks > devices) {
    throw std::invalid_argument(
        fmt::format("--num-ranks is {}; each needs a GPU of its own, and there are {}", shape.num_ranks, devices));
  }
}

void run_all(Options& options) {
  const std::string trace = cli::parse_bench_skew(options.skew, options.shape);
  require_sound(options);
  Run run{.options = options, .barrier = SpinBarrier(options.shape.num_ranks)};
  run.routings.reserve(options.num_tokens.size());
  for (const std::int64_t num_tokens : options.num_tokens) {
    options.shape.num_tokens = num_tokens;
    run.routings.push_back(make_routing(options.shape, trace));
  }
  run.times.resize(static_cast<std::size_t>(options.shape.num_ranks));
  cudaDeviceProp properties{};
  check("cudaGetDeviceProperties", cudaGetDeviceProperties(&properties, 0));
  run.device = properties.name;
  check("ncclGetUniqueId", ncclGetUniqueId(&run.id));
  std::vector<std::thread> ranks;
  ranks.reserve(run.times.size());
  for (int rank = 0; rank < options.shape.num_ranks; ++rank)
    ranks.emplace_back([&run, rank] { run_rank(run, rank); });
  for (std::thread& rank : ranks)
    rank.join();
}

void add_options(CLI::App& program, Options& options) {
  program.add_option("--num-ranks", options.shape.num_ranks, "GPUs")->check(CLI::Range(1, kMaxRanks));
  program.add_option("--num-tokens", options.num_tokens, "Tokens of each rank; a list measures each")
      ->delimiter(',')
      ->check(CLI::Range(1, 1 << 20));
  program.add_option("--hidden-size", options.shape.hidden_size, "Elements of a row")->check(CLI::Range(8, 1 << 20));
  program.add_option("--num-experts", options.shape.num_experts, "Experts of all ranks")->check(CLI::Range(1, 1 << 20));
  program.add_option("--top-k", options.shape.top_k, "Experts of a token")->check(CLI::Range(1, kMaxTopK));
  program.add_option("--skew", options.skew, "uniform, zipf:A, one, or trace:FILE (a layer's tokens.safetensors)");
  program.add_option("--seed", options.shape.seed, "Of the routing");
  program.add_option("--num-rounds", options.rounds.num_rounds, "Rounds that count")->check(CLI::Range(1, 100'000));
  program.add_option("--warmup", options.rounds.warmup, "Rounds before them")->check(CLI::Range(1, 100'000));
  program.add_option("--exchange", options.exchange.kind, "all_gather or all_to_all")
      ->transform(CLI::CheckedTransformer(kExchanges));
  program.add_option("--memory", options.exchange.memory, "plain, registered or symmetric: what NCCL knows of buffers")
      ->transform(CLI::CheckedTransformer(kMemories));
  program.add_flag("--graph", options.rounds.graph, "Capture the round in a CUDA graph and replay it");
  program.add_flag("--known-counts", options.exchange.known_counts,
                   "all_to_all takes counts that were exchanged before the rounds");
}

}  // namespace
}  // namespace tokenyard::bench

int main(int argc, char** argv) {
  try {
    CLI::App program("Dispatch and combine with NCCL, one thread per GPU", "bench_nccl");
    tokenyard::bench::Options options;
    tokenyard::bench::add_options(program, options);
    try {
      program.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
      return program.exit(error);
    }
    tokenyard::bench::run_all(options);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_nccl: %s\n", error.what());
    return 1;
  }
}
