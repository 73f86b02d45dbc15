// SPDX-License-Identifier: Apache-2.0
// Ranks go through random sequences of calls, on some seeds not all through the same: then each of
// them ends, with a message that says who was where, or with nothing left to do. Without divergence
// all have the same bits. PAGODA_CALL_SEEDS=1000 tries more of them. A hang is CTest's time-out.
#include <chrono>
#include <cstdlib>
#include <map>
#include <random>
#include <regex>
#include <stdexcept>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pagoda/base/log.h"
#include "unit/engine/rehearsal.h"
#include "unit/engine/small_rank.h"

namespace pagoda::engine {
namespace {

enum class Do : int {
  Step,
  MicroBatch,
  ZeroGrad,
  GradNorm,
  Grad,
  Barrier,
  Save,
  Read,
  Rate,
  kCount,
};

enum class Odd : int {
  None,
  Leaves,     // an action out
  Adds,       // an action
  Throws,     // an exception of the user's
  Sleeps,     // for good
  EndsEarly,  // in good order
  OtherRate,  // than the others
  BatchLess,  // leaves a micro-batch out: no divergence
  IsSlow,     // pauses
  kCount,
};

struct Program {
  int ranks = 2;
  unsigned zero = 3;
  bool early = true;
  std::vector<Do> actions;
  Odd odd = Odd::None;
  int odd_rank = 0;
  std::size_t odd_at = 0;
  Do added = Do::Barrier;
  bool releases = true;
};

Program make_program(unsigned seed) {
  std::mt19937 random(seed);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  Program out;
  out.ranks = 2 + below(2);
  out.zero = static_cast<unsigned>(below(4));
  out.early = below(2) == 0;
  const int length = 2 + below(8);
  for (int i = 0; i < length; ++i) {
    out.actions.push_back(below(2) == 0 ? Do::Step
                                        : static_cast<Do>(below(static_cast<int>(Do::kCount))));
  }
  out.odd = static_cast<Odd>(below(static_cast<int>(Odd::kCount)));
  out.odd_rank = below(out.ranks);
  out.odd_at = static_cast<std::size_t>(below(length));
  out.added = static_cast<Do>(below(static_cast<int>(Do::kCount)));
  out.releases = below(2) == 0;
  return out;
}

/// What the user's script would do, one rank of it.
class Script {
 public:
  Script(const Program& program, const std::shared_ptr<comm::World>& world)
      : program_(program), rank_(options(program), world) {
    rank_.attach();
  }

  /// As the engine's destructor does when an exception goes through it.
  void fail() {
    rank_.runtime().fail(std::make_exception_ptr(EngineError("it ended with an exception")));
  }

  std::vector<SmallRank::Bits> run() {
    for (std::size_t i = 0; i < program_.actions.size(); ++i) {
      const bool odd = rank_.rank() == program_.odd_rank && i == program_.odd_at;
      if (odd && program_.odd == Odd::EndsEarly) return {};
      if (odd && !is_odd()) continue;
      act(program_.actions[i]);
    }
    if (program_.releases) return rank_.release();
    rank_.runtime().barrier();
    return rank_.values();
  }

 private:
  static SmallRank::Options options(const Program& program) {
    SmallRank::Options out;
    out.config = tiny();
    out.config.zero = program.zero;
    out.config.early_updates = program.early;
    out.config.timeout = 0.6;
    out.config.heartbeat = 0.05;
    out.pages = {300, 5000, 1};
    return out;
  }

  /// Does what is odd; false: and that is all.
  bool is_odd() {
    switch (program_.odd) {
      case Odd::Leaves:
        return false;
      case Odd::Adds:
        act(program_.added);
        return true;
      case Odd::Throws:
        throw std::runtime_error("the user's own");
      case Odd::Sleeps:
        while (!rank_.runtime().failed()) {
          std::this_thread::sleep_for(std::chrono::milliseconds(2));
        }
        return true;
      case Odd::OtherRate:
        rank_.runtime().set_learning_rate(0, 0.125);
        return true;
      case Odd::BatchLess:
        batch_less_ = true;
        return true;
      case Odd::IsSlow:
        std::this_thread::sleep_for(std::chrono::milliseconds(200));
        return true;
      default:
        return true;
    }
  }

  void act(Do what) {
    Runtime& runtime = rank_.runtime();
    switch (what) {
      case Do::Step:
        if (!std::exchange(batch_less_, false)) rank_.backward(number_, true);
        ++number_;
        rank_.step();
        return;
      case Do::MicroBatch:
        if (!std::exchange(batch_less_, false)) rank_.backward(number_, false);
        ++number_;
        return;
      case Do::ZeroGrad:
        return runtime.zero_grad();
      case Do::GradNorm:
        (void)runtime.grad_norm();
        return;
      case Do::Grad: {
        std::vector<float> to(rank_.page(1).elements);
        return runtime.read_gradient(rank_.page(1), to);
      }
      case Do::Barrier:
        return runtime.barrier();
      case Do::Save:
        runtime.begin_call("save_pretrained");
        if (rank_.rank() == 0) (void)rank_.values();
        return runtime.end_call("");
      case Do::Read:
        (void)rank_.values();
        return;
      case Do::Rate:
        return runtime.set_learning_rate(0, 0.5 / ++rates_);
      case Do::kCount:
        return;
    }
  }

  const Program& program_;
  SmallRank rank_;
  int number_ = 0;
  int rates_ = 1;
  bool batch_less_ = false;
};

bool says_who_was_where(const std::string& text) {
  static const std::regex known(
      "the ranks are in different calls: ranks? [0-9, ]+(is|are) in .*, ranks? [0-9, ]+in .*|"
      "the ranks differ in the optimizer of group 0: it is sgd.* on rank 0 and sgd.* on rank .*|"
      "rank . is in .* and has waited .* for rank ., which is alive and .*|"
      "rank . failed: it ended with an exception.*|"
      "rank . has ended its engine in close.*|"
      "the user's own|"
      ".* came (after|in, or after a failure of,) the last backward.. of a step and before step.*");
  return std::regex_search(text, known);
}

TEST(RandomCalls, EndWithTheSameBitsOrWithWhoWasWhere) {
  const log::Capture quiet([](auto, const auto&) {});
  const char* more = std::getenv("PAGODA_CALL_SEEDS");
  const unsigned seeds = more == nullptr ? 40 : static_cast<unsigned>(std::atoi(more));
  std::map<Odd, int> errors;
  for (unsigned seed = 0; seed < seeds; ++seed) {
    SCOPED_TRACE(seed);
    const Program program = make_program(seed);
    std::vector<std::vector<SmallRank::Bits>> seen(static_cast<std::size_t>(program.ranks));
    const auto ended = run_ranks(program.ranks, [&](auto world) {
      Script script(program, world);
      try {
        seen[static_cast<std::size_t>(world->rank())] = script.run();
      } catch (const std::runtime_error& error) {
        if (std::string(error.what()) == "the user's own") script.fail();
        throw;
      }
    });
    const bool same =
        program.odd == Odd::None || program.odd == Odd::BatchLess || program.odd == Odd::IsSlow;
    for (const std::string& text : ended) {
      if (text.empty()) continue;
      EXPECT_FALSE(same && text.find("came") == std::string::npos) << text;
      EXPECT_TRUE(says_who_was_where(text)) << text;
      ++errors[program.odd];
    }
    if (same && ended[0].empty()) {
      for (const auto& one : seen) EXPECT_EQ(one, seen[0]);
    }
  }
  EXPECT_GT(errors.size(), 3U);  // of the kinds of divergence that there are
}

}  // namespace
}  // namespace pagoda::engine
