// SPDX-License-Identifier: Apache-2.0
#include "fabric/cuda/cuda_window.h"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "tokenyard/error.h"

#include "fabric/cuda/context.h"
#include "fabric/cuda/device_memory.h"
#include "fabric/cuda/meeting.h"
#include "fabric/cuda/pinned_segment.h"
#include "fabric/descriptor_exchange.h"

namespace tokenyard::fabric::cuda {
namespace {

using std::chrono::milliseconds;
using system::FileDescriptor;

// Shared because ranks of one process look at the same memory and any of them may be the last to leave.
using SharedMemory = std::shared_ptr<const DeviceMemory>;
using SharedSegment = std::shared_ptr<const PinnedSegment>;

int ranks_with(const WindowCard& card, const std::vector<WindowCard>& cards) {
  return static_cast<int>(std::ranges::count(cards, card.uuid, &WindowCard::uuid));
}

class DeviceWindow final : public Window {
 public:
  explicit DeviceWindow(const WindowRequest& request)
      : context_(request.device.index), bytes_(request.bytes), card_(card_of(context_)) {
    const std::string missing = missing_for_windows(context_.driver(), context_.device());
    if (!missing.empty()) throw Error(ErrorCode::kUnsupported, context_.name() + " lacks " + missing);
    own_ = std::make_shared<const DeviceMemory>(context_, bytes_);
    card_.bytes = bytes_;
    card_.allocation = own_->allocation.size();
    card_.memory = &own_;
  }

  void connect(const Group& group, milliseconds deadline) override {
    const Meeting meeting = meet(group, card_, deadline);
    ranks_on_device_ = ranks_with(card_, meeting.cards);
    FileDescriptor exported;
    all_or_none(group, deadline, [&] {
      require_reach(context_, meeting.cards, group.rank());
      if (meeting.any_foreign) exported = own_->allocation.export_descriptor();
    });
    std::vector<FileDescriptor> descriptors(meeting.cards.size());
    if (meeting.any_foreign) descriptors = exchange_descriptors(group, exported.get(), meeting.foreign, deadline);
    peers_.assign(meeting.cards.size(), nullptr);
    for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
      const WindowCard& card = meeting.cards[rank];
      if (static_cast<int>(rank) == group.rank()) {
        peers_[rank] = mapping_in(own_);
      } else if (meeting.foreign[rank] == 0) {
        peers_[rank] = map_sibling(*static_cast<const SharedMemory*>(card.memory));
      } else {
        peers_[rank] = std::make_shared<const Mapping>(
            context_, Allocation::import(context_, std::move(descriptors[rank]), card.allocation));
      }
    }
  }

  [[nodiscard]] std::byte* own() const override { return own_->mapping.data(); }

  [[nodiscard]] std::byte* peer(int rank) const override { return peers_[static_cast<std::size_t>(rank)]->data(); }

  [[nodiscard]] std::int64_t bytes() const override { return bytes_; }

  [[nodiscard]] Device device() const override { return {DeviceKind::kCuda, context_.index()}; }

  [[nodiscard]] int ranks_on_device() const override { return ranks_on_device_; }

 private:
  using SharedMapping = std::shared_ptr<const Mapping>;

  static SharedMapping mapping_in(const SharedMemory& memory) { return {memory, &memory->mapping}; }

  // Of a rank of this process. On its own device a rank uses the owner's addresses: kernels that run at once see each
  // other's stores through two mappings of the same memory only with fences between those (CUDA, virtual aliasing).
  [[nodiscard]] SharedMapping map_sibling(const SharedMemory& memory) const {
    if (memory->context.device() == context_.device()) return mapping_in(memory);
    return std::make_shared<const Mapping>(context_, memory->allocation);
  }

  Context context_;
  std::int64_t bytes_;
  WindowCard card_;
  int ranks_on_device_ = 1;
  SharedMemory own_;
  std::vector<SharedMapping> peers_;
};

class MappedHostWindow final : public Window {
 public:
  explicit MappedHostWindow(const WindowRequest& request) : context_(request.device.index), card_(card_of(context_)) {
    own_ = std::make_shared<const PinnedSegment>(context_, system::Segment::create(request.bytes));
    address_ = own_->address_for(context_);
    card_.bytes = request.bytes;
    card_.mapped_host = 1;
    card_.memory = &own_;
  }

  void connect(const Group& group, milliseconds deadline) override {
    const Meeting meeting = meet(group, card_, deadline);
    ranks_on_device_ = ranks_with(card_, meeting.cards);
    std::vector<FileDescriptor> descriptors(meeting.cards.size());
    if (meeting.any_foreign) {
      descriptors = exchange_descriptors(group, own_->segment().fd(), meeting.foreign, deadline);
    }
    peers_.assign(meeting.cards.size(), {});
    for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
      Peer& peer = peers_[rank];
      if (meeting.foreign[rank] == 0) {
        peer.segment = *static_cast<const SharedSegment*>(meeting.cards[rank].memory);
      } else {
        peer.segment = std::make_shared<const PinnedSegment>(
            context_, system::Segment::import(std::move(descriptors[rank]), bytes()));
      }
      peer.address = peer.segment->address_for(context_);
    }
  }

  [[nodiscard]] std::byte* own() const override { return address_; }

  [[nodiscard]] std::byte* peer(int rank) const override { return peers_[static_cast<std::size_t>(rank)].address; }

  [[nodiscard]] std::int64_t bytes() const override { return own_->segment().bytes(); }

  [[nodiscard]] Device device() const override { return {DeviceKind::kCuda, context_.index()}; }

  [[nodiscard]] int ranks_on_device() const override { return ranks_on_device_; }

 private:
  struct Peer {
    SharedSegment segment;
    std::byte* address = nullptr;
  };

  Context context_;
  WindowCard card_;
  int ranks_on_device_ = 1;
  SharedSegment own_;
  std::byte* address_ = nullptr;
  std::vector<Peer> peers_;
};

}  // namespace

std::unique_ptr<Window> allocate_cuda_window(const WindowRequest& request) {
  if (request.device.kind != DeviceKind::kCuda) {
    throw Error(ErrorCode::kInvalidArgument, "the cuda fabric was asked for memory of the host; it has that of GPUs");
  }
  if (request.allow_mapped_host) return std::make_unique<MappedHostWindow>(request);
  return std::make_unique<DeviceWindow>(request);
}

Support probe_cuda_fabric() {
  try {
    const Driver& cu = driver();
    std::string reasons;
    const int count = device_count(cu);
    for (int index = 0; index < count; ++index) {
      CUdevice device = 0;
      require(cu, cu.device_get(&device, index), "cuDeviceGet");
      const std::string missing = missing_for_windows(cu, device);
      if (missing.empty()) return {};
      reasons.append(reasons.empty() ? "" : ", ").append("device ").append(std::to_string(index)).append(" lacks ");
      reasons += missing;
    }
    return {Support::State::kUnusable, count > 0 ? reasons : "the CUDA driver shows no device"};
  } catch (const std::exception& error) {
    return {Support::State::kUnusable, error.what()};
  }
}

}  // namespace tokenyard::fabric::cuda
