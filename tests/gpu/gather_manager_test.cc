// SPDX-License-Identifier: Apache-2.0
// The gather calls of a manager on GPUs: tensors in a device's memory, on the caller's stream.
#include <gtest/gtest.h>

#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "tokenyard/manager.h"

#include "gpu/device_ranks.h"
#include "manager/gather_ranks.h"
#include "support/check.h"
#include "support/errors.h"

namespace tokenyard::gpu_tests {
namespace {

using manager_tests::cargo_matrix;
using manager_tests::check_combined;
using manager_tests::check_gathered;
using manager_tests::expert_output;
using manager_tests::Matrix;
using support::check;

constexpr std::int64_t kHidden = 24;

class GatherManagerOnGpu : public testing::TestWithParam<Shape> {
 protected:
  void SetUp() override { TOKENYARD_NEEDS_DEVICES_OF(GetParam()); }

  // One rank with its manager, whose ranks are all data-parallel ones.
  struct Rank {
    Rank(const Group& joined, int device)
        : group(joined),
          rounds({.device = device, .arena_bytes = std::int64_t{32} << 20}),
          manager(create_all2all_manager(
              "all_gather", {.group = joined, .parallel = {.dp = joined}, .communication = cuda_options(device)})),
          gather(manager.gather_calls()),
          ranks(static_cast<std::size_t>(joined.num_ranks())) {
      std::iota(ranks.begin(), ranks.end(), 0);
    }

    // What a call takes, in memory that stays.
    template <class T>
    TensorView on_device(Matrix<T> matrix) {
      TensorView view = matrix.view();
      view.device = {.kind = DeviceKind::kCuda, .index = rounds.device()};
      view.data = rounds.keep(span_of(view));
      upload(matrix, view);
      return view;
    }

    template <class T>
    void upload(Matrix<T>& matrix, const TensorView& to) {
      const auto bytes = static_cast<std::size_t>(matrix.rows * matrix.columns) * sizeof(T);
      if (bytes == 0) return;
      for (std::int64_t row = 0; row < matrix.rows; ++row) {
        check_cuda(cudaMemcpyAsync(support::row_of(to, row), matrix.values.data() + row * matrix.columns,
                                   static_cast<std::size_t>(matrix.columns) * sizeof(T), cudaMemcpyHostToDevice,
                                   rounds.stream()),
                   "cudaMemcpyAsync");
      }
      rounds.synchronize();
    }

    // The same rows in host memory, once all that was enqueued has run.
    TensorView on_host(const TensorView& view) {
      check(view.device.kind == DeviceKind::kCuda, "a result in host memory");
      copies.emplace_back(static_cast<std::size_t>(span_of(view)) + 1);
      TensorView host = view;
      host.device = {};
      host.data = copies.back().data();
      rounds.to_host(host, view);
      rounds.synchronize();
      return host;
    }

    [[nodiscard]] Stream stream() const { return {rounds.stream()}; }

    void set_step(const std::vector<std::int64_t>& rows_of_each) {
      sizes = rows_of_each;
      manager.set_step_num_tokens(sizes);
    }

    [[nodiscard]] std::int64_t own() const { return sizes[static_cast<std::size_t>(group.rank())]; }

    [[nodiscard]] std::int64_t all() const { return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0}); }

    void dispatch_and_check() {
      const TensorView rows = on_device(cargo_matrix<float>(Dtype::kF32, 0, group.rank(), own(), kHidden));
      const TensorView weights = on_device(cargo_matrix<float>(Dtype::kF32, 1, group.rank(), own(), 4));
      const TensorView ids = on_device(cargo_matrix<std::int64_t>(Dtype::kI64, 2, group.rank(), own(), 4));
      GatherResult result;
      check(gather.dispatch(rows, weights, ids, {.stream = stream()}, result).code == StatusCode::kEnqueued,
            "a gather call on a GPU is enqueued");
      check_gathered<float>(on_host(result.hidden_states), Dtype::kF32, 0, ranks, sizes);
      check_gathered<float>(on_host(result.topk_weights), Dtype::kF32, 1, ranks, sizes);
      check_gathered<std::int64_t>(on_host(result.topk_ids), Dtype::kI64, 2, ranks, sizes);
      check_fine();
    }

