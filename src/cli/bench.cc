// SPDX-License-Identifier: Apache-2.0
#include "cli/bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <map>

#include <CLI/CLI.hpp>

#include "tokenyard/error.h"

#include "cli/bench_rank.h"
#include "cli/bench_report.h"
#include "cli/bench_trace.h"
#include "cli/bench_volume.h"
#include "cli/common_options.h"
#include "cli/cuda/limits.h"
#include "cli/time_statistics.h"

namespace tokenyard::cli {
namespace {

// The slowest rank of each round.
std::vector<double> slowest(const BenchJob& job, const BenchBoard& board, double (*time)(const BenchRound&)) {
  std::vector<double> times;
  for (int i = 0; i < job.num_rounds; ++i) {
    double most = 0;
    for (int rank = 0; rank < job.shape.num_ranks; ++rank)
      most = std::max(most, time(board.round(rank, i)));
    times.push_back(most);
  }
  return times;
}

std::vector<double> slowest_trains(const BenchJob& job, const BenchBoard& board) {
  std::vector<double> times;
  for (int i = 0; i < kBenchTrains; ++i) {
    double most = 0;
    for (int rank = 0; rank < job.shape.num_ranks; ++rank)
      most = std::max(most, board.train(rank, i));
    times.push_back(most);
  }
  return times;
}

BenchResult measure(const BenchJob& job, const Contract& contract, RankKind kind) {
  BenchBoard board(job.shape.num_ranks, job.num_rounds);
  run_ranks(kind, job.shape.num_ranks, [&](const Group& group) { run_bench_rank(job, group, board); });
  BenchResult result;
  result.dispatch = summarise_times(slowest(job, board, [](const BenchRound& round) { return round.dispatch_us; }));
  result.combine = summarise_times(slowest(job, board, [](const BenchRound& round) { return round.combine_us; }));
  result.round = summarise_times(slowest(job, board, [](const BenchRound& round) { return round.round_us; }));
  result.memcpy_us = quantile(slowest(job, board, [](const BenchRound& round) { return round.memcpy_us; }), 0.5);
  if (job.graph) result.pipelined = summarise_times(slowest_trains(job, board));
  result.crossed = volume_between_ranks(job, contract);
  result.per_direction = volume_per_direction(job, contract);
  return result;
}

struct Chosen {
  const BackendInfo& backend;
  const EngineChoice& engine;
  std::int64_t num_tokens;
};

BenchJob job_of(const BenchOptions& options, const Chosen& chosen) {
  const BackendInfo& backend = chosen.backend;
  BenchJob job{.shape = options.shape,
               .dtype = options.dtype,
               .config = backend.default_config,
               .num_threads = options.num_threads,
               .warmup = options.warmup,
               .num_rounds = options.num_rounds,
               .pin = options.pin,
               .engine = chosen.engine,
               .num_sms = options.num_sms,
               .graph = options.graph};
  if (options.cast && backend.contract.takes_cast) job.cast = DispatchCast::kFp8Block128;
  job.shape.num_tokens = chosen.num_tokens;
  const std::string trace = parse_bench_skew(options.skew, job.shape);
  if (job.shape.skew == BenchSkew::kTrace) {
    job.ids = trace_ids(trace, job.shape);
  } else {
    for (int rank = 0; rank < job.shape.num_ranks; ++rank)
      job.ids.push_back(bench_ids(job.shape, rank));
  }
  return job;
}

enum class Outcome : std::uint8_t { kRight, kUnusable, kFailed };

Outcome bench_one(const BenchOptions& options, const Chosen& chosen) {
  const BackendInfo& backend = chosen.backend;
  try {
    const BenchJob job = job_of(options, chosen);
    const BenchResult result = measure(job, backend.contract, options.rank_kind);
    if (options.json) {
      print_bench_json(backend, options, job, result);
    } else {
      print_bench_line(backend, job, result);
    }
    return Outcome::kRight;
  } catch (const Error& error) {
    const bool refused = error.code() == ErrorCode::kUnsupported;
    fmt::print(stderr, "tokenyard: {}: {}{}\n", backend.name, refused ? "unusable: " : "", error.what());
    return refused ? Outcome::kUnusable : Outcome::kFailed;
  } catch (const std::exception& error) {
    fmt::print(stderr, "tokenyard: {}: {}\n", backend.name, error.what());
    return Outcome::kFailed;
  }
}

void check_options(const BenchOptions& options, const EngineChoice& engine) {
  if (options.shape.top_k > options.shape.num_experts) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("--top-k is {}; at most --num-experts = {} can be picked",
                                                         options.shape.top_k, options.shape.num_experts));
  }
  if (engine.on_host() && (options.graph || options.num_sms > 0))
    throw Error(ErrorCode::kInvalidArgument, "--graph and --num-sms are for --engine cuda");
}

}  // namespace

