// SPDX-License-Identifier: Apache-2.0
// Paging changes where bytes are, never what they are: training through the engine gives the bits
// of plain_loop, whatever the placement, budget, stage or number of ranks.
#include <cstdlib>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "pagoda/base/clock.h"
#include "torch/parity_case.h"

namespace zoo {
namespace {

TEST(Parity, OfEveryPairOfChoices) {
  const auto cases = covering::pairwise(parity_dimensions(), parity_allowed);
  const char* only = std::getenv("PAGODA_TEST_CASE");  // a part of a case's text, to repeat it
  std::size_t failed = 0;
  for (const covering::Combination& combination : cases) {
    if (only != nullptr && combination.text().find(only) == std::string::npos) continue;
    const pagoda::Stopwatch watch;
    const std::string wrong = check_parity(parity_case(combination));
    if (std::getenv("PAGODA_TEST_VERBOSE") != nullptr) {
      fmt::print("{:.2f} s {} {}\n", watch.seconds(), wrong.empty() ? "ok" : "FAILS",
                 combination.text());
      std::fflush(stdout);
    }
    if (wrong.empty()) continue;
    ++failed;
    ADD_FAILURE() << combination.text() << "\n  " << wrong;
  }
  EXPECT_EQ(failed, 0U) << "of " << cases.size() << " cases";
}

/// fp16 with a scale that has to fall before the first step is taken.
TEST(Parity, OfFp16WithDynamicLossScale) {
  for (const int ranks : {1, 2, 3}) {
    for (const unsigned zero : {0U, 2U, 3U}) {
      for (const Kind kind : {Kind::Gpt, Kind::Moe}) {
        for (const bool clip : {false, true}) {
          ParityCase parity;
          parity.options = {.kind = kind, .dtype = Dtype::F16};
          parity.training.steps = 6;
          parity.training.ranks = ranks;
          parity.training.micro_batches = 2;
          parity.training.loss_scale = LossScale{.initial = 0x1p24, .growth_window = 2};
          if (clip) parity.training.clip = 0.1;
          set_small_pieces(parity.config);
          parity.config.device = clip ? "emulated" : "cpu";
          parity.config.zero = zero;
          parity.config.parameters = pagoda::Placement::Host;
          set_tight_budget(parity.config, parity.options);
          EXPECT_EQ(check_parity(parity), "")
              << name(kind) << ", ranks " << ranks << ", zero " << zero << ", clip " << clip;
        }
      }
    }
  }
}

}  // namespace
}  // namespace zoo
