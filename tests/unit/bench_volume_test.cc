// SPDX-License-Identifier: Apache-2.0
// Bytes that the bench says have crossed: between ranks, and over the link of one device.
#include "cli/bench_volume.h"

#include <gtest/gtest.h>

namespace tokenyard::cli {
namespace {

constexpr std::int64_t kHidden = 24;
constexpr std::int64_t kRowBytes = kHidden * 2;
constexpr std::int64_t kRoutedRowBytes = kRowBytes + std::int64_t{2} * 8;  // two ids and two weights

// Four ranks with one expert each; two tokens of each rank.
BenchJob job_of_four(std::vector<int> devices) {
  BenchJob job;
  job.shape = {.num_ranks = 4, .num_experts = 4, .top_k = 2, .num_tokens = 2, .hidden_size = kHidden};
  job.ids = {{0, 1, 2, 3}, {0, 1, 0, 1}, {3, 0, 3, 1}, {3, 2, 2, 3}};
  if (!devices.empty()) job.engine = {.kind = EngineKind::kCuda, .devices = std::move(devices), .device_name = "GPU"};
  return job;
}

const Contract& compact() {
  return find_backend("high_throughput").contract;
}

TEST(BenchVolume, OwnRowsDoNotCross) {
  // Rows for others: rank 0 sends 1 and then 2, rank 1 sends 1 and 1, rank 2 sends 2 and 2, rank 3 sends 1 and 1.
  const BenchVolume volume = volume_between_ranks(job_of_four({}), compact());
  EXPECT_EQ(volume.dispatch_bytes, 11 * kRoutedRowBytes);
  EXPECT_EQ(volume.combine_bytes, 11 * kRowBytes);
}

TEST(BenchVolume, Fp8RowsAreCodesAndScales) {
  for (const BenchRows rows : {BenchRows::kCast, BenchRows::kQuantised}) {
    BenchJob job = job_of_four({});
    job.rows = rows;
    const BenchVolume volume = volume_between_ranks(job, compact());
    EXPECT_EQ(volume.dispatch_bytes, 11 * (kHidden + 4 + 2 * 8));
    EXPECT_EQ(volume.combine_bytes, 11 * kRowBytes);
  }
}

TEST(BenchVolume, EveryRowGoesToEveryRankWhereAllGatherMovesIt) {
  const BenchVolume volume = volume_between_ranks(job_of_four({}), find_backend("all_gather").contract);
  EXPECT_EQ(volume.dispatch_bytes, 4 * 3 * 2 * kRoutedRowBytes);
}

TEST(BenchVolume, ALinkCarriesWhatLeavesItsDevice) {
  // Ranks 0 and 2 on device 0, 1 and 3 on device 1. Out of device 0: to rank 1 one row of rank 0 and one of rank 2, to
  // rank 3 one row of rank 0 and two of rank 2. Into it: from rank 1 two rows, from rank 3 two.
  const BenchVolume volume = volume_per_direction(job_of_four({0, 1}), compact());
  EXPECT_EQ(volume.dispatch_bytes, 5 * kRoutedRowBytes);
  EXPECT_EQ(volume.combine_bytes, 5 * kRowBytes);
}

TEST(BenchVolume, RanksOfOneDeviceUseNoLink) {
  EXPECT_EQ(volume_per_direction(job_of_four({0}), compact()).dispatch_bytes, 0);
}

TEST(BenchVolume, RanksGoRoundRobin) {
  const EngineChoice choice{.kind = EngineKind::kCuda, .devices = {3, 1}, .device_name = {}};
  EXPECT_EQ(choice.device_of(0), 3);
  EXPECT_EQ(choice.device_of(1), 1);
  EXPECT_EQ(choice.device_of(2), 3);
}

}  // namespace
}  // namespace tokenyard::cli
