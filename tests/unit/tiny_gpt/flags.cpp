// SPDX-License-Identifier: Apache-2.0
#include "flags.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "pagoda/base/error.h"

namespace tiny_gpt {
namespace {

using namespace pagoda::literals;

std::optional<Flags> parse(const std::vector<const char*>& words) {
  std::vector<const char*> arguments{"tiny_gpt"};
  arguments.insert(arguments.end(), words.begin(), words.end());
  return parse_flags(static_cast<int>(arguments.size()), arguments.data());
}

TEST(Flags, AreRead) {
  const auto flags =
      parse({"--steps", "7", "--batch", "2", "--device-budget", "16MiB", "--host-budget", "1GiB",
             "--seed", "5", "--sample", "0", "--text", "x"});
  ASSERT_TRUE(flags);
  EXPECT_EQ(flags->steps, 7);
  EXPECT_EQ(flags->batch, 2);
  EXPECT_EQ(flags->device_budget, 16_MiB);
  EXPECT_EQ(flags->host_budget, 1_GiB);
  EXPECT_EQ(flags->seed, 5U);
  EXPECT_EQ(flags->sample, 0);
  EXPECT_EQ(flags->text, "x");
  EXPECT_EQ(parse({})->device_budget, 10_MiB);
}

TEST(Flags, NonsenseIsOneClearLine) {
  const std::vector<std::vector<const char*>> wrong{{"--steps", "0"},
                                                    {"--steps", "many"},
                                                    {"--steps", "3", "--seconds", "3"},
                                                    {"--batch", "-1"},
                                                    {"--seconds", "0"},
                                                    {"--host-budget", "3XB"},
                                                    {"--device-budget", "0"},
                                                    {"--dir", "/nowhere/"},
                                                    {"--sequence"},
                                                    {"--bogus"},
                                                    {"word"}};
  for (const auto& words : wrong) {
    try {
      static_cast<void>(parse(words));
      ADD_FAILURE() << words.front() << " was taken";
    } catch (const pagoda::UserError& error) {
      EXPECT_EQ(error.message().find('\n'), std::string::npos) << error.message();
      EXPECT_FALSE(error.message().empty());
    }
  }
}

}  // namespace
}  // namespace tiny_gpt
