// SPDX-License-Identifier: Apache-2.0
// What an engine took is given back: bytes when storages die, threads and descriptors when it ends,
// swap files when its process is killed. A fork may only forget.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "pagoda/io/fault/fault_plan.h"
#include "pagoda/pager/tiers.h"
#include "torch/process.h"
#include "torch/ranks.h"
#include "torch/trainee.h"
#include "unit/io/scratch_directory.h"

namespace zoo {
namespace {

using pagoda::Placement;
using pagoda::io::ScratchDirectory;
using ::testing::HasSubstr;

pagoda::Config on_disk(const Options& options, const ScratchDirectory& scratch) {
  pagoda::Config config = crowded(options);
  config.nvme = {scratch.path().string()};
  config.nvme_budget = 32U << 20U;
  config.parameters = config.gradients = config.optimizer_state = Placement::Nvme;
  return config;
}

int threads_here() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("Threads:")) return std::stoi(line.substr(8));
  }
  return -1;
}

std::ptrdiff_t descriptors_here() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
}

/// The deleted files below `directory` that a process has open.
int unlinked_files(pid_t pid, const std::filesystem::path& directory) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(fmt::format("/proc/{}/fd", pid))) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    if (target.starts_with(directory.string()) && target.ends_with("(deleted)")) ++count;
  }
  return count;
}

TEST(NoLeak, SwapFilesAreGoneAfterAKill) {
  const ScratchDirectory scratch;
  Process worker({PAGODA_TRAINEE_WORKER, "gpt", "3", "1000000", scratch.path().string()}, {});
  ASSERT_EQ(worker.line_with("step 1"), "step 1");
  EXPECT_GE(unlinked_files(worker.pid(), scratch.path()), 1) << "it does swap there";
  EXPECT_TRUE(std::filesystem::is_empty(scratch.path())) << "nobody else can open it";
  worker.signal(SIGKILL);
  EXPECT_EQ(worker.wait(), 128 + SIGKILL);
  EXPECT_TRUE(std::filesystem::is_empty(scratch.path()));
}

TEST(NoLeak, PagesGoWithTheirStorages) {
  using pagoda::pager::Tier;
  const ScratchDirectory scratch;
  const Options options{.kind = Kind::Gpt};
  Trainee trainee(options, {}, on_disk(options, scratch));
  trainee.train(0);
  const auto parameters = [&] {
    return trainee.stats().held(Tier::Nvme, pagoda::pager::tag::kParameters);
  };
  const auto sums = [&] {
    return trainee.stats().held(Tier::Host, pagoda::pager::tag::kChecksums);
  };
  const pagoda::Bytes before = parameters();
  const pagoda::Bytes sums_before = sums();
  ASSERT_GT(before, 0U);
  for (int i = 0; i < 5; ++i) trainee.build_and_drop();
  trainee.train(1);  // dead pages are given back at the next touch
  EXPECT_EQ(parameters(), before);
  EXPECT_EQ(sums(), sums_before);
}

TEST(NoLeak, AModelMayGoBeforeItsEngine) {
  use_one_torch_thread();
  for (const Kind kind : {Kind::Gpt, Kind::Views}) {
    const Options options{.kind = kind};
    pagoda::Config config = crowded(options);
    config.clip = 1;  // norms look at every page
    Trainee trainee(options, {}, config);
    trainee.train(0);
    trainee.drop_model();
    trainee.build_and_drop();  // buries what is dead
    EXPECT_NO_THROW(trainee.step()) << "nothing to do, and nothing to fall over";
    EXPECT_NO_THROW(trainee.finish());
  }
}

TEST(NoLeak, ParametersAfterTheirEngineThrow) {
  const Options options{.kind = Kind::Gpt};
  Trainee trainee(options, {}, crowded(options));
  trainee.train(0);
  trainee.end_engine();
  const Ending by_operator = ending_of([&] { (void)trainee.parameters(); });
  EXPECT_TRUE(by_operator.by_torch);
  EXPECT_THAT(by_operator.text, HasSubstr("went with its engine"));
  EXPECT_THAT(by_operator.text, HasSubstr("release()")) << "and says what helps";
  EXPECT_THAT(ending_of([&] { trainee.read_raw_pointer(); }).text,
              HasSubstr("went with its engine"));
}

TEST(NoLeak, AHundredEnginesLeaveNothing) {
  use_one_torch_thread();
  const ScratchDirectory scratch;
  const Options options{.kind = Kind::Outside};
  const Trained plain = plain_loop(options, {.steps = 2});
  const auto one = [&](const char* device) {
    pagoda::Config config = on_disk(options, scratch);
    config.device = device;
    config.nvme_budget = 4U << 20U;
    Trainee trainee(options, {}, config);
    for (int step = 0; step < 2; ++step) trainee.train(step);
    trainee.finish();
    EXPECT_EQ(trainee.parameters(), plain.parameters);
  };
  one("cpu");
  one("emulated");
  const int threads = threads_here();
  const auto descriptors = descriptors_here();
  for (int i = 0; i < 50; ++i) {
    one("cpu");
    one("emulated");
  }
  EXPECT_EQ(threads_here(), threads);
  EXPECT_EQ(descriptors_here(), descriptors);
  EXPECT_TRUE(std::filesystem::is_empty(scratch.path()));
}

