// SPDX-License-Identifier: Apache-2.0
#include "pagoda/base/memory_limit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include "pagoda/base/out_of_memory.h"
#include "pagoda/base/page_mapping.h"

namespace pagoda {
namespace {

using testing::AllOf;
using testing::HasSubstr;

/// A soft limit with so much room above what the process has, for as long as this lives.
/// (Sanitizers map terabytes.)
class Limited {
 public:
  Limited(__rlimit_resource resource, Bytes room) : resource_(resource) {
    EXPECT_EQ(::getrlimit(resource_, &before_), 0);
    set(RLIM_INFINITY - 1);
    const auto limit = tightest_memory_limit();
    EXPECT_TRUE(limit.has_value());
    set(limit.value_or(MemoryLimit{}).used + room);
  }
  ~Limited() { ::setrlimit(resource_, &before_); }
  Limited(const Limited&) = delete;
  Limited& operator=(const Limited&) = delete;

  /// "RLIMIT_AS (ulimit -v) allows this process …".
  std::string words(const char* name) const {
    return fmt::format("{} allows this process {}, of which ", name, format_bytes(allowed_));
  }

 private:
  void set(Bytes allowed) {
    struct rlimit now = before_;
    now.rlim_cur = allowed_ = allowed;
    EXPECT_EQ(::setrlimit(resource_, &now), 0);
  }

  __rlimit_resource resource_;
  Bytes allowed_ = 0;
  struct rlimit before_ {};
};

TEST(MemoryLimit, TheOneThatLeavesLeastIsNamedWithWhatItAllows) {
  const Limited data(RLIMIT_DATA, 1024_GiB);
  const auto first = tightest_memory_limit();
  ASSERT_TRUE(first.has_value());
  EXPECT_THAT(first->describe(), HasSubstr(data.words("RLIMIT_DATA (ulimit -d)")));
  EXPECT_GT(first->used, 0U);
  EXPECT_EQ(first->left(), first->allowed - first->used);
  EXPECT_EQ((MemoryLimit{"", 1, 2}).left(), 0U);
}

TEST(MemoryLimit, WhatItRefusesNamesIt) {
  const Limited addresses(RLIMIT_AS, 512_GiB);
  EXPECT_EQ(refused_memory(1_MiB), "out of host memory");
  try {
    const PageMapping mapping(1024_GiB, PageMapping::kPage);
    FAIL() << "it was mapped";
  } catch (const OutOfMemory& error) {
    EXPECT_THAT(error.message(), AllOf(HasSubstr(addresses.words("RLIMIT_AS (ulimit -v)")),
                                       HasSubstr("1 TiB more are needed; raise the limit")));
  }
}

}  // namespace
}  // namespace pagoda
