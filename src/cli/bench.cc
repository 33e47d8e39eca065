// SPDX-License-Identifier: Apache-2.0
#include "cli/bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <map>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "tokenyard/error.h"

#include "cli/bench_rank.h"
#include "cli/bench_trace.h"
#include "cli/common_options.h"
#include "cli/time_statistics.h"
#include "engine/engine.h"

namespace tokenyard::cli {
namespace {

using Json = nlohmann::ordered_json;

struct BenchResult {
  BenchTime dispatch, combine, round;
  double memcpy_us = 0;
  BenchVolume crossed;  // between ranks, all of them together
};

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

BenchResult measure(const BenchJob& job, RankKind kind) {
  BenchBoard board(job.shape.num_ranks, job.num_rounds);
  run_ranks(kind, job.shape.num_ranks, [&](const Group& group) { run_bench_rank(job, group, board); });
  BenchResult result;
  result.dispatch = summarise_times(slowest(job, board, [](const BenchRound& round) { return round.dispatch_us; }));
  result.combine = summarise_times(slowest(job, board, [](const BenchRound& round) { return round.combine_us; }));
  result.round = summarise_times(
      slowest(job, board, [](const BenchRound& round) { return round.dispatch_us + round.combine_us; }));
  result.memcpy_us = quantile(slowest(job, board, [](const BenchRound& round) { return round.memcpy_us; }), 0.5);
  for (int rank = 0; rank < job.shape.num_ranks; ++rank) {
    result.crossed.dispatch_bytes += board.volume(rank).dispatch_bytes;
    result.crossed.combine_bytes += board.volume(rank).combine_bytes;
  }
  return result;
}

BenchJob job_of(const BenchOptions& options, const BackendInfo& backend, std::int64_t num_tokens) {
  BenchJob job{.shape = options.shape,
               .dtype = options.dtype,
               .config = backend.default_config,
               .num_threads = options.num_threads,
               .warmup = options.warmup,
               .num_rounds = options.num_rounds,
               .pin = options.pin};
  if (options.cast && backend.contract.takes_cast) job.cast = DispatchCast::kFp8Block128;
  job.shape.num_tokens = num_tokens;
  const std::string trace = parse_bench_skew(options.skew, job.shape);
  if (job.shape.skew == BenchSkew::kTrace) {
    job.ids = trace_ids(trace, job.shape);
  } else {
    for (int rank = 0; rank < job.shape.num_ranks; ++rank)
      job.ids.push_back(bench_ids(job.shape, rank));
  }
  return job;
}

double gigabytes_per_second(std::int64_t bytes, double microseconds) {
  return static_cast<double>(bytes) / (microseconds * 1e3);
}

void print_json(const BackendInfo& backend,
                const BenchOptions& options,
                const BenchJob& job,
                const BenchResult& result) {
  const auto time = [](const BenchTime& value) { return Json{{"median", value.median}, {"p95", value.p95}}; };
  const Json line{{"backend", backend.name},
                  {"engine", engine::engines().front().name},
                  {"num_ranks", job.shape.num_ranks},
                  {"rank_kind", name(options.rank_kind)},
                  {"num_tokens", job.shape.num_tokens},
                  {"hidden_size", job.shape.hidden_size},
                  {"num_experts", job.shape.num_experts},
                  {"top_k", job.shape.top_k},
                  {"dtype", name(job.dtype)},
                  {"dispatch_dtype", job.cast == DispatchCast::kNone ? std::string(name(job.dtype)) : "fp8"},
                  {"skew", options.skew},
                  {"seed", job.shape.seed},
                  {"num_threads", job.num_threads},
                  {"pinned", job.pin},
                  {"num_rounds", job.num_rounds},
                  {"dispatch_us", time(result.dispatch)},
                  {"combine_us", time(result.combine)},
                  {"round_us", time(result.round)},
                  {"memcpy_us", result.memcpy_us},
                  {"ratio_memcpy", result.round.median / result.memcpy_us},
                  {"dispatch_bytes", result.crossed.dispatch_bytes},
                  {"combine_bytes", result.crossed.combine_bytes}};
  fmt::print("{}\n", line.dump());
}

void print_heading(const BenchOptions& options) {
  fmt::print("{} ranks as {}{}, hidden size {}, top-{} of {}, {} rows, {} routing, {} rounds after {}\n",
             options.shape.num_ranks, name(options.rank_kind), options.pin ? ", pinned" : "", options.shape.hidden_size,
             options.shape.top_k, options.shape.num_experts, name(options.dtype), options.skew, options.num_rounds,
             options.warmup);
  fmt::print(
      "times: median of the slowest rank, in us; GB/s: bytes that crossed between ranks, all of them together\n\n");
  fmt::print("{:<16} {:>7} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10} {:>13} {:>13}\n", "backend", "tokens", "dispatch",
             "combine", "round", "round p95", "memcpy", "x memcpy", "dispatch GB/s", "combine GB/s");
}

void print_line(const BackendInfo& backend, const BenchJob& job, const BenchResult& result) {
  fmt::print("{:<16} {:>7} {:>10.1f} {:>10.1f} {:>10.1f} {:>10.1f} {:>10.1f} {:>10.2f} {:>13.2f} {:>13.2f}\n",
             backend.name, job.shape.num_tokens, result.dispatch.median, result.combine.median, result.round.median,
             result.round.p95, result.memcpy_us, result.round.median / result.memcpy_us,
             gigabytes_per_second(result.crossed.dispatch_bytes, result.dispatch.median),
             gigabytes_per_second(result.crossed.combine_bytes, result.combine.median));
}

bool bench_one(const BackendInfo& backend, const BenchOptions& options, std::int64_t num_tokens) {
  try {
    const BenchJob job = job_of(options, backend, num_tokens);
    const BenchResult result = measure(job, options.rank_kind);
    if (options.json) {
      print_json(backend, options, job, result);
    } else {
      print_line(backend, job, result);
    }
    return true;
  } catch (const std::exception& error) {
    fmt::print(stderr, "tokenyard: {}: {}\n", backend.name, error.what());
    return false;
  }
}

}  // namespace

CLI::App* add_bench_command(CLI::App& program, BenchOptions& options) {
  CLI::App* command = program.add_subcommand("bench", "Measure dispatch and combine, beside memcpy of the same rows");
  add_backend_option(*command, options.backends);
  add_rank_options(*command, {options.shape.num_ranks, options.rank_kind, options.num_threads});
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
  command->add_flag("--json", options.json, "JSON lines only");
  return command;
}

int run_bench(const BenchOptions& options) {
  if (options.shape.top_k > options.shape.num_experts) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("--top-k is {}; at most --num-experts = {} can be picked",
                                                         options.shape.top_k, options.shape.num_experts));
  }
  if (!options.json) print_heading(options);
  bool all_right = true;
  for (const BackendInfo* backend : chosen_backends(options.backends)) {
    for (const std::int64_t num_tokens : options.num_tokens) {
      all_right = bench_one(*backend, options, num_tokens) && all_right;
      std::fflush(stdout);
    }
  }
  return all_right ? 0 : 1;
}

}  // namespace tokenyard::cli