TEST(NoLeak, TwoEnginesAtOnceDoNotMix) {
  use_one_torch_thread();
  const Options gpt{.kind = Kind::Gpt};
  const Options moe{.kind = Kind::Moe};
  const Trained plain_gpt = plain_loop(gpt, {.steps = 4});
  const Trained plain_moe = plain_loop(moe, {.steps = 4});
  const ScratchDirectory scratch;
  {
    // By turns on one thread.
    Trainee a(gpt, {}, on_disk(gpt, scratch));
    Trainee b(moe, {}, crowded(moe));
    for (int step = 0; step < 4; ++step) {
      a.forward(step);
      b.forward(step);
      a.backward();
      b.backward();
      b.step();
      a.step();
    }
    EXPECT_EQ(a.parameters(), plain_gpt.parameters);
    EXPECT_EQ(b.parameters(), plain_moe.parameters);
  }
  // On two threads.
  std::jthread other([&] {
    Trainee b(moe, {}, crowded(moe));
    for (int step = 0; step < 4; ++step) b.train(step);
    EXPECT_EQ(b.parameters(), plain_moe.parameters);
  });
  Trainee a(gpt, {}, on_disk(gpt, scratch));
  for (int step = 0; step < 4; ++step) a.train(step);
  EXPECT_EQ(a.parameters(), plain_gpt.parameters);
}

TEST(NoLeak, AnEngineEndsWithUpdatesStillOwed) {
  use_one_torch_thread();
  const Options options{.kind = Kind::Gpt};
  for (const int ranks : {1, 2}) {
    for (const unsigned zero : {0U, 1U, 3U}) {
      SCOPED_TRACE(fmt::format("{} ranks, stage {}", ranks, zero));
      const ScratchDirectory scratch;
      const auto endings = run_ranks(ranks, [&](const auto& world) {
        pagoda::Config config = on_disk(options, scratch);
        config.zero = zero;
        config.faults = std::make_shared<pagoda::io::FaultPlan>();
        Trainee trainee(options, {.ranks = ranks}, config, world);
        trainee.train(0);
        trainee.forward(1);
        trainee.backward();
        config.faults->set_lottery(
            {.probability = 1,
             .faults = {{.kind = pagoda::io::FaultKind::Delay, .delay = 3'000'000}}});
        trainee.step();
      });
      for (const Ending& ending : endings) EXPECT_FALSE(ending.threw) << ending.text;
    }
  }
}

bool says(const Ending& ending, const std::string& text) {
  return ending.threw && ending.text.find(text) != std::string::npos;
}

/// What the child does; its exit code says where it went wrong.
int child_part(std::unique_ptr<Trainee>& trainee, bool destroys,
               const decltype(Trained::parameters)& first) {
  ::alarm(20);  // a hang is a failure
  const Ending touch = ending_of([&] { (void)trainee->parameters(); });
  if (!says(touch, "forked child")) return 1;
  const Ending forward = ending_of([&] { trainee->forward(0); });
  if (!says(forward, "forked child")) return 2;
  for (const auto& call : std::vector<std::function<void()>>{
           [&] { trainee->step(); }, [&] { trainee->finish(); }, [&] { trainee->backward(); }}) {
    if (!says(ending_of(call), "forked process")) return 3;
  }
  if (destroys) trainee.reset();
  // An engine of its own pages as in any process. (Torch itself allows no backward here.)
  const Options options{.kind = Kind::Gpt};
  const ScratchDirectory scratch;
  const Ending own = ending_of([&] {
    Trainee fresh(options, Training{}, on_disk(options, scratch));
    fresh.forward(0);
    if (fresh.parameters() != first) throw std::runtime_error("it has other parameters");
  });
  return own.threw ? 4 : 0;
}

TEST(NoLeak, AForkMayOnlyForget) {
  use_one_torch_thread();
  const ScratchDirectory scratch;
  const Options options{.kind = Kind::Gpt};
  const Trained plain = plain_loop(options, {.steps = 6});
  auto trainee = std::make_unique<Trainee>(options, Training{}, on_disk(options, scratch));
  const auto first = trainee->parameters();
  for (int step = 0; step < 6; ++step) {
    EXPECT_EQ(trainee->train(step), plain.losses[static_cast<std::size_t>(step)][0]);
    // Updates and fetches are under way.
    const pid_t child = ::fork();
    if (child == 0) ::_exit(child_part(trainee, step % 2 == 0, first));
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status)) << "ended by signal " << WTERMSIG(status);
    EXPECT_EQ(WEXITSTATUS(status), 0);
  }
  trainee->finish();
  EXPECT_EQ(trainee->parameters(), plain.parameters);
}

}  // namespace
}  // namespace zoo
