// SPDX-License-Identifier: Apache-2.0
#include "exchange.h"

#include <fmt/format.h>

#include <bit>
#include <cstddef>
#include <stdexcept>

#include "checked.h"

namespace tokenyard::bench {
namespace {

float from_bf16(std::uint16_t code) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(code) << 16);
}

// Of the small whole numbers that the bench has, which bf16 keeps exactly.
std::uint16_t to_bf16(float value) {
  return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
}

Buffers place_buffers(const KernelShape& shape, ExchangeKind kind, Placement& placement) {
  const std::int64_t tokens = shape.num_tokens;
  const std::int64_t received = tokens * shape.num_ranks;
  Buffers buffers;
  buffers.tokens = placement.take<std::uint16_t>(tokens * shape.hidden_size);
  buffers.ids = placement.take<std::int32_t>(tokens * shape.top_k);
  buffers.weights = placement.take<float>(tokens * shape.top_k);
  buffers.received = placement.take<std::uint16_t>(received * shape.hidden_size);
  buffers.received_ids = placement.take<std::int32_t>(received * shape.top_k);
  buffers.received_weights = placement.take<float>(received * shape.top_k);
  buffers.expert_output = placement.take<std::uint16_t>(received * shape.hidden_size);
  buffers.output = placement.take<std::uint16_t>(tokens * shape.hidden_size);
  buffers.expert_factors = placement.take<float>(shape.num_experts);
  if (kind == ExchangeKind::kAllGather) return buffers;
  buffers.packed = placement.take<std::uint16_t>(received * shape.hidden_size);
  buffers.packed_ids = placement.take<std::int32_t>(received * shape.top_k);
  buffers.packed_weights = placement.take<float>(received * shape.top_k);
  buffers.returned = placement.take<std::uint16_t>(received * shape.hidden_size);
  buffers.slots = placement.take<std::int32_t>(received);
  buffers.send_counts = placement.take<std::int32_t>(std::int64_t{shape.num_ranks} * 2);
  buffers.receive_counts = buffers.send_counts + shape.num_ranks;
  return buffers;
}

KernelShape kernel_shape(const cli::BenchShape& shape, int rank) {
  return {.num_ranks = shape.num_ranks,
          .rank = rank,
          .num_tokens = static_cast<int>(shape.num_tokens),
          .hidden_size = static_cast<int>(shape.hidden_size),
          .num_experts = shape.num_experts,
          .top_k = shape.top_k};
}

