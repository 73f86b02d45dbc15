// SPDX-License-Identifier: Apache-2.0
// Whatever fails below the engine is thrown, by the operator that needed the page or by the next
// call, with page, path and cause; after that the engine refuses to go on. Nothing is silently
// wrong.
#include <cerrno>
#include <map>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pagoda/base/log.h"
#include "pagoda/comm/thread_world.h"
#include "pagoda/io/fault/fault_plan.h"
#include "torch/ranks.h"
#include "torch/trainee.h"
#include "unit/io/scratch_directory.h"

namespace zoo {
namespace {

using pagoda::Placement;
using pagoda::io::Fault;
using pagoda::io::FaultKind;
using pagoda::io::FaultPlan;
using pagoda::io::Op;
using ::testing::AnyOf;
using ::testing::HasSubstr;

/// An error's text, which has all that one needs to know.
struct Cause {
  std::string name;
  Fault fault;
  std::string text;
};

class NoLostError : public ::testing::TestWithParam<Cause> {
 protected:
  NoLostError() { use_one_torch_thread(); }

  pagoda::Config config() {
    pagoda::Config config = crowded(options_);
    config.nvme = {scratch_.path().string()};
    config.nvme_budget = 32U << 20U;
    config.faults = plan_;
    config.prefetch = false;  // so that the operator at fault is the one that needs the page
    config.parameters = config.gradients = config.optimizer_state = Placement::Host;
    return config;
  }

  void strike(Op op, std::uint64_t skip = 0) {
    plan_->add({.fault = GetParam().fault, .op = op, .skip = skip});
  }

  /// A failed call says which page, where, and why.
  void expect_cause(const Ending& ending, const std::string& call) {
    SCOPED_TRACE(call);
    EXPECT_TRUE(ending.threw) << plan_->injected(GetParam().fault.kind) << " faults were injected";
    if (!ending.threw) return;
    EXPECT_THAT(ending.text, HasSubstr(GetParam().text));
    EXPECT_THAT(ending.text, HasSubstr(scratch_.path().string()));
    EXPECT_THAT(ending.text, HasSubstr("errno="));
    std::vector<std::string> pages{"page=parameter "};  // while a model is built it has no names
    for (const Bits& bits : parameter_bits(*make(options_))) pages.push_back("page=" + bits.name);
    bool named = false;
    for (const std::string& page : pages)
      named = named || ending.text.find(page) != std::string::npos;
    EXPECT_TRUE(named) << "no page in: " << ending.text;
  }

  /// Every call from now on throws the same cause.
  void expect_refusal(Trainee& trainee) {
    expect_cause(ending_of([&] { trainee.backward(); }), "backward");
    expect_cause(ending_of([&] { trainee.step(); }), "step");
    expect_cause(ending_of([&] { trainee.finish(); }), "finish");
    const Ending forward = ending_of([&] { trainee.forward(0); });
    expect_cause(forward, "forward");
    EXPECT_TRUE(forward.by_torch) << "an operator throws";
    expect_cause(ending_of([&] { (void)trainee.parameters(); }), "reading parameters");
  }

