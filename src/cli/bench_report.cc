// SPDX-License-Identifier: Apache-2.0
#include "cli/bench_report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string>

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

void add_cuda_fields(Json& line, const BenchResult& result) {
  line["graph"] = result.variant.graph;
  line["num_sms"] = result.variant.num_sms;
  if (result.variant.graph) line["pipelined_us"] = time_fields(result.pipelined);
  line["dispatch_bytes_per_direction"] = result.per_direction.dispatch_bytes;
  line["combine_bytes_per_direction"] = result.per_direction.combine_bytes;
  line.update(link_fields(result));
}

std::string_view dispatch_dtype(const BenchJob& job) {
  return job.rows == BenchRows::kPlain ? name(job.dtype) : "fp8";
}

void print_host_line(const BackendInfo& backend, const BenchJob& job, const BenchResult& result) {
  fmt::print(
      "{:<16} {:>7} {:>5} {:>9} {:>10.1f} {:>10.1f} {:>10.1f} {:>10.1f} {:>10.1f} {:>10.2f} {:>13.2f} {:>13.2f}\n",
      backend.name, job.shape.num_tokens, dispatch_dtype(job), result.skew.substr(0, 9), result.dispatch.median,
      result.combine.median, result.round.median, result.round.p95, result.memcpy_us,
      result.round.median / result.memcpy_us,
      gigabytes_per_second(result.crossed.dispatch_bytes, result.dispatch.median),
      gigabytes_per_second(result.crossed.combine_bytes, result.combine.median));
}

std::string percent_of_floor(double floor_us, double time_us) {
  return floor_us > 0 ? fmt::format("{:.0f} %", 100 * floor_us / time_us) : "-";
}

// What both phases together reach is of the train where there is one.
void print_cuda_line(const BackendInfo& backend, const BenchJob& job, const BenchResult& result) {
  const bool graph = result.variant.graph;
  const double round = graph ? result.pipelined.median : result.round.median;
  const LinkFloor floor = link_floor(result);
  fmt::print(
      "{:<16} {:>7} {:>5} {:>9} {:>4} {:>6} {:>10.1f} {:>10.1f} {:>10.1f} {:>10.1f} {:>10} {:>10} {:>10} {:>8}{}\n",
      backend.name, job.shape.num_tokens, dispatch_dtype(job), result.skew.substr(0, 9),
      result.variant.num_sms == 0 ? "auto" : std::to_string(result.variant.num_sms), graph ? "graph" : "eager",
      result.dispatch.median, result.combine.median, result.round.median, result.round.p95,
      graph ? fmt::format("{:.1f}", result.pipelined.median) : "-",
      percent_of_floor(floor.dispatch_us, result.dispatch.median),
      percent_of_floor(floor.combine_us, result.combine.median), percent_of_floor(floor.round_us(), round),
      result.link.there() && !result.link.sound() ? "  void: the link is too slow" : "");
}

}  // namespace

LinkFloor link_floor(const BenchResult& result) {
  if (!result.link.there()) return {};
  const double bytes_per_us = result.link.gb_per_s * 1e3;
  return {.dispatch_us = static_cast<double>(result.per_direction.dispatch_bytes) / bytes_per_us,
          .combine_us = static_cast<double>(result.per_direction.combine_bytes) / bytes_per_us};
}

Json link_fields(const BenchResult& result) {
  const LinkFloor floor = link_floor(result);
  Json fields{{"link", result.link.state()}, {"link_gb_per_s", nullptr}};
  if (result.link.there()) fields["link_gb_per_s"] = result.link.gb_per_s;
  fields["void"] = result.link.there() && !result.link.sound();
  fields["link_floor_us"] = nullptr;
  fields["fraction_of_link_floor"] = nullptr;
  if (floor.round_us() == 0) return fields;
  fields["link_floor_us"] = {
      {"dispatch", floor.dispatch_us}, {"combine", floor.combine_us}, {"round", floor.round_us()}};
  Json fractions{{"dispatch", floor.dispatch_us / result.dispatch.median},
                 {"combine", floor.combine_us / result.combine.median},
                 {"round", floor.round_us() / result.round.median}};
  if (result.variant.graph) fractions["pipelined"] = floor.round_us() / result.pipelined.median;
  fields["fraction_of_link_floor"] = fractions;
  return fields;
}

void print_bench_heading(const BenchOptions& options, const EngineChoice& engine, const LinkLimit& link) {
  fmt::print("{} ranks as {}{}{}, hidden size {}, top-{} of {}, {} rows, {} routing, {} rounds after {}\n",
             options.shape.num_ranks, name(options.rank_kind), describe_devices(engine), options.pin ? ", pinned" : "",
             options.shape.hidden_size, options.shape.top_k, options.shape.num_experts, name(options.dtype),
             fmt::join(options.skews, " and "), options.num_rounds, options.warmup);
  if (engine.on_host()) {
    fmt::print(
        "times: median of the slowest rank, in us; GB/s: bytes that crossed between ranks, all of them together\n\n");
    fmt::print("{:<16} {:>7} {:>5} {:>9} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10} {:>13} {:>13}\n", "backend",
               "tokens", "rows", "routing", "dispatch", "combine", "round", "round p95", "memcpy", "x memcpy",
               "dispatch GB/s", "combine GB/s");
    return;
  }
  fmt::print("link: {}\n", link.there() ? fmt::format("{:.1f} GB/s each way, {}", link.gb_per_s, link.state())
                                        : fmt::format("none: {}", link.reason));
  fmt::print(
      "times: median of the slowest rank, in us, by CUDA events{}; % of the link's floor: what the bytes of one "
      "direction take at that rate\n\n",
      options.graph ? "; pipelined: a round in a train of replays" : "");
  fmt::print("{:<16} {:>7} {:>5} {:>9} {:>4} {:>6} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10} {:>8}\n", "backend",
             "tokens", "rows", "routing", "SMs", "", "dispatch", "combine", "round", "round p95", "pipelined",
             "% dispatch", "% combine", "% both");
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
            {"dispatch_dtype", dispatch_dtype(job)},
            {"skew", result.skew},
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
    add_cuda_fields(line, result);
  }
  line["dispatch_bytes"] = result.crossed.dispatch_bytes;
  line["combine_bytes"] = result.crossed.combine_bytes;
  fmt::print("{}\n", line.dump());
}

}  // namespace tokenyard::cli
