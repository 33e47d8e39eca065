// SPDX-License-Identifier: Apache-2.0
#include "cli/cuda/limit_sides.h"

#include <fmt/format.h>

#include <algorithm>

#include "tokenyard/error.h"

namespace tokenyard::cli {
namespace {

using engine::cuda::DeviceScope;
using engine::cuda::make_device_memory;
using fabric::cuda::require;

constexpr std::int64_t kMostBytes = std::int64_t{1} << 30;
constexpr std::size_t kShareOfFree = 8;
constexpr int kRepeats = 5;

int current(int device) {
  require(cudaSetDevice(device), "cudaSetDevice");
  return device;
}

}  // namespace

std::int64_t buffer_bytes(const std::vector<int>& devices) {
  std::int64_t bytes = kMostBytes;
  for (const int device : devices) {
    const DeviceScope scope(device);
    std::size_t free = 0;
    std::size_t all = 0;
    require(cudaMemGetInfo(&free, &all), "cudaMemGetInfo");
    bytes = std::min(bytes, static_cast<std::int64_t>(free / kShareOfFree) / kLimitStep * kLimitStep);
  }
  return std::max(bytes, kLimitStep);
}

Side::Side(int index, std::int64_t bytes_of_buffer)
    : device(current(index)),
      bytes(bytes_of_buffer),
      source(make_device_memory(device, bytes)),
      target(make_device_memory(device, bytes)),
      words(make_device_memory(device, std::int64_t{128} * 6)) {
  load_limit_kernels();
  require(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  launch_stores(source.get(), bytes, processors, stream.get());
  require(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize");
}

double Figure::each_way() const {
  return std::ranges::min(gigabytes_per_second);
}

void put_on_streams(const Sides& sides, const Work& work) {
  for (std::size_t i = 0; i < sides.size(); ++i) {
    const DeviceScope scope(sides[i]->device);
    work(*sides[i], *sides[(i + 1) % sides.size()]);
  }
}

std::vector<double> time_sides(const Sides& sides, const Work& work) {
  const auto wait = [&] {
    for (const auto& side : sides)
      require(cudaStreamSynchronize(side->stream.get()), "cudaStreamSynchronize");
  };
  put_on_streams(sides, work);
  wait();
  for (std::size_t i = 0; i < sides.size(); ++i) {
    Side& own = *sides[i];
    const DeviceScope scope(own.device);
    own.start.record(own.stream.get());
    work(own, *sides[(i + 1) % sides.size()]);
    own.end.record(own.stream.get());
  }
  wait();
  std::vector<double> times;
  for (const auto& side : sides) {
    std::uint32_t failed = 0;
    require(cudaMemcpy(&failed, side->failed(), sizeof(failed), cudaMemcpyDefault), "cudaMemcpy");
    if (failed != 0) {
      throw Error(ErrorCode::kTimeout,
                  fmt::format("device {} waited in vain for a word of another device", side->device));
    }
    times.push_back(side->end.microseconds_since(side->start));
  }
  return times;
}

Figure rate(std::string_view name, int blocks, const Sides& sides, const Work& work) {
  Figure figure{.name = name, .blocks = blocks, .bytes = sides.front()->bytes};
  const std::vector<double> times = time_sides(sides, [&](const Side& own, const Side& other) {
    for (int i = 0; i < kRepeats; ++i)
      work(own, other);
  });
  for (const double time : times)
    figure.gigabytes_per_second.push_back(static_cast<double>(figure.bytes) * kRepeats / (time * 1e3));
  return figure;
}

std::string connect(const std::vector<int>& devices) {
  for (const int from : devices) {
    require(cudaSetDevice(from), "cudaSetDevice");
    for (const int to : devices) {
      if (to == from) continue;
      int can = 0;
      require(cudaDeviceCanAccessPeer(&can, from, to), "cudaDeviceCanAccessPeer");
      if (can == 0) return fmt::format("device {} does not reach the memory of device {}", from, to);
      const cudaError_t enabled = cudaDeviceEnablePeerAccess(to, 0);
      if (enabled != cudaErrorPeerAccessAlreadyEnabled) require(enabled, "cudaDeviceEnablePeerAccess");
      static_cast<void>(cudaGetLastError());  // of a call that found it enabled
    }
  }
  return {};
}

}  // namespace tokenyard::cli
