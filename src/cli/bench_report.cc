// SPDX-License-Identifier: Apache-2.0
#include "cli/bench_report.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "cli/device_fields.h"

namespace tokenyard::cli {
namespace {

using Json = nlohmann::ordered_json;

double gigabytes_per_second(std::int64_t bytes, double microseconds) {
  return static_cast<double>(bytes) / (microseconds * 1e3);
}

Json time_fields(const BenchTime& value) {
  return {{"median", value.median}, {"p95", value.p95}};
}

void add_host_fields(Json& line, const BenchResult& result) {
  line["memcpy_us"] = result.memcpy_us;
  line["ratio_memcpy"] = result.round.median / result.memcpy_us;
}

void add_cuda_fields(Json& line, const BenchJob& job, const BenchResult& result) {
  line["graph"] = job.graph;
  line["num_sms"] = job.num_sms;
  if (job.graph) line["pipelined_us"] = time_fields(result.pipelined);
  line["dispatch_bytes_per_direction"] = result.per_direction.dispatch_bytes;
  line["combine_bytes_per_direction"] = result.per_direction.combine_bytes;
}

void print_host_line(const BackendInfo& backend, const BenchJob& job, const BenchResult& result) {
  fmt::print("{:<16} {:>7} {:>10.1f} {:>10.1f} {:>10.1f} {:>10.1f} {:>10.1f} {:>10.2f} {:>13.2f} {:>13.2f}\n",
             backend.name, job.shape.num_tokens, result.dispatch.median, result.combine.median, result.round.median,
             result.round.p95, result.memcpy_us, result.round.median / result.memcpy_us,
             gigabytes_per_second(result.crossed.dispatch_bytes, result.dispatch.median),
             gigabytes_per_second(result.crossed.combine_bytes, result.combine.median));
}

// The rate of both phases is of the train where there is one.
void print_cuda_line(const BackendInfo& backend, const BenchJob& job, const BenchResult& result) {
  const BenchVolume& volume = result.per_direction;
  const double round = job.graph ? result.pipelined.median : result.round.median;
  fmt::print("{:<16} {:>7} {:>10.1f} {:>10.1f} {:>10.1f} {:>10.1f} {:>10} {:>13.2f} {:>13.2f} {:>13.2f}\n",
             backend.name, job.shape.num_tokens, result.dispatch.median, result.combine.median, result.round.median,
             result.round.p95, job.graph ? fmt::format("{:.1f}", result.pipelined.median) : "-",
             gigabytes_per_second(volume.dispatch_bytes, result.dispatch.median),
             gigabytes_per_second(volume.combine_bytes, result.combine.median),
             gigabytes_per_second(volume.dispatch_bytes + volume.combine_bytes, round));
}

}  // namespace

void print_bench_heading(const BenchOptions& options, const EngineChoice& engine) {
  fmt::print("{} ranks as {}{}{}, hidden size {}, top-{} of {}, {} rows, {} routing, {} rounds after {}\n",
             options.shape.num_ranks, name(options.rank_kind), describe_devices(engine), options.pin ? ", pinned" : "",
             options.shape.hidden_size, options.shape.top_k, options.shape.num_experts, name(options.dtype),
             options.skew, options.num_rounds, options.warmup);
  if (engine.on_host()) {
    fmt::print(
        "times: median of the slowest rank, in us; GB/s: bytes that crossed between ranks, all of them together\n\n");
    fmt::print("{:<16} {:>7} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10} {:>13} {:>13}\n", "backend", "tokens",
               "dispatch", "combine", "round", "round p95", "memcpy", "x memcpy", "dispatch GB/s", "combine GB/s");
    return;
  }
  fmt::print(
      "times: median of the slowest rank, in us, by CUDA events{}; GB/s: bytes that crossed the link of one device, in "
      "the direction that carries more\n\n",
      options.graph ? "; pipelined: a round in a train of replays" : "");
  fmt::print("{:<16} {:>7} {:>10} {:>10} {:>10} {:>10} {:>10} {:>13} {:>13} {:>13}\n", "backend", "tokens", "dispatch",
             "combine", "round", "round p95", "pipelined", "dispatch GB/s", "combine GB/s", "both GB/s");
}

void print_bench_line(const BackendInfo& backend, const BenchJob& job, const BenchResult& result) {
  if (job.engine.on_host()) {
    print_host_line(backend, job, result);
  } else {
    print_cuda_line(backend, job, result);
  }
}

void print_bench_json(const BackendInfo& backend,
                      const BenchOptions& options,
                      const BenchJob& job,
                      const BenchResult& result) {
  Json line{{"backend", backend.name},
            {"engine", job.engine.engine_name()},
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
            {"dispatch_us", time_fields(result.dispatch)},
            {"combine_us", time_fields(result.combine)},
            {"round_us", time_fields(result.round)}};
  add_devices(line, job.engine);
  if (job.engine.on_host()) {
    add_host_fields(line, result);
  } else {
    add_cuda_fields(line, job, result);
  }
  line["dispatch_bytes"] = result.crossed.dispatch_bytes;
  line["combine_bytes"] = result.crossed.combine_bytes;
  fmt::print("{}\n", line.dump());
}

}  // namespace tokenyard::cli
