// SPDX-License-Identifier: Apache-2.0
#include "measure.h"

#include <sched.h>

#include <optional>

#include "checked.h"

namespace tokenyard::bench {
namespace {

constexpr int kTrains = 10;
constexpr unsigned kTurnsBeforeYield = 10'000;

class Event {
 public:
  Event() { check("cudaEventCreate", cudaEventCreate(&event_)); }

  ~Event() { report("cudaEventDestroy", cudaEventDestroy(event_)); }

  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  Event(Event&&) = delete;
  Event& operator=(Event&&) = delete;

  // While a stream is captured, a plain record would only order the graph and never be timed.
  void record(cudaStream_t stream, bool captured) {
    check("cudaEventRecordWithFlags",
          cudaEventRecordWithFlags(event_, stream, captured ? cudaEventRecordExternal : cudaEventRecordDefault));
  }

  [[nodiscard]] double microseconds_since(const Event& start) const {
    float milliseconds = 0;
    check("cudaEventElapsedTime", cudaEventElapsedTime(&milliseconds, start.event_, event_));
    return static_cast<double>(milliseconds) * 1e3;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

class Graph {
 public:
  // What `play` puts on the stream.
  template <typename Play>
  Graph(cudaStream_t stream, const Play& play) {
    cudaGraph_t graph = nullptr;
    check("cudaStreamBeginCapture", cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    play();
    check("cudaStreamEndCapture", cudaStreamEndCapture(stream, &graph));
    const cudaError_t made = cudaGraphInstantiate(&graph_, graph, 0);
    report("cudaGraphDestroy", cudaGraphDestroy(graph));
    check("cudaGraphInstantiate", made);
  }

  ~Graph() { report("cudaGraphExecDestroy", cudaGraphExecDestroy(graph_)); }

  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  Graph(Graph&&) = delete;
  Graph& operator=(Graph&&) = delete;

  void replay(cudaStream_t stream) { check("cudaGraphLaunch", cudaGraphLaunch(graph_, stream)); }

 private:
  cudaGraphExec_t graph_ = nullptr;
};

class RankRounds {
 public:
  RankRounds(Exchange& exchange, const RoundOptions& options, cudaStream_t stream, SpinBarrier& barrier)
      : exchange_(exchange), options_(options), stream_(stream), barrier_(barrier) {}

  RankTimes run() {
    exchange_.learn_counts();
    // NCCL connects and allocates in first calls, which no graph should hold.
    require_right();
    if (options_.graph) {
      timed_.emplace(stream_, [this] { put_round(true); });
      plain_.emplace(stream_, [this] {
        exchange_.dispatch();
        exchange_.combine();
      });
      require_right();
    }
    RankTimes times = time_rounds();
    if (options_.graph) times.pipelined = time_trains();
    require_right();
    return times;
  }

 private:
  void put_round(bool captured) {
    start_.record(stream_, captured);
    exchange_.dispatch();
    between_.record(stream_, captured);
    exchange_.combine();
    end_.record(stream_, captured);
  }

  void play() {
    if (timed_) {
      timed_->replay(stream_);
    } else {
      put_round(false);
    }
  }

  void synchronize() { check("cudaStreamSynchronize", cudaStreamSynchronize(stream_)); }

  // The first round brings rows and the second takes back what experts made of them; what is timed is what is checked.
  void require_right() {
    exchange_.spoil();
    play();
    exchange_.run_experts();
    play();
    exchange_.require_right_output();
    barrier_.wait();
    if (!plain_) return;
    exchange_.spoil();
    plain_->replay(stream_);
    exchange_.run_experts();
    plain_->replay(stream_);
    exchange_.require_right_output();
    barrier_.wait();
  }

  RankTimes time_rounds() {
    RankTimes times;
    for (int i = -options_.warmup; i < options_.num_rounds; ++i) {
      barrier_.wait();
      // Its end the GPUs reach together; the hosts' launches differ by more than small rounds take.
      if (plain_) plain_->replay(stream_);
      play();
      synchronize();
      if (i < 0) continue;
      times.dispatch.push_back(between_.microseconds_since(start_));
      times.combine.push_back(end_.microseconds_since(between_));
      times.round.push_back(end_.microseconds_since(start_));
    }
    return times;
  }

  std::vector<double> time_trains() {
    std::vector<double> times;
    for (int train = -1; train < kTrains; ++train) {
      barrier_.wait();
      start_.record(stream_, false);
      for (int i = 0; i < options_.num_rounds; ++i)
        plain_->replay(stream_);
      end_.record(stream_, false);
      synchronize();
      if (train >= 0) times.push_back(end_.microseconds_since(start_) / options_.num_rounds);
    }
    return times;
  }

  Exchange& exchange_;
  RoundOptions options_;
  cudaStream_t stream_;
  SpinBarrier& barrier_;
  Event start_, between_, end_;
  std::optional<Graph> timed_, plain_;  // with events between phases, and without
};

}  // namespace

void SpinBarrier::wait() {
  const std::uint32_t generation = generation_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads_) {
    arrived_.store(0, std::memory_order_relaxed);  // published by the next store
    generation_.store(generation + 1, std::memory_order_release);
    return;
  }
  for (unsigned turn = 0; generation_.load(std::memory_order_acquire) == generation; ++turn) {
    if (turn >= kTurnsBeforeYield) sched_yield();
  }
}

RankTimes measure_rank(Exchange& exchange, const RoundOptions& options, cudaStream_t stream, SpinBarrier& barrier) {
  return RankRounds(exchange, options, stream, barrier).run();
}

}  // namespace tokenyard::bench
