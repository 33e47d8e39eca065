// SPDX-License-Identifier: Apache-2.0
#include "cli/bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <map>
#include <set>
#include <string_view>
#include <system_error>
#include <variant>

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
std::vector<double> slowest(const BenchJob& job, const BenchBoard::Times& times, double BenchRound::*time) {
  std::vector<double> most(static_cast<std::size_t>(job.num_rounds), 0);
  for (int i = 0; i < job.num_rounds; ++i) {
    for (int rank = 0; rank < job.shape.num_ranks; ++rank)
      most[static_cast<std::size_t>(i)] = std::max(most[static_cast<std::size_t>(i)], times.round(rank, i).*time);
  }
  return most;
}

std::vector<double> slowest_trains(const BenchJob& job, const BenchBoard::Times& times) {
  std::vector<double> most(kBenchTrains, 0);
  for (int i = 0; i < kBenchTrains; ++i) {
    for (int rank = 0; rank < job.shape.num_ranks; ++rank)
      most[static_cast<std::size_t>(i)] = std::max(most[static_cast<std::size_t>(i)], times.train(rank, i));
  }
  return most;
}

struct Chosen {
  const BackendInfo& backend;
  const EngineChoice& engine;
  const LinkLimit& link;
  std::int64_t num_tokens;
  std::string dispatch_dtype;
  std::string skew;
};

BenchResult result_of(const BenchJob& job, const Chosen& chosen, const BenchBoard& board, int variant) {
  const BenchBoard::Times times = board.times(variant);
  BenchResult result{.variant = job.variants[static_cast<std::size_t>(variant)], .skew = chosen.skew};
  result.dispatch = summarise_times(slowest(job, times, &BenchRound::dispatch_us));
  result.combine = summarise_times(slowest(job, times, &BenchRound::combine_us));
  result.round = summarise_times(slowest(job, times, &BenchRound::round_us));
  result.memcpy_us = quantile(slowest(job, times, &BenchRound::memcpy_us), 0.5);
  if (result.variant.graph) result.pipelined = summarise_times(slowest_trains(job, times));
  result.crossed = volume_between_ranks(job, chosen.backend.contract);
  result.per_direction = volume_per_direction(job, chosen.backend.contract);
  result.link = chosen.link;
  return result;
}

int parse_num_sms(const std::string& text, const EngineChoice& engine) {
  if (text == "auto") return 0;
  if (text == "all") return engine.num_sms;
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc() && end == text.data() + text.size() && value >= 0) return value;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("--num-sms has `{}`; numbers, `auto` and `all` are known", text));
}

// Eager ones first: they need nothing of what graphs need.
std::vector<BenchVariant> variants_of(const BenchOptions& options, const EngineChoice& engine) {
  std::vector<BenchVariant> variants;
  for (const bool graph : {false, true}) {
    if (graph ? !options.graph : options.graph && !options.eager) continue;
    for (const std::string& num_sms : options.num_sms)
      variants.push_back({.num_sms = parse_num_sms(num_sms, engine), .graph = graph});
  }
  return variants;
}

BenchRows rows_of(const Contract& contract, const std::string& dispatch_dtype) {
  if (dispatch_dtype != "fp8") return BenchRows::kPlain;
  return contract.takes_cast ? BenchRows::kCast : BenchRows::kQuantised;
}

BenchJob job_of(const BenchOptions& options, const Chosen& chosen) {
  BenchJob job{.shape = options.shape,
               .dtype = options.dtype,
               .rows = rows_of(chosen.backend.contract, chosen.dispatch_dtype),
               .config = chosen.backend.default_config,
               .variants = variants_of(options, chosen.engine),
               .num_threads = options.num_threads,
               .warmup = options.warmup,
               .num_rounds = options.num_rounds,
               .deadline = std::chrono::seconds(options.deadline_seconds),
               .pin = options.pin,
               .engine = chosen.engine};
  // What is asked for is what is measured.
  if (auto* config = std::get_if<HighThroughputConfig>(&job.config); config != nullptr) {
    for (const BenchVariant& variant : job.variants)
      config->max_num_sms = std::max(config->max_num_sms, variant.num_sms);
  }
  job.shape.num_tokens = chosen.num_tokens;
  const std::string trace = parse_bench_skew(chosen.skew, job.shape);
  if (job.shape.skew == BenchSkew::kTrace) {
    job.ids = trace_ids(trace, job.shape);
  } else {
    for (int rank = 0; rank < job.shape.num_ranks; ++rank)
      job.ids.push_back(bench_ids(job.shape, rank));
  }
  return job;
}

void print_result(const BenchOptions& options, const Chosen& chosen, const BenchJob& job, const BenchResult& result) {
  if (options.json) {
    print_bench_json(chosen.backend, options, job, result);
  } else {
    print_bench_line(chosen.backend, job, result);
  }
  std::fflush(stdout);
}

