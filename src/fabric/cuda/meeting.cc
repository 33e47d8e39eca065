// SPDX-License-Identifier: Apache-2.0
#include "fabric/cuda/meeting.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <optional>
#include <string>

#include "tokenyard/error.h"

#include "fabric/gather_exports.h"
#include "system/host.h"
#include "system/process.h"

namespace tokenyard::fabric::cuda {
namespace {

std::string rank_text(int rank) {
  return "rank " + std::to_string(rank);
}

std::string device_text(const WindowCard& card, int rank) {
  return "device " + std::to_string(card.device) + " (" + card.bus_id.data() + ") of " + rank_text(rank);
}

std::string place_text(const WindowCard& card) {
  return card.mapped_host != 0 ? "in mapped host memory" : "in device memory";
}

// Every rank compares with rank 0, so that all come to the same end.
void check_agreement(std::span<const WindowCard> cards, int own_rank) {
  const WindowCard& first = cards.front();
  for (std::size_t i = 1; i < cards.size(); ++i) {
    const WindowCard& card = cards[i];
    const int rank = static_cast<int>(i);
    const int about = own_rank == rank ? 0 : rank;
    const std::string who = rank_text(own_rank) + ": ";
    if (card.mapped_host != first.mapped_host) {
      throw Error(ErrorCode::kMismatch,
                  who + "rank 0 asked for a window " + place_text(first) + " and " + rank_text(rank) + " for one " +
                      place_text(card) + "; allow_mapped_host must be the same on all ranks",
                  own_rank, about);
    }
    if (card.bytes != first.bytes) {
      throw Error(ErrorCode::kMismatch,
                  who + "the window of rank 0 has " + std::to_string(first.bytes) + " bytes and that of " +
                      rank_text(rank) + " has " + std::to_string(card.bytes) + "; all must have the same size",
                  own_rank, about);
    }
    if (card.host != first.host) {
      throw Error(ErrorCode::kUnsupported,
                  who + rank_text(rank) + " is on another host than rank 0; peer access reaches only GPUs of one host",
                  own_rank, about);
    }
  }
}

// This process's number of the device, if it sees it.
std::optional<CUdevice> find_device(const Driver& cu, const std::array<char, 16>& uuid) {
  const int count = device_count(cu);
  for (int index = 0; index < count; ++index) {
    CUdevice device = 0;
    CUuuid seen{};
    require(cu, cu.device_get(&device, index), "cuDeviceGet");
    require(cu, cu.device_get_uuid(&seen, device), "cuDeviceGetUuid");
    if (std::memcmp(seen.bytes, uuid.data(), uuid.size()) == 0) return device;
  }
  return std::nullopt;
}

// Empty when the context's device reaches the memory of the other's.
std::string why_unreachable(const Context& context, const WindowCard& mine, const WindowCard& other, int rank) {
  if (mine.uuid == other.uuid) return "";
  const Driver& cu = context.driver();
  const std::optional<CUdevice> device = find_device(cu, other.uuid);
  if (!device) return "the latter is not visible to " + rank_text(rank) + "; CUDA_VISIBLE_DEVICES hides it";
  int can = 0;
  require(cu, cu.device_can_access_peer(&can, context.device(), *device), "cuDeviceCanAccessPeer");
  return can != 0 ? "" : "the driver offers none between the two";
}

}  // namespace

WindowCard card_of(const Context& context) {
  const Driver& cu = context.driver();
  WindowCard card{.process = system::process_nonce(), .device = context.index()};
  CUuuid uuid{};
  require(cu, cu.device_get_uuid(&uuid, context.device()), "cuDeviceGetUuid");
  std::memcpy(card.uuid.data(), uuid.bytes, card.uuid.size());
  // Zeros end the texts.
  const std::string bus = bus_id(cu, context.device());
  std::copy_n(bus.data(), std::min(bus.size(), card.bus_id.size() - 1), card.bus_id.data());
  const std::string host = system::host_identity();
  std::copy_n(host.data(), std::min(host.size(), card.host.size() - 1), card.host.data());
  return card;
}

Meeting meet(const Group& group, const WindowCard& mine, std::chrono::milliseconds deadline) {
  Meeting meeting{.cards = gather_exports(group, mine, deadline), .foreign = {}};
  for (WindowCard& card : meeting.cards) {
    card.bus_id.back() = '\0';
    meeting.foreign.push_back(card.process != mine.process ? 1 : 0);
    meeting.any_foreign = meeting.any_foreign || meeting.foreign.back() != 0;
  }
  check_agreement(meeting.cards, group.rank());
  return meeting;
}

void require_reach(const Context& context, std::span<const WindowCard> cards, int rank) {
  const WindowCard& mine = cards[static_cast<std::size_t>(rank)];
  for (std::size_t peer = 0; peer < cards.size(); ++peer) {
    const std::string reason = why_unreachable(context, mine, cards[peer], rank);
    if (reason.empty()) continue;
    const int about = static_cast<int>(peer);
    throw Error(ErrorCode::kUnsupported,
                rank_text(rank) + ": no peer access between " + device_text(mine, rank) + " and " +
                    device_text(cards[peer], about) + ": " + reason +
                    ". Windows in mapped host memory (CommunicationOptions::allow_mapped_host) need none",
                rank, about);
  }
}

void all_or_none(const Group& group, std::chrono::milliseconds deadline, const std::function<void()>& step) {
  std::exception_ptr own_error;
  std::string reason;
  try {
    step();
  } catch (const std::exception& error) {
    own_error = std::current_exception();
    reason = error.what();
    if (reason.empty()) reason = "an error without words";
    reason.resize(std::min(reason.size(), std::size_t{4096}));
  }
  const std::vector<Bytes> reasons = group.all_gather(std::as_bytes(std::span(reason)), deadline);
  if (own_error) std::rethrow_exception(own_error);
  for (std::size_t rank = 0; rank < reasons.size(); ++rank) {
    if (reasons[rank].empty()) continue;
    std::string text(reasons[rank].size(), '\0');
    std::memcpy(text.data(), reasons[rank].data(), text.size());
    const std::string prefix = rank_text(static_cast<int>(rank)) + ": ";
    throw Error(ErrorCode::kPeerFailed, text.starts_with(prefix) ? text : prefix + text, group.rank(),
                static_cast<int>(rank));
  }
}

}  // namespace tokenyard::fabric::cuda
