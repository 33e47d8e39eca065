// SPDX-License-Identifier: Apache-2.0
#include "cli/info.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "tokenyard/backends.h"
#include "tokenyard/version.h"

#include "cli/contract_table.h"
#include "engine/engine.h"
#include "fabric/window.h"

namespace tokenyard::cli {
namespace {

using Json = nlohmann::ordered_json;

// Where contracts differ by engine, as Communication::contract() tells.
constexpr const char* kOnGpus = "On GPUs `takes_turns` is no: each communication has queues of its own.";

struct Described {
  const BackendInfo* info;
  Support support;
  Json contract;
};

std::vector<Described> describe_backends() {
  std::vector<Described> result;
  for (const BackendInfo& backend : backends()) {
    result.push_back({.info = &backend, .support = probe(backend), .contract = contract_fields(backend.contract)});
  }
  return result;
}

template <class Registry>
std::vector<std::string> names_of(const Registry& registry) {
  std::vector<std::string> result;
  for (const auto& entry : registry)
    result.emplace_back(entry.name);
  return result;
}

void print_json() {
  fmt::print("{}\n", Json{{"program", "tokenyard"},
                          {"version", version()},
                          {"engines", names_of(engine::engines())},
                          {"fabrics", names_of(fabric::fabrics())}}
                         .dump());
  for (const Described& backend : describe_backends()) {
    const std::vector<std::string> aliases(backend.info->aliases.begin(), backend.info->aliases.end());
    fmt::print("{}\n", Json{{"backend", backend.info->name},
                            {"support", name(backend.support.state)},
                            {"reason", backend.support.reason},
                            {"moves_tokens", backend.info->moves_tokens},
                            {"use_when", backend.info->use_when},
                            {"seed_class", backend.info->seed_class},
                            {"aliases", aliases},
                            {"contract", backend.contract}}
                           .dump());
  }
}

// Rows of cells; the first row is the head and the first column holds names.
using Table = std::vector<std::vector<std::string>>;

// Fields down, backends across: there will always be more fields than backends.
Table contract_rows(const std::vector<Described>& described) {
  Table table{{"field"}};
  for (const Described& backend : described)
    table[0].emplace_back(backend.info->name);
  const Json fields = contract_fields(Contract{});
  for (const auto& [field, unused] : fields.items()) {
    std::vector<std::string>& row = table.emplace_back(1, field);
    for (const Described& backend : described)
      row.push_back(table_cell(backend.contract.at(field)));
  }
  return table;
}

void print_aligned(const Table& table) {
  std::vector<std::size_t> widths(table.front().size());
  for (const auto& row : table) {
    for (std::size_t i = 0; i < row.size(); ++i)
      widths[i] = std::max(widths[i], row[i].size());
  }
  for (const auto& row : table) {
    std::string line = " ";
    for (std::size_t i = 0; i < row.size(); ++i)
      line += fmt::format(" {:<{}}", row[i], widths[i] + 1);
    line.erase(line.find_last_not_of(' ') + 1);
    fmt::print("{}\n", line);
  }
}

void print_for_people() {
  const std::vector<Described> described = describe_backends();
  fmt::print("tokenyard {}\nengines: {}\nfabrics: {}\n\nbackends\n", version(),
             fmt::join(names_of(engine::engines()), ", "), fmt::join(names_of(fabric::fabrics()), ", "));
  Table table{{"name", "support", "use when", "also called"}};
  for (const auto& [info, support, unused] : described) {
    table.push_back(
        {std::string(info->name), std::string(name(support.state)), std::string(info->use_when),
         fmt::format("{}{}{}", fmt::join(info->aliases, ", "), info->aliases.empty() ? "" : ", ", info->seed_class)});
  }
  print_aligned(table);
  for (const auto& [info, support, unused] : described) {
    if (!support.reason.empty()) fmt::print("\n  {} is {}: {}\n", info->name, name(support.state), support.reason);
  }
  fmt::print("\ncontracts\n");
  print_aligned(contract_rows(described));
  fmt::print("\n  {}\n", kOnGpus);
}

void print_markdown_table(const Table& table) {
  for (std::size_t i = 0; i < table.size(); ++i) {
    fmt::print("| {} |\n", fmt::join(table[i], " | "));
    if (i == 0) fmt::print("|{}\n", fmt::join(std::vector<std::string>(table[i].size(), "---|"), ""));
  }
}

// Support on this machine is left out: the page must not depend on where it was printed.
void print_markdown() {
  const std::vector<Described> described = describe_backends();
  fmt::print(
      "<!-- Written by `tokenyard info --markdown`; a test compares the two. -->\n# Contracts\n\n"
      "What each backend takes, gives and promises, as `tokenyard::Contract` says it; a `DispatchInput` member or an "
      "option that a backend does not take is refused when set.\n\n");
  print_markdown_table(contract_rows(described));
  fmt::print("\n{}\n", kOnGpus);
  fmt::print("\n## Names\n\nEvery place that takes a backend's name takes these too.\n\n");
  Table names{{"name", "aliases", "class of the seed", "use it when"}};
  for (const auto& [info, support, unused] : described) {
    std::vector<std::string> aliases;
    for (const std::string_view alias : info->aliases)
      aliases.push_back(fmt::format("`{}`", alias));
    names.push_back({fmt::format("`{}`", info->name), fmt::format("{}", fmt::join(aliases, ", ")),
                     fmt::format("`{}`", info->seed_class), std::string(info->use_when)});
  }
  print_markdown_table(names);
}

}  // namespace

CLI::App* add_info_command(CLI::App& program, InfoOptions& options) {
  CLI::App* command = program.add_subcommand("info", "What this build has, and the contract of every backend");
  auto* json = command->add_flag("--json", options.json, "JSON lines: the program, then one line per backend");
  command->add_flag("--markdown", options.markdown, "The page docs/contracts.md")->excludes(json);
  return command;
}

int print_info(const InfoOptions& options) {
  if (options.json) {
    print_json();
  } else if (options.markdown) {
    print_markdown();
  } else {
    print_for_people();
  }
  return 0;
}

}  // namespace tokenyard::cli
