// SPDX-License-Identifier: Apache-2.0
#include "torch/covering.h"

#include <set>
#include <tuple>

#include <gtest/gtest.h>

#include "pagoda/base/error.h"

namespace covering {
namespace {

using Pairs = std::set<std::tuple<std::size_t, std::size_t, std::size_t, std::size_t>>;

void add_pairs(const Combination& of, std::size_t dimensions, Pairs& to) {
  for (std::size_t a = 0; a < dimensions; ++a) {
    for (std::size_t b = a + 1; b < dimensions; ++b) to.insert({a, of.index(a), b, of.index(b)});
  }
}

/// Every allowed whole combination, by counting through all of them.
std::vector<Combination> everything(const std::vector<Dimension>& dimensions,
                                    const Allowed& allowed) {
  std::vector<Combination> out;
  std::vector<std::size_t> digits(dimensions.size(), 0);
  for (;;) {
    Combination combination(dimensions);
    for (std::size_t i = 0; i < digits.size(); ++i) combination.set(i, digits[i]);
    if (!allowed || allowed(combination)) out.push_back(combination);
    std::size_t i = 0;
    while (i < digits.size() && ++digits[i] == dimensions[i].values.size()) digits[i++] = 0;
    if (i == digits.size()) return out;
  }
}

void expect_covered(const std::vector<Dimension>& dimensions, const Allowed& allowed,
                    std::size_t at_most) {
  const std::vector<Combination> all = everything(dimensions, allowed);
  const std::vector<Combination> few = pairwise(dimensions, allowed);
  Pairs wanted, found;
  for (const Combination& c : all) add_pairs(c, dimensions.size(), wanted);
  for (const Combination& c : few) {
    for (std::size_t i = 0; i < dimensions.size(); ++i) {
      ASSERT_LT(c.index(i), dimensions[i].values.size()) << c.text();
    }
    EXPECT_TRUE(!allowed || allowed(c)) << c.text();
    add_pairs(c, dimensions.size(), found);
  }
  EXPECT_EQ(found, wanted);
  EXPECT_LE(few.size(), at_most) << "of " << all.size();
}

const std::vector<Dimension> kSpace{{"kind", {"gpt", "moe", "conv", "lstm", "loop"}},
                                    {"dtype", {"fp32", "bf16", "fp16"}},
                                    {"ranks", {"1", "2", "3"}},
                                    {"tier", {"device", "host", "nvme"}},
                                    {"clip", {"off", "on"}},
                                    {"checkpointing", {"none", "reentrant"}}};

TEST(Covering, EveryPairAppears) {
  expect_covered(kSpace, {}, 22);
}

TEST(Covering, EveryAllowedPairAppearsAndNoOther) {
  expect_covered(
      kSpace,
      [](const Combination& c) {
        if (c.is("checkpointing", "reentrant") && !c["kind"].empty() && !c.is("kind", "gpt") &&
            !c.is("kind", "loop")) {
          return false;
        }
        return !(c.is("dtype", "fp16") && c.is("clip", "off"));
      },
      24);
}

TEST(Covering, APairThatNoCaseCanHaveIsLeftOut) {
  // fp16 with ranks=2 breaks no rule by itself, yet each value of clip breaks one.
  expect_covered(
      kSpace,
      [](const Combination& c) {
        if (c.is("dtype", "fp16") && c.is("clip", "off")) return false;
        return !(c.is("ranks", "2") && c.is("clip", "on"));
      },
      24);
}

TEST(Covering, NothingAllowedGivesNothing) {
  EXPECT_TRUE(pairwise(kSpace, [](const Combination&) { return false; }).empty());
}

TEST(Covering, TheSameArgumentsGiveTheSameList) {
  const auto a = pairwise(kSpace), b = pairwise(kSpace);
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_EQ(a[i].text(), b[i].text());
}

TEST(Covering, ATypingErrorInAConstraintIsFound) {
  const Combination empty(kSpace);
  EXPECT_THROW(static_cast<void>(empty.is("kid", "gpt")), pagoda::EngineError);
  EXPECT_THROW(static_cast<void>(empty.is("kind", "gtp")), pagoda::EngineError);
  EXPECT_FALSE(empty.is("kind", "gpt"));
}

}  // namespace
}  // namespace covering
