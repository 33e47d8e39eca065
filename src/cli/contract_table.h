// SPDX-License-Identifier: Apache-2.0
// A backend's contract as named values, for JSON and for tables: the one place that lists the fields of `Contract`.
// Thread rule: pure functions.
#pragma once

#include <string>

#include <nlohmann/json.hpp>

#include "tokenyard/backends.h"

namespace tokenyard::cli {

// Field name to value, in the order of `Contract`.
[[nodiscard]] nlohmann::ordered_json contract_fields(const Contract& contract);

// "yes", "no", a number or a word.
[[nodiscard]] std::string table_cell(const nlohmann::ordered_json& value);

[[nodiscard]] std::string_view name(Support::State state);

}  // namespace tokenyard::cli