CLI::App* add_bench_command(CLI::App& program, BenchOptions& options) {
  CLI::App* command = program.add_subcommand("bench", "Measure dispatch and combine, beside memcpy of the same rows");
  add_backend_option(*command, options.backends);
  add_rank_options(*command, {options.shape.num_ranks, options.rank_kind, options.num_threads});
  add_engine_options(*command, options.engine);
  command->add_option("--num-tokens", options.num_tokens, "Tokens of each rank; a list measures each")
      ->delimiter(',')
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_option("--hidden-size", options.shape.hidden_size, "Elements of a row")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_option("--num-experts", options.shape.num_experts, "Experts of all ranks")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_option("--top-k", options.shape.top_k, "Experts of a token")
      ->check(CLI::Range(1, kMaxTopK))
      ->capture_default_str();
  const std::map<std::string, Dtype> dtypes{{"bf16", Dtype::kBf16}, {"f16", Dtype::kF16}, {"f32", Dtype::kF32}};
  command->add_option("--dtype", options.dtype, "Of rows and sums")
      ->transform(CLI::CheckedTransformer(dtypes))
      ->default_str("bf16");
  command->add_flag("--cast", options.cast, "Cast rows to fp8 on the way, where the backend can");
  command->add_option("--skew", options.skew, "uniform, zipf:A, one, or trace:FILE (a layer's tokens.safetensors)")
      ->capture_default_str();
  command->add_option("--num-rounds", options.num_rounds, "Rounds that count")
      ->check(CLI::Range(1, 100'000))
      ->capture_default_str();
  command->add_option("--warmup", options.warmup, "Rounds before them; the first one's answer is checked")
      ->check(CLI::Range(1, 100'000))
      ->capture_default_str();
  command->add_option("--seed", options.shape.seed, "Of the routing")->capture_default_str();
  command->add_flag("--pin", options.pin, "Keep rank r on core r modulo the cores");
  command->add_flag("--graph", options.graph, "cuda: capture the round once per rank and replay it");
  command
      ->add_option("--num-sms", options.num_sms, "cuda: multiprocessors that a phase may use; 0: the library chooses")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_flag("--limits", options.limits, "cuda: instead, what devices and the link between two can do at best");
  command->add_flag("--json", options.json, "JSON lines only");
  return command;
}

int run_bench(const BenchOptions& options) {
  EngineOptions wanted = options.engine;
  if (options.limits) wanted.kind = EngineKind::kCuda;
  const EngineChoice engine = choose_engine(wanted);
  if (options.limits) return run_limits(engine, options.json);
  check_options(options, engine);
  if (!options.json) print_bench_heading(options, engine);
  // `all` is those that the engine has.
  const bool may_refuse = !engine.on_host() && asks_for_all(options.backends);
  bool all_right = true;
  bool any_right = false;
  for (const BackendInfo* backend : chosen_backends(options.backends)) {
    for (const std::int64_t num_tokens : options.num_tokens) {
      const Outcome outcome = bench_one(options, {.backend = *backend, .engine = engine, .num_tokens = num_tokens});
      std::fflush(stdout);
      any_right = any_right || outcome == Outcome::kRight;
      if (outcome == Outcome::kUnusable && may_refuse) break;
      all_right = all_right && outcome == Outcome::kRight;
    }
  }
  return all_right && any_right ? 0 : 1;
}

}  // namespace tokenyard::cli
