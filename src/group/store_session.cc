// SPDX-License-Identifier: Apache-2.0
#include "group/store_session.h"

#include <algorithm>
#include <utility>

namespace tokenyard::group {

namespace {

std::shared_ptr<const Bytes> share(Bytes bytes) {
  return std::make_shared<const Bytes>(std::move(bytes));
}

Refusal malformed(std::string reason) {
  return {.code = RefusalCode::kMalformed, .reason = "the store cannot take this frame: " + std::move(reason)};
}

}  // namespace

StoreSession::StoreSession(Options options)
    : options_(std::move(options)),
      ledger_(options_.num_ranks),
      members_(static_cast<std::size_t>(options_.num_ranks)) {}

std::uint32_t StoreSession::expected_types(ConnectionId connection) const {
  if (!is_member(connection)) return type_bit(FrameType::kHello);
  return type_bit(FrameType::kWho) | (joined_ ? type_bit(FrameType::kGather) : 0U);
}

void StoreSession::on_frame(ConnectionId from, Frame frame, std::vector<Reply>& replies) {
  const auto found = rank_of_.find(from);
  if (found == rank_of_.end()) {
    if (frame.header.type == FrameType::kHello) return on_hello(from, frame, replies);
    return expel(from, malformed(std::string(describe(WireFault::kType))), replies);
  }
  const int rank = found->second;
  if (frame.header.rank != static_cast<std::uint32_t>(rank)) {
    return expel(
        from,
        malformed("it says rank " + std::to_string(frame.header.rank) + " and comes from rank " + std::to_string(rank)),
        replies);
  }
  if (frame.header.type == FrameType::kWho) return on_who(from, rank, frame.header.sequence, replies);
  if (frame.header.type == FrameType::kGather && joined_) return on_gather(from, rank, std::move(frame), replies);
  expel(from, malformed(std::string(describe(WireFault::kType))), replies);
}

void StoreSession::on_fault(ConnectionId from, WireFault fault, std::vector<Reply>& replies) {
  Refusal refusal = malformed(std::string(describe(fault)));
  if (fault == WireFault::kVersion) refusal.code = RefusalCode::kVersion;
  expel(from, refusal, replies);
}

void StoreSession::on_closed(ConnectionId from, std::vector<Reply>& replies) {
  const auto found = rank_of_.find(from);
  if (found == rank_of_.end()) return;
  const int rank = found->second;
  rank_of_.erase(found);
  members_[static_cast<std::size_t>(rank)].reset();
  lose(rank, replies);
}

void StoreSession::on_shutdown(std::vector<Reply>& replies) {
  if (const std::optional<ConnectionId> own = members_[0]) rank_of_.erase(*own);
  members_[0].reset();
  lose(0, replies);
}

// What may pass is judged first: a member of the next session may meet the end of this one.
std::optional<Refusal> StoreSession::judge(const Frame& frame) const {
  const std::optional<Hello> hello = decode_hello(frame.payload);
  if (!hello) return malformed("a hello has at least 4 bytes of payload");
  if (hello->name != options_.name) {
    return Refusal{.code = RefusalCode::kName, .reason = "another group is served here, not '" + hello->name + "'"};
  }
  if (lost_ >= 0) {
    return Refusal{.code = RefusalCode::kEnded,
                   .reason = "this session has ended: rank " + std::to_string(lost_) + " left it or died"};
  }
  if (hello->num_ranks != static_cast<std::uint32_t>(options_.num_ranks)) {
    return Refusal{.code = joined_ ? RefusalCode::kRankTaken : RefusalCode::kSize,
                   .reason = "rank " + std::to_string(frame.header.rank) + " says that the group has " +
                             std::to_string(hello->num_ranks) + " ranks; rank 0 says " +
                             std::to_string(options_.num_ranks)};
  }
  if (frame.header.rank >= hello->num_ranks) {
    return Refusal{.code = RefusalCode::kRank,
                   .reason = "there is no rank " + std::to_string(frame.header.rank) + " in a group of " +
                             std::to_string(options_.num_ranks)};
  }
  if (members_[frame.header.rank]) {
    return Refusal{.code = RefusalCode::kRankTaken,
                   .reason = "rank " + std::to_string(frame.header.rank) + " has joined already"};
  }
  return std::nullopt;
}

void StoreSession::on_hello(ConnectionId from, const Frame& frame, std::vector<Reply>& replies) {
  if (const std::optional<Refusal> refusal = judge(frame)) return expel(from, *refusal, replies);
  members_[frame.header.rank] = from;
  rank_of_.emplace(from, static_cast<int>(frame.header.rank));
  if (rank_of_.size() < members_.size()) return;
  joined_ = true;
  tell_all(make_frame({.type = FrameType::kWelcome}, encode_nonce(options_.nonce)), replies);
}

void StoreSession::on_gather(ConnectionId from, int rank, Frame frame, std::vector<Reply>& replies) {
  if (lost_ >= 0) return;  // has been told; the two messages crossed
  const std::uint64_t sequence = ledger_.next_sequence(rank);
  if (frame.header.sequence != sequence) {
    return expel(from,
                 malformed("it is collective " + std::to_string(frame.header.sequence) + " where " +
                           std::to_string(sequence) + " must follow"),
                 replies);
  }
  if (!ledger_.may_contribute(rank)) {
    const std::vector<int> behind = ledger_.missing(sequence - kMaxCollectivesAhead);
    const Refusal refusal{.code = RefusalCode::kTooFarAhead, .reason = "too many collectives are open"};
    const FrameHeader header{
        .type = FrameType::kRefused, .rank = static_cast<std::uint32_t>(behind.front()), .sequence = sequence};
    replies.push_back({.to = from, .bytes = share(make_frame(header, encode(refusal)))});
    return;
  }
  ledger_.contribute(rank, std::move(frame.payload));
  if (!ledger_.complete(sequence)) return;
  GatherLedger::Outcome outcome = ledger_.take(sequence);
  Bytes result;
  std::size_t size = 0;
  for (const Bytes& bytes : outcome.bytes)
    size += kHeaderBytes + bytes.size();
  result.reserve(size);
  for (std::size_t i = 0; i < outcome.bytes.size(); ++i) {
    append_frame(result, {.type = FrameType::kResult, .rank = static_cast<std::uint32_t>(i), .sequence = sequence},
                 outcome.bytes[i]);
  }
  const std::shared_ptr<const Bytes> shared = share(std::move(result));
  for (const int waiting : outcome.waiting) {
    if (const auto& member = members_[static_cast<std::size_t>(waiting)]) {
      replies.push_back({.to = *member, .bytes = shared});
    }
  }
}

void StoreSession::on_who(ConnectionId from, int rank, std::uint64_t sequence, std::vector<Reply>& replies) {
  if (lost_ >= 0) return;
  std::vector<int> missing;
  if (sequence > 0) {
    ledger_.stop_waiting(rank, sequence);
    missing = ledger_.missing(sequence);
  } else if (!joined_) {
    missing = absent();
  }
  const FrameHeader header{.type = FrameType::kMissing, .sequence = sequence};
  replies.push_back({.to = from, .bytes = share(make_frame(header, encode_ranks(missing)))});
}

void StoreSession::expel(ConnectionId from, const Refusal& refusal, std::vector<Reply>& replies) {
  const FrameHeader header{.type = FrameType::kRefused};
  replies.push_back({.to = from, .bytes = share(make_frame(header, encode(refusal))), .last = true});
  on_closed(from, replies);
}

// Before all have come nobody relies on anybody: the place is free again, and a rank that is started anew may take it.
// When rank 0 gives up, the others learn for whom it waited.
void StoreSession::lose(int rank, std::vector<Reply>& replies) {
  if ((!joined_ && rank != 0) || lost_ >= 0) return;
  if (!joined_) {
    std::vector<int> missing = absent();
    std::erase(missing, 0);
    tell_all(make_frame({.type = FrameType::kMissing}, encode_ranks(missing)), replies);
  }
  lost_ = rank;
  tell_all(make_frame({.type = FrameType::kLost, .rank = static_cast<std::uint32_t>(rank)}, {}), replies);
}

std::vector<int> StoreSession::absent() const {
  std::vector<int> result;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    if (!members_[i]) result.push_back(static_cast<int>(i));
  }
  return result;
}

void StoreSession::tell_all(const Bytes& frame, std::vector<Reply>& replies) const {
  const std::shared_ptr<const Bytes> shared = share(frame);
  for (const auto& member : members_) {
    if (member) replies.push_back({.to = *member, .bytes = shared});
  }
}

}  // namespace tokenyard::group