    void check_sum(const TensorView& output) {
      check_combined(on_host(output), ranks, sizes, static_cast<std::size_t>(group.rank()));
      check_fine();
    }

    void combine_and_check() {
      TensorView output;
      const Status status =
          gather.combine(on_device(expert_output(group.rank(), all(), kHidden)), output, false, stream());
      check(status.code == StatusCode::kEnqueued, "combine: " + status.message());
      check_sum(output);
    }

    static void check_fine() { check_cuda(cudaGetLastError(), "what CUDA remembers"); }

    Group group;
    DeviceRounds rounds;
    All2AllManager manager;
    GatherCalls& gather;
    std::vector<int> ranks;
    std::vector<std::int64_t> sizes;
    std::vector<std::vector<std::byte>> copies;
  };

  static void on_ranks(const std::function<void(Rank&)>& body) {
    run_with_devices(GetParam(), [&](const Group& group, int device) {
      Rank rank(group, device);
      body(rank);
      support::check_ok(rank.manager.destroy(), "destroy");
    });
  }

  [[nodiscard]] static std::vector<std::int64_t> equal(std::int64_t rows) {
    std::vector<std::int64_t> sizes(static_cast<std::size_t>(GetParam().num_ranks), rows);
    return sizes;
  }

  [[nodiscard]] static std::vector<std::int64_t> uneven(std::int64_t rows) {
    std::vector<std::int64_t> sizes = equal(rows);
    for (std::size_t i = 0; i < sizes.size(); ++i)
      sizes[i] -= static_cast<std::int64_t>(i) % 3;
    sizes.back() = 0;
    return sizes;
  }
};

TEST_P(GatherManagerOnGpu, DispatchAndCombineWhateverRanksBring) {
  on_ranks([](Rank& rank) {
    for (const auto& sizes : {equal(5), uneven(7), equal(1), uneven(5)}) {
      rank.set_step(sizes);
      rank.dispatch_and_check();
      rank.combine_and_check();
    }
  });
}

TEST_P(GatherManagerOnGpu, CombineNeedsNoDispatch) {
  on_ranks([](Rank& rank) {
    for (const auto& sizes : {uneven(6), equal(6)}) {
      rank.set_step(sizes);
      for (int i = 0; i < 2; ++i)
        rank.combine_and_check();
    }
    rank.set_step(equal(3));
    rank.dispatch_and_check();
    rank.set_step(uneven(4));  // not what was dispatched
    rank.combine_and_check();
  });
}

TEST_P(GatherManagerOnGpu, CombineWritesIntoTheCallersTensor) {
  on_ranks([](Rank& rank) {
    rank.set_step(uneven(5));
    TensorView output = rank.on_device(cargo_matrix<float>(Dtype::kF32, 7, 0, rank.own(), kHidden));
    const void* memory = output.data;
    for (int i = 0; i < 3; ++i) {
      const TensorView rows = rank.on_device(expert_output(rank.group.rank(), rank.all(), kHidden));
      check(rank.gather.combine_into_output(rows, output, false, rank.stream()).code == StatusCode::kEnqueued,
            "combine_into_output");
      check(output.data == memory, "another tensor");
      rank.check_sum(output);
    }
  });
}

TEST_P(GatherManagerOnGpu, ExpertOutputMayLieInTheWindow) {
  on_ranks([](Rank& rank) {
    rank.set_step(equal(6));
    const auto memory = [&] { return rank.gather.allocate_combine_input(rank.all(), kHidden, Dtype::kF32); };
    check(!memory().defined(), "memory of a window that nobody made");
    rank.dispatch_and_check();
    const void* address = memory().data;
    check(address != nullptr, "no memory of the window");
    for (int i = 0; i < 4; ++i) {
      const TensorView rows = memory();
      check(rows.data == address, "another address");
      Matrix<float> values = expert_output(rank.group.rank(), rank.all(), kHidden);
      rank.upload(values, rows);
      if (i % 2 == 1) rank.dispatch_and_check();
      TensorView output;
      check(rank.gather.combine(rows, output, false, rank.stream()).code == StatusCode::kEnqueued, "combine");
      rank.check_sum(output);
    }
    rank.set_step(uneven(6));
    check(!memory().defined(), "memory of the window where ranks bring different numbers of rows");
  });
}

