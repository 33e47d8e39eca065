// SPDX-License-Identifier: Apache-2.0
#include "communication/agreement.h"

#include <algorithm>
#include <cstring>
#include <span>

namespace tokenyard::communication {
namespace {

constexpr char kFailed = '!';

std::string text_of(const Bytes& bytes) {
  std::string text(bytes.size(), '\0');
  if (!bytes.empty()) std::memcpy(text.data(), bytes.data(), bytes.size());
  return text;
}

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

std::string line_at(const std::string& text, std::size_t start) {
  return text.substr(start, std::min(text.find('\n', start), text.size()) - start);
}

// The first field in which the ranks' texts differ, with each rank's value.
std::string first_difference(const std::vector<std::string>& texts) {
  std::size_t at = texts[0].size();
  for (const std::string& text : texts) {
    const auto ends = std::ranges::mismatch(texts[0], text);
    at = std::min(at, static_cast<std::size_t>(ends.in1 - texts[0].begin()));
  }
  const std::size_t newline = texts[0].rfind('\n', at == 0 ? 0 : at - 1);
  const std::size_t start = newline == std::string::npos ? 0 : newline + 1;
  const std::string line = line_at(texts[0], start);
  std::string message = "ranks disagree on " + line.substr(0, line.find('=')) + ":";
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    const std::string own = start <= texts[rank].size() ? line_at(texts[rank], start) : "";
    message += (rank == 0 ? " rank " : ", rank ") + std::to_string(rank) + ": " + own.substr(own.find('=') + 1);
  }
  return message;
}

}  // namespace

Fields fields_of(const MoeParams& params) {
  return {{"MoeParams::num_experts", std::to_string(params.num_experts)},
          {"MoeParams::top_k", std::to_string(params.top_k)},
          {"MoeParams::hidden_size", std::to_string(params.hidden_size)},
          {"MoeParams::max_tokens_per_rank", std::to_string(params.max_tokens_per_rank)},
          {"MoeParams::dtype", std::string(name(params.dtype))},
          {"MoeParams::dispatch_format", std::string(name(params.dispatch_format))},
          {"MoeParams::invalid_expert_id", std::to_string(params.invalid_expert_id)}};
}

std::string joined(const Fields& fields) {
  std::string text;
  for (const auto& [field, value] : fields)
    text.append(field).append("=").append(value).append("\n");
  return text;
}

Error named(const Error& error, int rank) {
  const std::string prefix = "rank " + std::to_string(rank) + ": ";
  const std::string text = error.what();
  if (text.starts_with(prefix)) return error;
  return {error.code(), prefix + text, rank, error.peer()};
}

Status status_of(const Error& error, int rank, Phase phase) {
  const StatusCode code = error.code() == ErrorCode::kPeerLost ? StatusCode::kPeerLost : StatusCode::kTimeout;
  return {.code = code, .fault = {.rank = rank, .peer = error.peer(), .phase = phase}};
}

std::vector<std::string> gather_texts(const Group& group,
                                      const std::string& text,
                                      const std::optional<Error>& failure) {
  const std::string brought = failure ? kFailed + std::string(failure->what()) : text;
  std::vector<std::string> texts;
  try {
    for (const Bytes& bytes : group.all_gather(bytes_of(brought)))
      texts.push_back(text_of(bytes));
  } catch (const Error&) {
    if (!failure) throw;
  }
  if (failure) throw named(*failure, group.rank());
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    if (!texts[rank].starts_with(kFailed)) continue;
    throw named(Error(ErrorCode::kPeerFailed, "rank " + std::to_string(rank) + " failed: " + texts[rank].substr(1),
                      group.rank(), static_cast<int>(rank)),
                group.rank());
  }
  return texts;
}

void require_equal(const std::vector<std::string>& texts, int rank) {
  if (std::ranges::adjacent_find(texts, std::ranges::not_equal_to{}) == texts.end()) return;
  throw named(Error(ErrorCode::kMismatch, first_difference(texts)), rank);
}

}  // namespace tokenyard::communication
