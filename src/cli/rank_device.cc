// SPDX-License-Identifier: Apache-2.0
#include "cli/rank_device.h"

#include "tokenyard/error.h"

#include "cli/cuda/devices.h"
#include "cli/rounds.h"

namespace tokenyard::cli {
namespace {

class HostRankDevice final : public RankDevice {
 public:
  [[nodiscard]] CommunicationOptions communication_options(int num_threads) const override {
    return round_options(num_threads);
  }

  [[nodiscard]] Stream stream() const override { return {}; }

  [[nodiscard]] TensorView bring(const TensorView& host) override { return host; }

  [[nodiscard]] TensorView host_side(const TensorView& tensor) override { return tensor; }

  TensorView load(const TensorView& tensor) override { return tensor; }

  void store(const TensorView& /*tensor*/) override {}

  void finish(const Communication& /*communication*/, const Status& status) override { require_ok(status); }

  double timed(const Communication& /*communication*/, const Phase& phase) override {
    const Clock::time_point start = Clock::now();
    require_ok(phase());
    return microseconds_since(start);
  }

  RoundTimes play(const Communication& communication, const Round& round) override {
    RoundTimes times;
    round.meet();
    times.dispatch_us = timed(communication, round.dispatch);
    round.meet();
    times.combine_us = timed(communication, round.combine);
    times.round_us = times.dispatch_us + times.combine_us;
    return times;
  }

  void capture(const Round& /*round*/) override { refuse_graphs(); }

  double train(const Communication& /*communication*/, int /*num_rounds*/) override { refuse_graphs(); }

 private:
  [[noreturn]] static void refuse_graphs() {
    throw Error(ErrorCode::kUnsupported, "rounds are captured in CUDA graphs; the host engine has none");
  }
};

}  // namespace

std::unique_ptr<RankDevice> make_rank_device(const EngineChoice& choice, int rank) {
  if (choice.on_host()) return std::make_unique<HostRankDevice>();
  return make_cuda_rank_device(choice.device_of(rank), choice.mapped_host);
}

}  // namespace tokenyard::cli
