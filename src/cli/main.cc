// SPDX-License-Identifier: Apache-2.0
// The `tokenyard` program. Exit status: 0 done and right, 1 not right or not possible, above 100 wrong arguments.
#include <fmt/format.h>

#include <cstdio>
#include <exception>
#include <string>

#include <CLI/CLI.hpp>

#include "tokenyard/version.h"

#include "cli/bench.h"
#include "cli/info.h"
#include "cli/run.h"

int main(int argc, char** argv) {
  using namespace tokenyard;
  try {
    CLI::App program("Tokenyard: dispatch and combine for mixture-of-experts models", "tokenyard");
    program.set_version_flag("--version", "tokenyard " + std::string(version()));
    program.require_subcommand(1);
    cli::InfoOptions info_options;
    cli::RunOptions run_options;
    cli::BenchOptions bench_options;
    const CLI::App* info = cli::add_info_command(program, info_options);
    cli::add_run_command(program, run_options);
    const CLI::App* bench = cli::add_bench_command(program, bench_options);
    CLI11_PARSE(program, argc, argv);
    if (bench->parsed()) return cli::run_bench(bench_options);
    return info->parsed() ? cli::print_info(info_options) : cli::run_layer(run_options);
  } catch (const std::exception& error) {
    fmt::print(stderr, "tokenyard: {}\n", error.what());
    return 1;
  }
}