// A window that a caller may be writing to stays until it has been read, though the calls only enqueue.
TEST_P(GatherManagerOnGpu, WindowsGrowWithTheSteps) {
  on_ranks([](Rank& rank) {
    for (const std::int64_t rows : {2, 9, 8, 40, 33, 700}) {
      rank.set_step(equal(rows));
      rank.dispatch_and_check();
      rank.combine_and_check();
      const TensorView given = rank.gather.allocate_combine_input(rank.all(), kHidden, Dtype::kF32);
      check(given.defined(), "no memory of the window");
      Matrix<float> values = expert_output(rank.group.rank(), rank.all(), kHidden);
      rank.upload(values, given);
      TensorView output;
      check(rank.gather.combine(given, output, false, rank.stream()).ok(), "combine");
      rank.check_sum(output);
    }
  });
}

TEST_P(GatherManagerOnGpu, CallersAllocatorIsAskedForDeviceMemory) {
  run_with_devices(GetParam(), [](const Group& group, int device) {
    std::optional<Rank> rank;
    rank.emplace(group, device);
    CommunicationOptions options = cuda_options(device);
    int asked = 0;
    options.allocate_output = [&](std::int64_t bytes, Device where) -> void* {
      check(where.kind == DeviceKind::kCuda && where.index == device, "memory of another device");
      ++asked;
      return rank->rounds.keep(bytes);
    };
    support::check_ok(rank->manager.destroy(), "destroy");
    rank->manager =
        create_all2all_manager("all_gather", {.group = group, .parallel = {.dp = group}, .communication = options});
    rank->manager.set_step_num_tokens(rank->sizes = equal(4));
    GatherCalls& gather = rank->manager.gather_calls();
    TensorView output;
    const Status status = gather.combine(rank->on_device(expert_output(group.rank(), rank->all(), kHidden)), output,
                                         false, rank->stream());
    check(status.ok(), "combine: " + status.message());
    rank->check_sum(output);
    check(asked > 0, "the allocator was not asked");
    support::check_ok(rank->manager.destroy(), "destroy");
  });
}

TEST_P(GatherManagerOnGpu, MisuseOfOneRankIsToldOnItsStream) {
  on_ranks([](Rank& rank) {
    rank.set_step(equal(4));
    rank.dispatch_and_check();
    rank.combine_and_check();
    const TensorView rows = rank.on_device(cargo_matrix<float>(Dtype::kF32, 0, rank.group.rank(), 4, kHidden));
    const TensorView cargo = rank.on_device(cargo_matrix<float>(Dtype::kF32, 1, rank.group.rank(), 4, 4));
    GatherResult result;
    if (rank.group.rank() == 1) {
      TensorView fewer = rows;
      fewer.shape[0] = 3;
      support::check_throws(ErrorCode::kInvalidArgument, {"3", "4"}, [&] {
        static_cast<void>(rank.gather.dispatch(fewer, cargo, cargo, {.stream = rank.stream()}, result));
      });
    } else {
      check(rank.gather.dispatch(rows, cargo, cargo, {.stream = rank.stream()}, result).ok(), "dispatch");
    }
    rank.rounds.synchronize();
    rank.dispatch_and_check();
    rank.combine_and_check();
  });
}

INSTANTIATE_TEST_SUITE_P(
    Ranks,
    GatherManagerOnGpu,
    testing::Values(Shape{.num_ranks = 2}, Shape{.num_ranks = 4}, Shape{.num_ranks = 2, .spread = true}),
    [](const auto& of) { return std::to_string(of.param.num_ranks) + (of.param.spread ? "_spread" : "_shared"); });

}  // namespace
}  // namespace tokenyard::gpu_tests
