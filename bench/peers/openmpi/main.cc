// SPDX-License-Identifier: Apache-2.0
// bench_openmpi: rounds of the exchange in alltoallv.h, with the options and the JSON line of `tokenyard bench`.
#include <fmt/format.h>

#include <array>
#include <cstdio>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "alltoallv.h"
#include "cli/time_statistics.h"

namespace tokenyard::bench {
namespace {

struct Options {
  cli::BenchShape shape{};
  std::string skew = "uniform";
  ReceivedLayout layout = ReceivedLayout::kCompact;
  int warmup = 5;
  int num_rounds = 30;
};

struct Times {
  std::vector<double> dispatch, combine, round;
};

double slowest(double seconds) {
  double most = 0;
  MPI_Allreduce(&seconds, &most, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return most * 1e6;
}

// A wrong answer ends the program on every rank.
Times measure(const Options& options, Exchange& exchange) {
  Times times;
  for (int i = -options.warmup; i < options.num_rounds; ++i) {
    MPI_Barrier(MPI_COMM_WORLD);
    double start = MPI_Wtime();
    exchange.dispatch();
    const double dispatch = MPI_Wtime() - start;
    if (i == -options.warmup) exchange.run_experts();
    MPI_Barrier(MPI_COMM_WORLD);
    start = MPI_Wtime();
    exchange.combine();
    const double combine = MPI_Wtime() - start;
    if (i == -options.warmup && exchange.count_wrong() > 0) throw std::runtime_error("wrong sums came back");
    const double slowest_dispatch = slowest(dispatch);
    const double slowest_combine = slowest(combine);
    const double slowest_round = slowest(dispatch + combine);
    if (i < 0) continue;
    times.dispatch.push_back(slowest_dispatch);
    times.combine.push_back(slowest_combine);
    times.round.push_back(slowest_round);
  }
  return times;
}

void print_json(const Options& options, const Times& times, std::int64_t dispatch_bytes, std::int64_t combine_bytes) {
  using Json = nlohmann::ordered_json;
  const auto time = [](const std::vector<double>& values) {
    const cli::BenchTime summary = cli::summarise_times(values);
    return Json{{"median", summary.median}, {"p95", summary.p95}};
  };
  const Json line{{"backend", "openmpi_alltoallv"},
                  {"engine", "host"},
                  {"num_ranks", options.shape.num_ranks},
                  {"rank_kind", "processes"},
                  {"num_tokens", options.shape.num_tokens},
                  {"hidden_size", options.shape.hidden_size},
                  {"num_experts", options.shape.num_experts},
                  {"top_k", options.shape.top_k},
                  {"dtype", "bf16"},
                  {"layout", options.layout == ReceivedLayout::kCompact ? "compact" : "expert_major"},
                  {"skew", options.skew},
                  {"seed", options.shape.seed},
                  {"num_rounds", options.num_rounds},
                  {"dispatch_us", time(times.dispatch)},
                  {"combine_us", time(times.combine)},
                  {"round_us", time(times.round)},
                  {"dispatch_bytes", dispatch_bytes},
                  {"combine_bytes", combine_bytes}};
  fmt::print("{}\n", line.dump());
}

int run(Options& options) {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &options.shape.num_ranks);
  if (!cli::parse_bench_skew(options.skew, options.shape).empty()) {
    throw std::invalid_argument("a trace is not taken; uniform, zipf:A and one are");
  }
  std::vector<std::vector<std::int32_t>> ids;
  ids.reserve(static_cast<std::size_t>(options.shape.num_ranks));
  for (int each = 0; each < options.shape.num_ranks; ++each)
    ids.push_back(cli::bench_ids(options.shape, each));
  Exchange exchange(options.shape, rank, ids, options.layout);
  const Times times = measure(options, exchange);
  std::array<long long, 2> bytes{exchange.dispatch_bytes(), exchange.combine_bytes()};
  MPI_Allreduce(MPI_IN_PLACE, bytes.data(), 2, MPI_LONG_LONG, MPI_SUM, MPI_COMM_WORLD);
  if (rank == 0) print_json(options, times, bytes[0], bytes[1]);
  return 0;
}

void add_options(CLI::App& program, Options& options) {
  program.add_option("--num-tokens", options.shape.num_tokens, "Tokens of each rank")->check(CLI::PositiveNumber);
  program.add_option("--hidden-size", options.shape.hidden_size, "Elements of a row")->check(CLI::PositiveNumber);
  program.add_option("--num-experts", options.shape.num_experts, "Experts of all ranks")->check(CLI::PositiveNumber);
  program.add_option("--top-k", options.shape.top_k, "Experts of a token")->check(CLI::Range(1, 64));
  const std::map<std::string, ReceivedLayout> layouts{{"compact", ReceivedLayout::kCompact},
                                                      {"expert_major", ReceivedLayout::kExpertMajor}};
  program.add_option("--layout", options.layout, "Of received rows")->transform(CLI::CheckedTransformer(layouts));
  program.add_option("--skew", options.skew, "uniform, zipf:A or one");
  program.add_option("--seed", options.shape.seed, "Of the routing");
  program.add_option("--num-rounds", options.num_rounds, "Rounds that count")->check(CLI::Range(1, 100'000));
  program.add_option("--warmup", options.warmup, "Rounds before them")->check(CLI::Range(1, 100'000));
}

}  // namespace
}  // namespace tokenyard::bench

int main(int argc, char** argv) {
  try {
    MPI_Init(&argc, &argv);
    CLI::App program("Dispatch and combine with MPI_Alltoallv; start it with mpirun", "bench_openmpi");
    tokenyard::bench::Options options;
    tokenyard::bench::add_options(program, options);
    int status = 0;
    try {
      program.parse(argc, argv);
      status = tokenyard::bench::run(options);
    } catch (const CLI::ParseError& error) {
      status = program.exit(error);
    }
    MPI_Finalize();
    return status;
  } catch (const std::exception& error) {
    fmt::print(stderr, "bench_openmpi: {}\n", error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
}
