// SPDX-License-Identifier: Apache-2.0
#include "fabric/host/host_window.h"

#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "tokenyard/error.h"

#include "fabric/descriptor_exchange.h"
#include "fabric/gather_exports.h"
#include "system/process.h"
#include "system/segment.h"

namespace tokenyard::fabric::host {
namespace {

// Shared because ranks of one process look at the same mapping and any of them may be the last to leave.
using SharedSegment = std::shared_ptr<system::Segment>;

// What a rank tells the others about its window. The address is used only by ranks with the same process nonce, and
// only inside `connect`: the exporter keeps the pointed-to owner in place until the collective that follows it.
struct Export {
  std::uint64_t process = 0;
  std::int64_t bytes = 0;
  const SharedSegment* segment = nullptr;
};

class HostWindow final : public Window {
 public:
  explicit HostWindow(std::int64_t bytes) : own_(std::make_shared<system::Segment>(system::Segment::create(bytes))) {}

  void connect(const Group& group, std::chrono::milliseconds deadline) override {
    const Export mine{system::process_nonce(), own_->bytes(), &own_};
    const std::vector<Export> exports = gather_exports(group, mine, deadline);
    std::vector<char> foreign(exports.size());
    bool any_foreign = false;
    for (std::size_t rank = 0; rank < exports.size(); ++rank) {
      foreign[rank] = exports[rank].process != system::process_nonce() ? 1 : 0;
      any_foreign = any_foreign || foreign[rank] != 0;
    }
    segments_.assign(exports.size(), nullptr);
    std::vector<system::FileDescriptor> descriptors;
    if (any_foreign) descriptors = exchange_descriptors(group, own_->fd(), foreign, deadline);
    for (std::size_t rank = 0; rank < exports.size(); ++rank) {
      if (static_cast<int>(rank) == group.rank()) {
        segments_[rank] = own_;
      } else if (foreign[rank] == 0) {
        segments_[rank] = *exports[rank].segment;
      } else {
        segments_[rank] =
            std::make_shared<system::Segment>(system::Segment::import(std::move(descriptors[rank]), own_->bytes()));
      }
    }
  }

  [[nodiscard]] std::byte* own() const override { return own_->data(); }

  [[nodiscard]] std::byte* peer(int rank) const override { return segments_[static_cast<std::size_t>(rank)]->data(); }

  [[nodiscard]] std::int64_t bytes() const override { return own_->bytes(); }

  [[nodiscard]] Device device() const override { return {}; }

 private:
  SharedSegment own_;
  std::vector<SharedSegment> segments_;
};

}  // namespace

std::unique_ptr<Window> allocate_host_window(const WindowRequest& request) {
  if (request.device.kind != DeviceKind::kCpu) {
    throw Error(ErrorCode::kInvalidArgument, "the host fabric was asked for memory of device " +
                                                 std::to_string(request.device.index) +
                                                 " of another kind; it has only host memory");
  }
  return std::make_unique<HostWindow>(request.bytes);
}

Support probe_host_fabric() {
  try {
    (void)system::Segment::create(1);
    return {};
  } catch (const std::exception& error) {
    return {Support::State::kUnusable, error.what()};
  }
}

}  // namespace tokenyard::fabric::host