template <typename T>
void upload(T* to, const std::vector<T>& from) {
  check("cudaMemcpy to the device", cudaMemcpy(to, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
}

}  // namespace

Exchange::Exchange(const ExchangeOptions& options, const Routing& routing, const Place& place)
    : options_(options), routing_(routing), place_(place), shape_(kernel_shape(routing.shape, place.rank)) {
  Placement counting(nullptr);
  place_buffers(shape_, options.kind, counting);
  arena_ = std::make_unique<Arena>(options.memory, place.comm, counting.used());
  Placement placement(arena_->data());
  buffers_ = place_buffers(shape_, options.kind, placement);
  check("cudaHostAlloc", cudaHostAlloc(reinterpret_cast<void**>(&host_counts_), counts_bytes(), cudaHostAllocDefault));
  check("cudaEventCreateWithFlags", cudaEventCreateWithFlags(&counts_are_here_, cudaEventDisableTiming));
  fill();
}

Exchange::~Exchange() {
  if (counts_are_here_ != nullptr) report("cudaEventDestroy", cudaEventDestroy(counts_are_here_));
  if (host_counts_ != nullptr) report("cudaFreeHost", cudaFreeHost(host_counts_));
}

void Exchange::fill() {
  std::vector<std::uint16_t> tokens;
  tokens.reserve(static_cast<std::size_t>(routing_.shape.num_tokens * routing_.shape.hidden_size));
  for (std::int64_t token = 0; token < routing_.shape.num_tokens; ++token) {
    for (std::int64_t column = 0; column < routing_.shape.hidden_size; ++column)
      tokens.push_back(to_bf16(cli::bench_value(place_.rank, token, column)));
  }
  const std::vector<std::int32_t>& ids = routing_.ids[static_cast<std::size_t>(place_.rank)];
  std::vector<float> factors(static_cast<std::size_t>(shape_.num_experts));
  for (int expert = 0; expert < shape_.num_experts; ++expert)
    factors[static_cast<std::size_t>(expert)] = cli::bench_factor(expert);
  upload(buffers_.tokens, tokens);
  upload(buffers_.ids, ids);
  upload(buffers_.weights, std::vector<float>(ids.size(), 1.0F));
  upload(buffers_.expert_factors, factors);
  // A copy from pageable memory may return early, and the stream does not wait for it.
  check("cudaDeviceSynchronize", cudaDeviceSynchronize());
}

void Exchange::learn_counts() {
  if (options_.kind == ExchangeKind::kAllGather) return;
  launch_plan(shape_, buffers_, place_.stream);
  exchange_counts();
  check("cudaStreamSynchronize for counts", cudaStreamSynchronize(place_.stream));
}

void Exchange::exchange_counts() {
  check("ncclGroupStart", ncclGroupStart());
  for (int peer = 0; peer < shape_.num_ranks; ++peer) {
    if (peer == place_.rank) continue;
    check("ncclSend of a count", ncclSend(buffers_.send_counts + peer, 1, ncclInt32, peer, place_.comm, place_.stream));
    check("ncclRecv of a count",
          ncclRecv(buffers_.receive_counts + peer, 1, ncclInt32, peer, place_.comm, place_.stream));
  }
  check("ncclGroupEnd of counts", ncclGroupEnd());
  check("cudaMemcpyAsync of counts",
        cudaMemcpyAsync(host_counts_, buffers_.send_counts, counts_bytes(), cudaMemcpyDeviceToHost, place_.stream));
  check("cudaEventRecord behind counts", cudaEventRecord(counts_are_here_, place_.stream));
}

void Exchange::dispatch() {
  if (options_.kind == ExchangeKind::kAllGather) {
    gather_rows();
    return;
  }
  launch_plan(shape_, buffers_, place_.stream);
  if (!options_.known_counts) exchange_counts();
  launch_pack(shape_, buffers_, place_.stream);
  if (!options_.known_counts) check("cudaEventSynchronize for counts", cudaEventSynchronize(counts_are_here_));
  send_rows();
}

void Exchange::gather_rows() {
  const auto tokens = static_cast<std::size_t>(shape_.num_tokens);
  const std::size_t picks = tokens * static_cast<std::size_t>(shape_.top_k);
  check("ncclGroupStart", ncclGroupStart());
  check("ncclAllGather of rows",
        ncclAllGather(buffers_.tokens, buffers_.received, tokens * static_cast<std::size_t>(shape_.hidden_size),
                      ncclBfloat16, place_.comm, place_.stream));
  check("ncclAllGather of ids",
        ncclAllGather(buffers_.ids, buffers_.received_ids, picks, ncclInt32, place_.comm, place_.stream));
  check("ncclAllGather of weights",
        ncclAllGather(buffers_.weights, buffers_.received_weights, picks, ncclFloat32, place_.comm, place_.stream));
  check("ncclGroupEnd of all-gathers", ncclGroupEnd());
}

void Exchange::send_rows() {
  const std::int64_t hidden = shape_.hidden_size;
  const std::int64_t top_k = shape_.top_k;
  const auto send = [&](const void* from, std::int64_t count, ncclDataType_t type, int peer) {
    check("ncclSend", ncclSend(from, static_cast<std::size_t>(count), type, peer, place_.comm, place_.stream));
  };
  const auto receive = [&](void* to, std::int64_t count, ncclDataType_t type, int peer) {
    check("ncclRecv", ncclRecv(to, static_cast<std::size_t>(count), type, peer, place_.comm, place_.stream));
  };
  std::int64_t at = 0;
  check("ncclGroupStart", ncclGroupStart());
  for (int peer = 0; peer < shape_.num_ranks; ++peer) {
    const std::int64_t block = std::int64_t{peer} * shape_.num_tokens;
    const std::int64_t out = send_count(peer);
    const std::int64_t in = receive_count(peer);
    if (peer != place_.rank && out > 0) {
      send(buffers_.packed + block * hidden, out * hidden, ncclBfloat16, peer);
      send(buffers_.packed_ids + block * top_k, out * top_k, ncclInt32, peer);
      send(buffers_.packed_weights + block * top_k, out * top_k, ncclFloat32, peer);
    }
    if (peer != place_.rank && in > 0) {
      receive(buffers_.received + at * hidden, in * hidden, ncclBfloat16, peer);
      receive(buffers_.received_ids + at * top_k, in * top_k, ncclInt32, peer);
      receive(buffers_.received_weights + at * top_k, in * top_k, ncclFloat32, peer);
    }
    at += in;
  }
  check("ncclGroupEnd of rows", ncclGroupEnd());
}

void Exchange::combine() {
  if (options_.kind == ExchangeKind::kAllGather) {
    const auto count = static_cast<std::size_t>(shape_.num_tokens) * static_cast<std::size_t>(shape_.hidden_size);
    check("ncclReduceScatter", ncclReduceScatter(buffers_.expert_output, buffers_.output, count, ncclBfloat16, ncclSum,
                                                 place_.comm, place_.stream));
    return;
  }
  send_back();
  launch_unpack(shape_, buffers_, place_.stream);
}

void Exchange::send_back() {
  const std::int64_t hidden = shape_.hidden_size;
  std::int64_t at = 0;
  check("ncclGroupStart", ncclGroupStart());
  for (int peer = 0; peer < shape_.num_ranks; ++peer) {
    const std::int64_t out = receive_count(peer);
    const std::int64_t in = send_count(peer);
    if (peer != place_.rank && out > 0) {
      check("ncclSend of results",
            ncclSend(buffers_.expert_output + at * hidden, static_cast<std::size_t>(out * hidden), ncclBfloat16, peer,
                     place_.comm, place_.stream));
    }
    if (peer != place_.rank && in > 0) {
      check("ncclRecv of results",
            ncclRecv(buffers_.returned + std::int64_t{peer} * shape_.num_tokens * hidden,
                     static_cast<std::size_t>(in * hidden), ncclBfloat16, peer, place_.comm, place_.stream));
    }
    at += out;
  }
  check("ncclGroupEnd of results", ncclGroupEnd());
}

// All bits set: a NaN in bf16 and fp32, no expert's id, no slot. Counts that are known stay.
void Exchange::spoil() {
  const auto tokens = static_cast<std::size_t>(shape_.num_tokens);
  const std::size_t row_bytes = static_cast<std::size_t>(shape_.hidden_size) * sizeof(std::uint16_t);
  const std::size_t received = tokens * static_cast<std::size_t>(shape_.num_ranks);
  const std::size_t picks = received * static_cast<std::size_t>(shape_.top_k);
  const auto set = [&](void* at, std::size_t bytes) {
    check("cudaMemsetAsync", cudaMemsetAsync(at, 0xFF, bytes, place_.stream));
  };
  set(buffers_.received, received * row_bytes);
  set(buffers_.received_ids, picks * sizeof(std::int32_t));
  set(buffers_.received_weights, picks * sizeof(float));
  set(buffers_.expert_output, received * row_bytes);
  set(buffers_.output, tokens * row_bytes);
  if (options_.kind == ExchangeKind::kAllGather) return;
  set(buffers_.packed, received * row_bytes);
  set(buffers_.packed_ids, picks * sizeof(std::int32_t));
  set(buffers_.packed_weights, picks * sizeof(float));
  set(buffers_.returned, received * row_bytes);
  set(buffers_.slots, received * sizeof(std::int32_t));
  if (!options_.known_counts) set(buffers_.send_counts, counts_bytes());
}

void Exchange::run_experts() {
  launch_experts(shape_, buffers_, options_.kind == ExchangeKind::kAllGather, place_.stream);
}

void Exchange::require_right_counts() const {
  const auto own = static_cast<std::size_t>(place_.rank);
  for (int peer = 0; peer < shape_.num_ranks; ++peer) {
    const std::int64_t out = routing_.rows[own][static_cast<std::size_t>(peer)];
    const std::int64_t in = routing_.rows[static_cast<std::size_t>(peer)][own];
    if (send_count(peer) == out && receive_count(peer) == in) continue;
    throw std::runtime_error(fmt::format("wrong counts: {} rows for rank {} and {} from it; {} and {} are right",
                                         send_count(peer), peer, receive_count(peer), out, in));
  }
}

void Exchange::require_right_output() {
  std::vector<std::uint16_t> output(static_cast<std::size_t>(routing_.shape.num_tokens * routing_.shape.hidden_size));
  check("cudaStreamSynchronize before the check", cudaStreamSynchronize(place_.stream));
  ncclResult_t state = ncclSuccess;
  check("ncclCommGetAsyncError", ncclCommGetAsyncError(place_.comm, &state));
  check("what NCCL did in the background", state);
  if (options_.kind == ExchangeKind::kAllToAll) require_right_counts();
  check("cudaMemcpy to the host",
        cudaMemcpy(output.data(), buffers_.output, output.size() * sizeof(std::uint16_t), cudaMemcpyDeviceToHost));
  const std::vector<std::int32_t>& ids = routing_.ids[static_cast<std::size_t>(place_.rank)];
  std::size_t at = 0;
  for (std::int64_t token = 0; token < routing_.shape.num_tokens; ++token) {
    const float factor = cli::bench_total_factor(ids, shape_.top_k, token);
    for (std::int64_t column = 0; column < routing_.shape.hidden_size; ++column, ++at) {
      const float right = factor * cli::bench_value(place_.rank, token, column);
      if (from_bf16(output[at]) == right) continue;
      throw std::runtime_error(fmt::format("wrong sum: token {}, column {} is {}; {} is right", token, column,
                                           from_bf16(output[at]), right));
    }
  }
}

}  // namespace tokenyard::bench
