// SPDX-License-Identifier: Apache-2.0
// An engine that cannot be made, while threads of its own and other ranks run already.
#include <memory>
#include <string>
#include <utility>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pagoda/base/log.h"
#include "pagoda/comm/thread_world.h"
#include "unit/engine/rehearsal.h"
#include "unit/engine/small_rank.h"

namespace pagoda::engine {
namespace {

/// A world in which one group cannot be made.
class UnconnectedWorld final : public comm::World {
 public:
  UnconnectedWorld(std::shared_ptr<comm::World> whole, std::string broken)
      : whole_(std::move(whole)), broken_(std::move(broken)) {}

  int rank() const noexcept override { return whole_->rank(); }
  int size() const noexcept override { return whole_->size(); }
  std::unique_ptr<comm::Group> make_group(std::string name) override {
    if (name == broken_) throw EngineError("no connection for " + name);
    return whole_->make_group(std::move(name));
  }
  void give_up(std::string_view why) noexcept override { whole_->give_up(why); }
  void put(std::string_view key, std::string_view value) override { whole_->put(key, value); }
  std::optional<std::string> get(std::string_view key) override { return whole_->get(key); }

 private:
  const std::shared_ptr<comm::World> whole_;
  const std::string broken_;
};

class HalfMade : public testing::TestWithParam<std::string> {};

TEST_P(HalfMade, GoesWithItsThreadsAndTheOtherRankHearsWhy) {
  const log::Capture quiet([](auto, const auto&) {});
  for (int turn = 0; turn < 5; ++turn) {
    auto worlds = comm::make_thread_worlds(2);
    worlds[1] = std::make_shared<UnconnectedWorld>(worlds[1], GetParam());
    const auto thrown = run_ranks(worlds, [](std::shared_ptr<comm::World> world) {
      SmallRank::Options options;
      options.config = tiny();
      options.config.zero = 1;
      options.config.heartbeat = 0.02;
      SmallRank rank(options, std::move(world));
      rank.attach();
    });
    for (const std::string& error : thrown) {
      EXPECT_THAT(error, testing::HasSubstr("no connection for " + GetParam()));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, HalfMade, testing::Values("calls", "control", "gradients", "pulls"),
                         [](const auto& group) { return group.param; });

}  // namespace
}  // namespace pagoda::engine
