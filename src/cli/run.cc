// SPDX-License-Identifier: Apache-2.0
#include "cli/run.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <optional>
#include <system_error>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "tokenyard/error.h"

#include "cli/common_options.h"
#include "cli/device_fields.h"
#include "cli/safetensors.h"

namespace tokenyard::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kLayerName = "tiny_moe";

// The layer beside an installed program, else that of the source tree it was built from.
std::filesystem::path default_layer() {
  std::error_code error;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", error);
  auto installed = program.parent_path().parent_path() / TOKENYARD_INSTALL_DATA / kLayerName;
  if (!error && std::filesystem::is_directory(installed, error)) return installed;
  return std::filesystem::path(TOKENYARD_SOURCE_DATA) / kLayerName;
}

struct Outcome {
  std::string_view status;  // "ok", "inaccurate", "failed" or "unusable"
  std::string reason;       // empty when ok
  std::optional<JobReport> report;

  [[nodiscard]] bool ok() const { return status == "ok"; }
};

Outcome run_backend(const BackendInfo& backend, const MoeLayer& layer, const JobOptions& options) {
  const Support support = probe(backend);
  if (support.state == Support::State::kUnusable || !backend.moves_tokens) {
    return {.status = "unusable", .reason = support.reason, .report = {}};
  }
  try {
    Outcome outcome{.status = "ok", .reason = {}, .report = run_job(backend, layer, options)};
    const double limit = error_limit(options.dispatch_dtype);
    // Written so that a NaN is no success.
    if (!(outcome.report->relative_error <= limit)) {
      outcome.status = "inaccurate";
      outcome.reason = fmt::format("relative error {:.3g} is above {}", outcome.report->relative_error, limit);
    }
    return outcome;
  } catch (const Error& error) {
    const bool refused = error.code() == ErrorCode::kUnsupported;
    return {.status = refused ? "unusable" : "failed", .reason = error.what(), .report = {}};
  } catch (const std::exception& error) {
    return {.status = "failed", .reason = error.what(), .report = {}};
  }
}

void print_json(const BackendInfo& backend, const JobOptions& options, const Outcome& outcome) {
  Json line{{"backend", backend.name},
            {"engine", options.engine.engine_name()},
            {"num_ranks", options.num_ranks},
            {"rank_kind", name(options.rank_kind)},
            {"dispatch_dtype", name(options.dispatch_dtype)},
            {"num_threads", options.num_threads},
            {"num_rounds", options.num_rounds},
            {"status", outcome.status}};
  add_devices(line, options.engine);
  if (!outcome.reason.empty()) line["reason"] = outcome.reason;
  if (outcome.report) {
    const JobReport& report = *outcome.report;
    line["num_tokens"] = report.num_tokens;
    line["relative_error"] = report.relative_error;
    line["dispatch_us"] = report.times.dispatch_us;
    line["expert_us"] = report.times.expert_us;
    line["combine_us"] = report.times.combine_us;
    line["rows_per_rank"] = report.rows_per_rank;
  }
  fmt::print("{}\n", line.dump());
  std::fflush(stdout);
}

void print_heading(const MoeLayer& layer, const std::filesystem::path& folder, const JobOptions& options) {
  fmt::print("layer {}: {} tokens, {} experts, top-{}, hidden size {}\n{} ranks as {}{}, {} rows, {} rounds\n\n",
             folder.string(), layer.num_tokens(), layer.num_experts(), layer.top_k(), layer.hidden_size(),
             options.num_ranks, name(options.rank_kind), describe_devices(options.engine), name(options.dispatch_dtype),
             options.num_rounds);
  fmt::print("{:<16} {:<7} {:>5}  {:<9}  {:<10} {:>14} {:>12} {:>12} {:>12}  {}\n", "backend", "engine", "ranks",
             "kind", "status", "relative error", "dispatch us", "experts us", "combine us", "rows per rank");
  std::fflush(stdout);
}