  const Options options_{.kind = Kind::Gpt};
  const Training training_{};
  const pagoda::io::ScratchDirectory scratch_;
  const std::shared_ptr<FaultPlan> plan_ = std::make_shared<FaultPlan>();
  const pagoda::log::Capture quiet_{[](auto, const auto&) {}};
};

TEST_P(NoLostError, OfAFetchInForwardAndBackward) {
  for (const std::uint64_t skip : {0U, 5U, 30U}) {
    SCOPED_TRACE(skip);
    pagoda::Config config = this->config();
    config.parameters = Placement::Nvme;
    Trainee trainee(options_, training_, config);
    trainee.train(0);
    trainee.finish();
    strike(Op::Read, skip);
    Ending first;
    for (int step = 1; step < 4 && !first.threw; ++step) {
      first = ending_of([&] { trainee.forward(step); });
      if (first.threw) {
        EXPECT_TRUE(first.by_torch) << first.text;
        break;
      }
      first = ending_of([&] { trainee.backward(); });
      if (first.threw) break;
      first = ending_of([&] { trainee.step(); });
    }
    expect_cause(first, "first");
    expect_refusal(trainee);
  }
}

TEST_P(NoLostError, OfAPrefetch) {
  pagoda::Config config = this->config();
  config.parameters = Placement::Nvme;
  config.prefetch = true;
  Trainee trainee(options_, training_, config);
  for (int step = 0; step < 3; ++step) trainee.train(step);
  trainee.finish();
  strike(Op::Read, 7);
  Ending ending;
  for (int step = 3; step < 6 && !ending.threw; ++step) {
    ending = ending_of([&] { trainee.train(step); });
  }
  expect_cause(ending, "training");
  expect_refusal(trainee);
}

TEST_P(NoLostError, WhileTheModelIsBuilt) {
  for (const std::uint64_t skip : {0U, 1U, 9U, 20U, 40U}) {
    SCOPED_TRACE(skip);
    pagoda::Config config = this->config();
    config.parameters = Placement::Nvme;
    Trainee trainee(options_, training_, config, nullptr, Trainee::Start::Empty);
    // What is written wrongly shows when it is read again: on the way or while it is trained.
    strike(GetParam().fault.kind == FaultKind::FlipBit ? Op::Read : Op::Write, skip);
    const Ending ending = ending_of([&] {
      trainee.build();
      trainee.train(0);
      trainee.finish();
    });
    expect_cause(ending, "build");
    expect_cause(ending_of([&] { trainee.backward(); }), "backward");
    expect_cause(ending_of([&] { trainee.step(); }), "step");
    expect_cause(ending_of([&] { trainee.finish(); }), "finish");
    expect_cause(ending_of([&] { trainee.build(); }), "build again");
  }
}

TEST_P(NoLostError, OfAGradient) {
  pagoda::Config config = this->config();
  config.gradients = Placement::Nvme;
  config.accumulation = 2;
  Trainee trainee(options_, training_, config);
  trainee.train(0);
  trainee.finish();
  // The update reads gradients; a second micro-batch reads and writes them.
  strike(GetParam().fault.kind == FaultKind::FlipBit ? Op::Read : Op::Write, 3);
  const Ending ending = ending_of([&] {
    for (int micro = 0; micro < 2; ++micro) {
      trainee.forward(1, micro);
      trainee.backward();
    }
    trainee.step();
  });
  if (GetParam().fault.kind != FaultKind::FlipBit) expect_cause(ending, "step");
  expect_cause(ending_of([&] { trainee.finish(); }), "finish");
  expect_refusal(trainee);
}

TEST_P(NoLostError, OfOptimizerState) {
  for (const Op op : {Op::Read, Op::Write}) {
    SCOPED_TRACE(op == Op::Read ? "read" : "write");
    pagoda::Config config = this->config();
    config.optimizer_state = Placement::Nvme;
    config.early_updates = false;
    Trainee trainee(options_, training_, config);
    trainee.train(0);
    trainee.finish();
    trainee.forward(1);
    trainee.backward();
    strike(op);
    trainee.step();  // updates run later
    const Ending finish = ending_of([&] {
      trainee.finish();
      if (op == Op::Write && GetParam().fault.kind == FaultKind::FlipBit) {
        trainee.train(2);  // reads what was written
        trainee.finish();
      }
    });
    expect_cause(finish, "finish");
    expect_refusal(trainee);
  }
}

TEST_P(NoLostError, OfAnUpdateThatAnOperatorWaitsFor) {
  pagoda::Config config = this->config();
  config.optimizer_state = Placement::Nvme;
  config.early_updates = false;
  Trainee trainee(options_, training_, config);
  trainee.train(0);
  trainee.finish();
  strike(Op::Read);
  trainee.train(1);
  const Ending forward = ending_of([&] { trainee.forward(2); });
  expect_cause(forward, "forward");
  EXPECT_TRUE(forward.by_torch);
  expect_refusal(trainee);
}

TEST_P(NoLostError, OfAnUpdateThatBeganDuringBackward) {
  pagoda::Config config = this->config();
  config.optimizer_state = Placement::Nvme;
  Trainee trainee(options_, training_, config);
  trainee.train(0);
  trainee.train(1);
  trainee.finish();
  EXPECT_GT(trainee.stats().updates.early, 0U);
  trainee.forward(2);
  strike(Op::Read);
  expect_cause(ending_of([&] {
                 trainee.backward();
                 trainee.step();
                 trainee.finish();
               }),
               "backward, step or finish");
  expect_refusal(trainee);
}

INSTANTIATE_TEST_SUITE_P(
    Causes, NoLostError,
    ::testing::Values(Cause{"errno", {.kind = FaultKind::Error, .error_number = EIO}, "EIO"},
                      Cause{"checksum", {.kind = FaultKind::FlipBit, .position = 77}, "checksum"}),
    [](const auto& info) { return info.param.name; });

/// Whatever strikes, a run gives the bits of a run that nothing struck, or an error.
class NoLostErrorAtRandom : public ::testing::TestWithParam<int> {};

TEST_P(NoLostErrorAtRandom, IsARunExactOrFails) {
  use_one_torch_thread();
  const pagoda::log::Capture quiet([](auto, const auto&) {});
  const int ranks = GetParam();
  const Options options{.kind = Kind::Moe};
  const Training training{.steps = 3, .ranks = ranks};
  const Trained plain = plain_loop(options, training);
  constexpr std::uint64_t kSeeds = 40;
  std::uint64_t exact = 0;
  std::uint64_t failed = 0;
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    SCOPED_TRACE(seed);
    const pagoda::io::ScratchDirectory scratch;
    pagoda::Config config = crowded(options);
    config.zero = seed % 4;
    config.nvme = {scratch.path().string()};
    config.nvme_budget = 32U << 20U;
    config.parameters = config.gradients = config.optimizer_state = Placement::Nvme;
    const auto endings = run_ranks(ranks, [&](const auto& world) {
      pagoda::Config mine = config;
      mine.faults = std::make_shared<FaultPlan>();
      mine.faults->set_lottery({.seed = seed * 100 + static_cast<std::uint64_t>(world->rank()),
                                .probability = 0.002,
                                .faults = {{.kind = FaultKind::Error, .error_number = EIO},
                                           {.kind = FaultKind::Error, .error_number = ENOSPC},
                                           {.kind = FaultKind::Short},
                                           {.kind = FaultKind::FlipBit},
                                           {.kind = FaultKind::Delay, .delay = 500'000}}});
      Trainee trainee(options, training, mine, world);
      for (int step = 0; step < training.steps; ++step) {
        const std::uint32_t loss = trainee.train(step);
        const auto rank = static_cast<std::size_t>(world->rank());
        ASSERT_EQ(loss, plain.losses[static_cast<std::size_t>(step)][rank]) << "silently wrong";
      }
      trainee.finish();
      ASSERT_EQ(trainee.parameters(), plain.parameters) << "silently wrong";
    });
    bool all = true;
    for (const Ending& ending : endings) all = all && !ending.threw;
    ++(all ? exact : failed);
    for (const Ending& ending : endings) {
      if (!ending.threw) continue;
      EXPECT_THAT(ending.text, AnyOf(HasSubstr("EIO"), HasSubstr("ENOSPC"), HasSubstr("checksum"),
                                     HasSubstr("lost")));
    }
  }
  EXPECT_GT(exact, 0U);
  EXPECT_GT(failed, 0U);
}

INSTANTIATE_TEST_SUITE_P(Ranks, NoLostErrorAtRandom, ::testing::Values(1, 2),
                         ::testing::PrintToStringParamName());

/// A world that lets a test reach the groups that the engine makes.
class OpenWorld final : public pagoda::comm::World {
 public:
  explicit OpenWorld(std::shared_ptr<World> inner) : inner_(std::move(inner)) {}

  int rank() const noexcept override { return inner_->rank(); }
  int size() const noexcept override { return inner_->size(); }
  std::unique_ptr<pagoda::comm::Group> make_group(std::string name) override {
    auto group = inner_->make_group(name);
    groups_[name] = group.get();
    return group;
  }
  void put(std::string_view key, std::string_view value) override { inner_->put(key, value); }
  std::optional<std::string> get(std::string_view key) override { return inner_->get(key); }

  pagoda::comm::Group& group(const std::string& name) { return *groups_.at(name); }

 private:
  const std::shared_ptr<World> inner_;
  std::map<std::string, pagoda::comm::Group*> groups_;
};

struct Broken {
  std::string group;
  unsigned zero;
};

class NoLostErrorOfGroups : public ::testing::TestWithParam<Broken> {};

TEST_P(NoLostErrorOfGroups, IsThrownOnEveryRank) {
  const pagoda::log::Capture quiet([](auto, const auto&) {});
  const Options options{.kind = Kind::Gpt};
  const Training training{.ranks = 2};
  pagoda::Config config = crowded(options);
  config.zero = GetParam().zero;
  const auto endings = run_ranks(2, [&](const auto& world) {
    const auto open = std::make_shared<OpenWorld>(world);
    Trainee trainee(options, training, config, open);
    for (int step = 0;; ++step) {
      if (step == 2 && world->rank() == 1) open->group(GetParam().group).abort("the cable was cut");
      const Ending ending = ending_of([&] { trainee.train(step); });
      if (!ending.threw) continue;
      EXPECT_THAT(ending.text, HasSubstr("the cable was cut")) << "on rank " << world->rank();
      for (const auto& call : std::vector<std::function<void()>>{
               [&] { trainee.backward(); }, [&] { trainee.step(); }, [&] { trainee.finish(); },
               [&] { trainee.forward(step); }}) {
        EXPECT_THAT(ending_of(call).text, HasSubstr("the cable was cut"));
      }
      break;
    }
  });
  for (const Ending& ending : endings) EXPECT_FALSE(ending.threw) << ending.text;
}

INSTANTIATE_TEST_SUITE_P(Groups, NoLostErrorOfGroups,
                         ::testing::Values(Broken{"control", 3}, Broken{"gradients", 3},
                                           Broken{"pulls", 3}, Broken{"control", 0},
                                           Broken{"gradients", 1}, Broken{"pulls", 1}),
                         [](const auto& info) {
                           return fmt::format("{}_{}", info.param.group, info.param.zero);
                         });

}  // namespace
}  // namespace zoo
