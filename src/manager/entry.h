// SPDX-License-Identifier: Apache-2.0
// A communication of a manager, and the cache through which equal requests find the same one.
// Thread rule: the manager's lock guards both; a handle may drop its entry on any thread without it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tokenyard/communication.h"

namespace tokenyard::manager {

struct Entry {
  Entry(Communication made, std::uint64_t number) : communication(std::move(made)), ordinal(number) {}

  Communication communication;
  std::uint64_t ordinal;  // the same on every rank, because making one is collective
};

// Keeps no entry alive.
class HandleCache {
 public:
  // Null when no user of an equal request is left.
  [[nodiscard]] std::shared_ptr<Entry> find(const std::string& key) const;
  void insert(const std::string& key, const std::shared_ptr<Entry>& entry);
  // By ordinal.
  [[nodiscard]] std::vector<std::shared_ptr<Entry>> live() const;

 private:
  std::map<std::string, std::weak_ptr<Entry>> entries_;
};

}  // namespace tokenyard::manager