// Prints a line for each variant that came to its end, also when a later one fails.
void measure(const BenchOptions& options, const Chosen& chosen, const BenchJob& job) {
  BenchBoard board({.num_ranks = job.shape.num_ranks,
                    .num_rounds = job.num_rounds,
                    .num_variants = static_cast<int>(job.variants.size())});
  const auto print_finished = [&] {
    for (int variant = 0; variant < board.finished_by_all(); ++variant)
      print_result(options, chosen, job, result_of(job, chosen, board, variant));
  };
  try {
    run_ranks(options.rank_kind, job.shape.num_ranks, [&](const Group& group) { run_bench_rank(job, group, board); });
  } catch (...) {
    print_finished();
    throw;
  }
  print_finished();
}

enum class Outcome : std::uint8_t { kRight, kUnusable, kFailed };

Outcome bench_one(const BenchOptions& options, const Chosen& chosen) {
  const BackendInfo& backend = chosen.backend;
  try {
    measure(options, chosen, job_of(options, chosen));
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
  if (engine.on_host() && (options.graph || options.eager || options.num_sms != BenchOptions{}.num_sms))
    throw Error(ErrorCode::kInvalidArgument, "--graph, --eager and --num-sms are for --engine cuda");
  for (const std::string& dtype : options.dispatch_dtypes) {
    if (dtype == "fp8" || dtype == name(options.dtype)) continue;
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("--dispatch-dtype has {}; rows of --dtype {} travel as {} or fp8", dtype,
                            name(options.dtype), name(options.dtype)));
  }
}

void add_cuda_options(CLI::App& command, BenchOptions& options) {
  command.add_flag("--graph", options.graph, "cuda: capture the round once per rank and replay it");
  command.add_flag("--eager", options.eager, "cuda: beside --graph, measure rounds that are not captured too");
  command
      .add_option("--num-sms", options.num_sms,
                  "cuda: multiprocessors that a phase may use, `all`, or `auto`: the library chooses; a list measures "
                  "each")
      ->delimiter(',')
      ->capture_default_str();
  command
      .add_option("--deadline", options.deadline_seconds, "Seconds after which a rank that waits for another gives up")
      ->check(CLI::Range(1, 3600))
      ->capture_default_str();
  command.add_flag("--limits", options.limits, "cuda: instead, what devices and the link between them can do at best");
}

// Every backend, dtype, skew and number of tokens that was asked for.
std::vector<Chosen> all_chosen(const BenchOptions& options, const EngineChoice& engine, const LinkLimit& link) {
  std::vector<std::string> dtypes = options.dispatch_dtypes;
  if (dtypes.empty()) dtypes.emplace_back(name(options.dtype));
  std::vector<Chosen> all;
  for (const BackendInfo* backend : chosen_backends(options.backends)) {
    for (const std::string& dtype : dtypes) {
      for (const std::string& skew : options.skews) {
        for (const std::int64_t num_tokens : options.num_tokens)
          all.push_back({*backend, engine, link, num_tokens, dtype, skew});
      }
    }
  }
  return all;
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
  command
      ->add_option("--dispatch-dtype", options.dispatch_dtypes,
                   "How rows travel to the experts: as --dtype, or as fp8, to which the backend casts them where it "
                   "can; a list measures each")
      ->delimiter(',');
  command
      ->add_option("--skew", options.skews,
                   "uniform, zipf:A, one, or trace:FILE (a layer's tokens.safetensors); a list measures each")
      ->delimiter(',')
      ->capture_default_str();
  command->add_option("--num-rounds", options.num_rounds, "Rounds that count")
      ->check(CLI::Range(1, 100'000))
      ->capture_default_str();
  command->add_option("--warmup", options.warmup, "Rounds before them; the first one's answer is checked")
      ->check(CLI::Range(1, 100'000))
      ->capture_default_str();
  command->add_option("--seed", options.shape.seed, "Of the routing")->capture_default_str();
  command->add_flag("--pin", options.pin, "Keep rank r on core r modulo the cores");
  add_cuda_options(*command, options);
  command->add_flag("--json", options.json, "JSON lines only");
  return command;
}

int run_bench(const BenchOptions& options) {
  EngineOptions wanted = options.engine;
  if (options.limits) wanted.kind = EngineKind::kCuda;
  const EngineChoice engine = choose_engine(wanted);
  if (options.limits) return run_limits(engine, options.json);
  check_options(options, engine);
  static_cast<void>(variants_of(options, engine));  // refuses what is no number before anything is measured
  const LinkLimit link = engine.on_host() ? LinkLimit{} : measure_link_limit(engine);
  if (!options.json) print_bench_heading(options, engine, link);
  // `all` is those that the engine has.
  const bool may_refuse = !engine.on_host() && asks_for_all(options.backends);
  bool all_right = true;
  std::set<std::string_view> right;
  std::set<std::string_view> unusable;  // nothing of them worked so far
  for (const Chosen& chosen : all_chosen(options, engine, link)) {
    const std::string_view backend = chosen.backend.name;
    if (unusable.contains(backend)) continue;
    const Outcome outcome = bench_one(options, chosen);
    if (outcome == Outcome::kRight) right.insert(backend);
    if (outcome == Outcome::kUnusable && !right.contains(backend)) unusable.insert(backend);
    all_right = all_right && (outcome == Outcome::kRight || (outcome == Outcome::kUnusable && may_refuse));
  }
  return all_right && !right.empty() ? 0 : 1;
}

}  // namespace tokenyard::cli
