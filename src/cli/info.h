// SPDX-License-Identifier: Apache-2.0
// `tokenyard info`: what this build has and what its backends promise. Thread rule: call from the main thread.
#pragma once

namespace CLI {
class App;
}  // namespace CLI

namespace tokenyard::cli {

struct InfoOptions {
  bool json = false;
  bool markdown = false;
};

CLI::App* add_info_command(CLI::App& program, InfoOptions& options);

// Returns the exit status.
int print_info(const InfoOptions& options);

}  // namespace tokenyard::cli
