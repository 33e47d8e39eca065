// SPDX-License-Identifier: Apache-2.0
// What the bench says of the link, and the rows that it takes for right.
#include "cli/bench_report.h"

#include <gtest/gtest.h>

#include <cstring>
#include <stdexcept>
#include <string>

#include "tokenyard/error.h"

#include "cli/bench_board.h"
#include "cli/bench_rows.h"

namespace tokenyard::cli {
namespace {

// 100 us and 50 us at 400 GB/s.
BenchResult result_of(const LinkLimit& link, bool graph) {
  BenchResult result;
  result.variant.graph = graph;
  result.per_direction = {.dispatch_bytes = 40'000'000, .combine_bytes = 20'000'000};
  result.dispatch = {.median = 125, .p95 = 130};
  result.combine = {.median = 100, .p95 = 101};
  result.round = {.median = 240, .p95 = 250};
  result.pipelined = {.median = 200, .p95 = 210};
  result.link = link;
  return result;
}

TEST(BenchReport, TheFloorIsBytesOfOneDirectionAtTheLinksRate) {
  const auto fields = link_fields(result_of({.gb_per_s = 400, .reason = {}}, true));
  EXPECT_EQ(fields["link"], "sound");
  EXPECT_EQ(fields["link_gb_per_s"], 400);
  EXPECT_EQ(fields["void"], false);
  EXPECT_DOUBLE_EQ(fields["link_floor_us"]["dispatch"], 100);
  EXPECT_DOUBLE_EQ(fields["link_floor_us"]["combine"], 50);
  EXPECT_DOUBLE_EQ(fields["link_floor_us"]["round"], 150);
  EXPECT_DOUBLE_EQ(fields["fraction_of_link_floor"]["dispatch"], 0.8);
  EXPECT_DOUBLE_EQ(fields["fraction_of_link_floor"]["combine"], 0.5);
  EXPECT_DOUBLE_EQ(fields["fraction_of_link_floor"]["round"], 0.625);
  EXPECT_DOUBLE_EQ(fields["fraction_of_link_floor"]["pipelined"], 0.75);
}

TEST(BenchReport, RoundsThatAreNotCapturedHaveNoTrain) {
  const auto fields = link_fields(result_of({.gb_per_s = 400, .reason = {}}, false));
  EXPECT_FALSE(fields["fraction_of_link_floor"].contains("pipelined"));
}

TEST(BenchReport, ASlowLinkMakesARunVoid) {
  const auto fields = link_fields(result_of({.gb_per_s = 349.9, .reason = {}}, true));
  EXPECT_EQ(fields["link"], "void");
  EXPECT_EQ(fields["void"], true);
  EXPECT_EQ(link_fields(result_of({.gb_per_s = 350, .reason = {}}, true))["void"], false);
}

TEST(BenchReport, WithoutALinkThereIsNoFloor) {
  const auto fields = link_fields(result_of({.gb_per_s = 0, .reason = "one device"}, true));
  EXPECT_EQ(fields["link"], "no link");
  EXPECT_EQ(fields["void"], false);
  for (const char* field : {"link_gb_per_s", "link_floor_us", "fraction_of_link_floor"})
    EXPECT_TRUE(fields[field].is_null()) << field;
}

TEST(BenchReport, WhatCrossesNoLinkHasNoFloor) {
  BenchResult result = result_of({.gb_per_s = 400, .reason = {}}, true);
  result.per_direction = {};
  EXPECT_TRUE(link_fields(result)["fraction_of_link_floor"].is_null());
}

TEST(BenchRowBytes, RowsAreFactorsTimesValues) {
  const BenchShape shape{.num_ranks = 3, .num_tokens = 5, .hidden_size = 37};
  BenchRowBytes rows(shape, Dtype::kF32);
  for (int rank = 0; rank < shape.num_ranks; ++rank) {
    for (std::int64_t token = 0; token < shape.num_tokens; ++token) {
      const auto row = rows.row({rank, token}, 3);
      ASSERT_EQ(row.size(), 37 * sizeof(float));
      for (std::int64_t column = 0; column < shape.hidden_size; ++column) {
        float value = 0;
        std::memcpy(&value, row.data() + static_cast<std::size_t>(column) * sizeof(float), sizeof(float));
        EXPECT_EQ(value, 3 * bench_value(rank, token, column));
      }
    }
  }
}

TEST(BenchRowBytes, TheFirstWrongElementIsNamed) {
  const BenchShape shape{.num_ranks = 2, .num_tokens = 4, .hidden_size = 300};
  BenchRowBytes rows(shape, Dtype::kF32);
  const auto right = rows.row({1, 3}, 1);
  std::vector<float> got(300);
  std::memcpy(got.data(), right.data(), right.size());
  rows.require(reinterpret_cast<const std::byte*>(got.data()), {1, 3}, 1, "a row");
  got[211] = got[290] = 42;
  try {
    rows.require(reinterpret_cast<const std::byte*>(got.data()), {1, 3}, 1, "a row");
    FAIL() << "nothing was noticed";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("a row: token 3 of rank 1, column 211: 42 instead of"), std::string::npos)
        << error.what();
  }
}

TEST(BenchBoard, EveryTimeHasItsOwnPlace) {
  constexpr BenchBoardSize kSize{.num_ranks = 3, .num_rounds = 4, .num_variants = 2};
  const BenchBoard board(kSize);
  double next = 1;
  for (int variant = 0; variant < kSize.num_variants; ++variant) {
    for (int rank = 0; rank < kSize.num_ranks; ++rank) {
      for (int i = 0; i < kSize.num_rounds; ++i)
        board.times(variant).round(rank, i).round_us = next++;
      for (int i = 0; i < kBenchTrains; ++i)
        board.times(variant).train(rank, i) = next++;
      board.finished(rank) = rank;
    }
  }
  next = 1;
  for (int variant = 0; variant < kSize.num_variants; ++variant) {
    for (int rank = 0; rank < kSize.num_ranks; ++rank) {
      for (int i = 0; i < kSize.num_rounds; ++i)
        EXPECT_EQ(board.times(variant).round(rank, i).round_us, next++);
      for (int i = 0; i < kBenchTrains; ++i)
        EXPECT_EQ(board.times(variant).train(rank, i), next++);
    }
  }
  EXPECT_EQ(board.finished_by_all(), 0);
  board.finished(0) = board.finished(1) = board.finished(2) = 2;
  EXPECT_EQ(board.finished_by_all(), 2);
}

}  // namespace
}  // namespace tokenyard::cli
