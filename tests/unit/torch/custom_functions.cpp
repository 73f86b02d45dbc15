// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/custom_functions.h"

#include <algorithm>
#include <functional>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace pagoda::torch {
namespace {

using testing::UnorderedElementsAre;

struct AnyPage : pager::Page {
  AnyPage() : Page(0, nullptr, 1, 4) {}
};

TEST(CustomFunctions, KnowWhatTheirForwardUsed) {
  CustomFunctions& functions = CustomFunctions::instance();
  const AnyPage before, first, second, inner;
  CustomFunctions::uses(before);  // in no function
  CustomFunctions::begins({1, 10});
  CustomFunctions::uses(first);
  CustomFunctions::begins({1, 11});
  CustomFunctions::uses(inner);
  CustomFunctions::uses(inner);
  functions.ends();
  CustomFunctions::uses(second);
  CustomFunctions::uses(first);
  EXPECT_EQ(functions.used_by({1, 10}), nullptr) << "it has not ended";
  functions.ends();
  EXPECT_THAT(*functions.used_by({1, 11}), UnorderedElementsAre(&inner));
  EXPECT_THAT(*functions.used_by({1, 10}), UnorderedElementsAre(&first, &second, &inner));
  EXPECT_TRUE(std::is_sorted(functions.used_by({1, 10})->begin(), functions.used_by({1, 10})->end(),
                             std::less<>()));
  EXPECT_EQ(functions.used_by({2, 10}), nullptr);
  EXPECT_EQ(functions.used_by({1, 12}), nullptr);
}

TEST(CustomFunctions, ForgetTheOldest) {
  CustomFunctions& functions = CustomFunctions::instance();
  for (std::int64_t i = 0; i <= 1 << 16; ++i) {
    CustomFunctions::begins({3, i});
    functions.ends();
  }
  EXPECT_EQ(functions.used_by({3, 0}), nullptr);
  EXPECT_NE(functions.used_by({3, 1}), nullptr);
  EXPECT_NE(functions.used_by({3, 1 << 16}), nullptr);
}

TEST(CustomFunctions, OfSeveralThreadsDoNotMix) {
  CustomFunctions& functions = CustomFunctions::instance();
  const AnyPage pages[2];
  {
    std::vector<std::jthread> threads;
    for (std::uint64_t t = 0; t < 2; ++t) {
      threads.emplace_back([&, t] {
        for (std::int64_t i = 0; i < 500; ++i) {
          CustomFunctions::begins({100 + t, i});
          CustomFunctions::uses(pages[t]);
          functions.ends();
          EXPECT_THAT(*functions.used_by({100 + t, i}), UnorderedElementsAre(&pages[t]));
        }
      });
    }
  }
}

}  // namespace
}  // namespace pagoda::torch
