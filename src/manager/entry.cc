// SPDX-License-Identifier: Apache-2.0
#include "manager/entry.h"

#include <algorithm>

namespace tokenyard::manager {

std::shared_ptr<Entry> HandleCache::find(const std::string& key) const {
  const auto found = entries_.find(key);
  return found == entries_.end() ? nullptr : found->second.lock();
}

void HandleCache::insert(const std::string& key, const std::shared_ptr<Entry>& entry) {
  std::erase_if(entries_, [](const auto& item) { return item.second.expired(); });
  entries_[key] = entry;
}

std::vector<std::shared_ptr<Entry>> HandleCache::live() const {
  std::vector<std::shared_ptr<Entry>> entries;
  for (const auto& [key, weak] : entries_) {
    if (std::shared_ptr<Entry> entry = weak.lock()) entries.push_back(std::move(entry));
  }
  std::ranges::sort(entries, {}, [](const auto& entry) { return entry->ordinal; });
  return entries;
}

}  // namespace tokenyard::manager
