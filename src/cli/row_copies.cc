// SPDX-License-Identifier: Apache-2.0
#include "cli/row_copies.h"

#include <algorithm>
#include <cstring>

namespace tokenyard::cli {

RowCopies::RowCopies(const BenchJob& job, int rank) : row_bytes_(job.shape.hidden_size * size_of(job.dtype)) {
  const std::vector<std::int32_t>& ids = job.ids[static_cast<std::size_t>(rank)];
  for (std::int64_t token = 0; token < job.shape.num_tokens; ++token) {
    std::vector<int> owners;
    owners.reserve(static_cast<std::size_t>(job.shape.top_k));
    for (int slot = 0; slot < job.shape.top_k; ++slot)
      owners.push_back(bench_owner(job.shape, ids[static_cast<std::size_t>(token * job.shape.top_k + slot)]));
    std::ranges::sort(owners);
    const auto copies = std::unique(owners.begin(), owners.end()) - owners.begin();
    token_of_.insert(token_of_.end(), static_cast<std::size_t>(copies), token);
  }
  const auto rows = token_of_.size() * static_cast<std::size_t>(row_bytes_);
  tokens_.resize(static_cast<std::size_t>(job.shape.num_tokens * row_bytes_), std::byte{1});
  for (auto* memory : {&dispatched_, &returned_, &landed_})
    memory->resize(rows, std::byte{1});
}

void RowCopies::run() {
  const auto bytes = static_cast<std::size_t>(row_bytes_);
  for (std::size_t i = 0; i < token_of_.size(); ++i)
    std::memcpy(dispatched_.data() + i * bytes, tokens_.data() + token_of_[i] * row_bytes_, bytes);
  for (std::size_t i = 0; i < token_of_.size(); ++i)
    std::memcpy(landed_.data() + i * bytes, returned_.data() + i * bytes, bytes);
}

}  // namespace tokenyard::cli