// The first cells, before the work: a reader sees what is running.
void print_line_start(const BackendInfo& backend, const JobOptions& options) {
  fmt::print("{:<16} {:<7} {:>5}  {:<9}  ", backend.name, options.engine.engine_name(), options.num_ranks,
             name(options.rank_kind));
  std::fflush(stdout);
}

void print_line_end(const Outcome& outcome) {
  if (outcome.report) {
    const JobReport& report = *outcome.report;
    const auto [least, most] = std::ranges::minmax(report.rows_per_rank);
    fmt::print("{:<10} {:>14.6f} {:>12.0f} {:>12.0f} {:>12.0f}  {}\n", outcome.status, report.relative_error,
               report.times.dispatch_us, report.times.expert_us, report.times.combine_us,
               least == most ? fmt::format("{}", least) : fmt::format("{}-{}", least, most));
  } else {
    fmt::print("{}\n", outcome.status);
  }
  std::fflush(stdout);
}

void write_output(const std::filesystem::path& path, const MoeLayer& layer, JobReport& report) {
  std::vector<std::int64_t> shape{report.num_tokens};
  if (report.num_tokens == layer.num_tokens()) shape.assign(layer.token_shape().begin(), layer.token_shape().end());
  shape.push_back(layer.hidden_size());
  const TensorView rows(report.output.data(), Dtype::kBf16, std::span<const std::int64_t>(shape));
  write_safetensors(path, std::vector<NamedTensor>{{"combined_output", rows}});
}

}  // namespace

CLI::App* add_run_command(CLI::App& program, RunOptions& options) {
  CLI::App* command =
      program.add_subcommand("run", "Send a layer's tokens to its experts and back, and check the sums");
  add_backend_option(*command, options.backends);
  add_rank_options(*command, {options.job.num_ranks, options.job.rank_kind, options.job.num_threads});
  add_engine_options(*command, options.engine);
  command->add_option("--layer", options.layer,
                      "Folder with tokens, experts and expected .safetensors; default: tiny_moe");
  const std::map<std::string, DispatchDtype> dtypes{{"bf16", DispatchDtype::kBf16}, {"fp8", DispatchDtype::kFp8}};
  command->add_option("--dispatch-dtype", options.job.dispatch_dtype, "How rows travel to the experts")
      ->transform(CLI::CheckedTransformer(dtypes))
      ->default_str("bf16");
  command->add_option("--num-tokens", options.job.max_tokens_per_rank, "Tokens of its share that a rank sends at most")
      ->check(CLI::PositiveNumber);
  command->add_option("--num-rounds", options.job.num_rounds, "Rounds, of which the median is shown")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
  command->add_option("--output", options.output, "Write the first backend's sums to this safetensors file");
  command->add_flag("--json", options.json, "JSON lines only");
  return command;
}

int run_layer(const RunOptions& options) {
  const std::vector<const BackendInfo*> chosen = chosen_backends(options.backends);
  const std::filesystem::path folder = options.layer.empty() ? default_layer() : options.layer;
  JobOptions job = options.job;
  job.engine = choose_engine(options.engine);
  const MoeLayer layer = MoeLayer::load(folder);
  if (!options.json) print_heading(layer, folder, job);
  // `all` is those that the engine has.
  const bool may_refuse = !job.engine.on_host() && asks_for_all(options.backends);
  bool all_ok = true;
  bool any_ok = false;
  for (const BackendInfo* backend : chosen) {
    if (!options.json) print_line_start(*backend, job);
    Outcome outcome = run_backend(*backend, layer, job);
    all_ok = all_ok && (outcome.ok() || (may_refuse && outcome.status == "unusable"));
    any_ok = any_ok || outcome.ok();
    if (options.json) {
      print_json(*backend, job, outcome);
    } else {
      print_line_end(outcome);
    }
    if (!outcome.ok()) fmt::print(stderr, "tokenyard: {}: {}: {}\n", backend->name, outcome.status, outcome.reason);
    if (backend == chosen.front() && outcome.report && !options.output.empty()) {
      write_output(options.output, layer, *outcome.report);
    }
  }
  return all_ok && any_ok ? 0 : 1;
}

}  // namespace tokenyard::cli
