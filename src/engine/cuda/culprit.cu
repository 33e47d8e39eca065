// SPDX-License-Identifier: Apache-2.0
// Who is to blame when a wait ran out (protocol/life.h), by a kernel of its own, so that waits are no longer for it: it
// tells the peers for whom this rank waited, and follows the chain "x waits for y" through those that say so at the
// same time to its end. Words of life guard nothing, so they are stored and loaded without ordering.
#include "engine/cuda/culprit.h"
#include "engine/cuda/kernels.h"
#include "engine/cuda/verbs.cuh"
#include "protocol/layout.h"
#include "protocol/life.h"

namespace tokenyard::engine::cuda {
namespace {

constexpr unsigned kSigns = 8;  // of life, within the grace

class Inquest {
 public:
  __device__ Inquest(const LifeLines& lines, const Question& asked) : lines_(lines), asked_(asked) {}

  __device__ void tell(protocol::LifeKind kind, int peer) {
    const std::uint64_t word =
        protocol::encode_life({.kind = kind,
                               .phase = static_cast<std::uint8_t>(asked_.phase),
                               .heartbeat = ++heartbeat_,
                               .peer = peer == kNoCulprit ? protocol::kNobody : static_cast<std::uint16_t>(peer),
                               .epoch = asked_.epoch});
    for (int rank = 0; rank < lines_.num_ranks; ++rank) {
      if (rank != lines_.rank) store_relaxed_system(line(rank, lines_.rank), word);
    }
  }

  __device__ int find() {
    int end = asked_.peer;
    for (int step = 0; step < lines_.num_ranks; ++step) {
      protocol::Life life;
      const bool alive = listen(end, life);
      if (life.kind == protocol::LifeKind::kFaulted) return life.peer == protocol::kNobody ? kNoCulprit : life.peer;
      if (!alive) return end;
      if (life.peer == lines_.rank || life.peer >= lines_.num_ranks) return kNoCulprit;
      end = life.peer;
    }
    return kNoCulprit;
  }

 private:
  // The word of `rank` in a rank's window.
  __device__ std::uint64_t* line(int window, int rank) const {
    return reinterpret_cast<std::uint64_t*>(lines_.windows[window] + lines_.offset + rank * protocol::kLineBytes);
  }

  // What a rank says; true when it gives a sign of life within the grace, of which all ranks of the chain have one.
  __device__ bool listen(int rank, protocol::Life& life) {
    const std::uint64_t* word = line(lines_.rank, rank);
    const std::uint64_t before = load_relaxed_system(word);
    std::uint64_t now = before;
    life = protocol::decode_life(now);
    while (now == before && life.kind != protocol::LifeKind::kFaulted) {
      const std::uint64_t passed = nanoseconds() - start_;
      if (passed >= asked_.grace_ns) return false;
      if (passed >= asked_.grace_ns / kSigns * heartbeat_) tell(protocol::LifeKind::kWaiting, asked_.peer);
      now = load_relaxed_system(word);
      life = protocol::decode_life(now);
    }
    return true;
  }

  const LifeLines& lines_;
  const Question& asked_;
  const std::uint64_t start_ = nanoseconds();
  std::uint16_t heartbeat_ = 0;
};

// Whoever accuses this rank has told the others as well; this one tells what it was told.
__global__ void find_culprit(LifeLines lines, Question asked, std::int32_t* answer) {
  Inquest inquest(lines, asked);
  const int culprit = inquest.find();
  inquest.tell(protocol::LifeKind::kFaulted, culprit);
  *answer = culprit;
}

}  // namespace

void load_find_culprit() {
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, find_culprit), "loading a kernel");
}

void launch_find_culprit(const LifeLines& lines, const Question& asked, std::int32_t* answer, cudaStream_t stream) {
  find_culprit<<<1, 1, 0, stream>>>(lines, asked, answer);
  check(cudaGetLastError(), "launching the search for a culprit");
}

}  // namespace tokenyard::engine::cuda
