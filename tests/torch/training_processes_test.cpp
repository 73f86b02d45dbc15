// SPDX-License-Identifier: Apache-2.0
// Ranks that are processes, as torchrun starts them: exact, and one that is killed ends the others
// with its name.
#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "torch/process.h"
#include "torch/trainee.h"

namespace zoo {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

std::vector<std::unique_ptr<Process>> start_workers(int ranks, const std::string& kind,
                                                    const std::string& zero,
                                                    const std::string& steps) {
  std::map<std::string, std::string> environment{{"WORLD_SIZE", std::to_string(ranks)},
                                                 {"MASTER_ADDR", "127.0.0.1"},
                                                 {"MASTER_PORT", std::to_string(free_port())}};
  std::vector<std::unique_ptr<Process>> workers;
  for (int rank = 0; rank < ranks; ++rank) {
    environment["RANK"] = std::to_string(rank);
    workers.push_back(std::make_unique<Process>(
        std::vector<std::string>{PAGODA_TRAINEE_WORKER, kind, zero, steps}, environment));
  }
  return workers;
}

/// What each rank prints at the end, as the plain loop has it.
std::vector<std::string> expected_results(Kind kind, int ranks, int steps) {
  use_one_torch_thread();
  const Trained plain = plain_loop({.kind = kind}, {.steps = steps, .ranks = ranks});
  std::vector<std::string> out;
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<std::uint32_t> losses;
    for (const auto& step : plain.losses) losses.push_back(step[static_cast<std::size_t>(rank)]);
    out.push_back(fmt::format("result {:016x}", fingerprint(losses, plain.parameters)));
  }
  return out;
}

TEST(TrainingProcesses, TrainExactly) {
  for (const char* zero : {"1", "3"}) {
    SCOPED_TRACE(zero);
    const auto workers = start_workers(2, "moe", zero, "4");
    const auto expected = expected_results(Kind::Moe, 2, 4);
    for (std::size_t rank = 0; rank < workers.size(); ++rank) {
      EXPECT_EQ(workers[rank]->line_with("result"), expected[rank]);
      EXPECT_EQ(workers[rank]->wait(), 0);
    }
  }
}

TEST(TrainingProcesses, TrainExactlyUnderTorchrun) {
  if (!std::filesystem::exists(PAGODA_PYTHON)) {
    GTEST_SKIP() << "no Python with torch at " << PAGODA_PYTHON;
  }
  Process torchrun(
      {PAGODA_PYTHON, "-m", "torch.distributed.run", "--no-python", "--nnodes=1",
       "--nproc-per-node=2", "--master-addr=127.0.0.1",
       "--master-port=" + std::to_string(free_port()), PAGODA_TRAINEE_WORKER, "gpt", "3", "3"},
      {{"OMP_NUM_THREADS", "1"}});
  std::multiset<std::string> results;
  for (std::string line = torchrun.line_with("result"); !line.empty();
       line = torchrun.line_with("result")) {
    results.insert(line);
  }
  EXPECT_EQ(torchrun.wait(), 0);
  const auto expected = expected_results(Kind::Gpt, 2, 3);
  EXPECT_EQ(results, std::multiset<std::string>(expected.begin(), expected.end()));
}

/// The victim: rank 0 holds the store.
class TrainingProcessesLose : public ::testing::TestWithParam<int> {};

TEST_P(TrainingProcessesLose, ARankAndTheOthersEndWithAnErrorThatNamesIt) {
  constexpr int kRanks = 3;
  const auto victim = static_cast<std::size_t>(GetParam());
  const auto workers = start_workers(kRanks, "gpt", "3", "1000000");
  for (const auto& worker : workers) ASSERT_EQ(worker->line_with("step 2"), "step 2");
  workers[victim]->signal(SIGKILL);
  for (std::size_t rank = 0; rank < workers.size(); ++rank) {
    if (rank == victim) continue;
    SCOPED_TRACE(rank);
    EXPECT_THAT(workers[rank]->line_with("error"), HasSubstr(fmt::format("rank {}", victim)));
    EXPECT_EQ(workers[rank]->wait(), 3) << "ends in good order, with an error";
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, TrainingProcessesLose, ::testing::Values(0, 1),
                         ::testing::PrintToStringParamName());

}  // namespace
}  // namespace zoo
