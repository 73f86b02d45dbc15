// SPDX-License-Identifier: Apache-2.0
#include "pagoda/engine/initial_values.h"

#include <cstring>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pagoda/base/log.h"
#include "pagoda/comm/solo_world.h"
#include "unit/engine/rehearsal.h"
#include "unit/engine/small_rank.h"
#include "unit/io/scratch_directory.h"

namespace pagoda::engine {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using Bits = SmallRank::Bits;

/// What the engines write to the log while it lives.
class Lines {
 public:
  Lines() { log::set_level(log::Level::Info); }
  Lines(const Lines&) = delete;
  Lines& operator=(const Lines&) = delete;
  ~Lines() { log::set_level(before_); }

  std::vector<std::string> with(const std::string& text) {
    const std::lock_guard lock(mutex_);
    std::vector<std::string> out;
    std::copy_if(lines_.begin(), lines_.end(), std::back_inserter(out),
                 [&](const auto& line) { return line.find(text) != std::string::npos; });
    return out;
  }

 private:
  const log::Level before_ = log::level();
  std::mutex mutex_;
  std::vector<std::string> lines_;
  log::Capture capture_{[this](log::Level, const std::string& line) {
    const std::lock_guard lock(mutex_);
    lines_.push_back(line);
  }};
};

struct Case {
  std::string name;
  unsigned zero;
  Placement parameters;
  kernels::Dtype dtype;
};

class InitialValuesOf : public testing::TestWithParam<Case> {
 protected:
  SmallRank::Options options(int rank) const {
    SmallRank::Options out;
    out.config = tiny();
    out.config.zero = GetParam().zero;
    out.config.parameters = GetParam().parameters;
    if (GetParam().parameters == Placement::Nvme) {
      out.config.nvme = {directory_.path().string()};
      out.config.nvme_budget = 16_MiB;
    }
    if (GetParam().parameters == Placement::Device) out.config.device_budget = 1_MiB;
    out.config.gradients = out.config.optimizer_state = Placement::Host;
    out.config.staging = rank == 1 ? 16_KiB : 32_KiB;  // ranks may differ in it
    out.dtype = GetParam().dtype;
    out.frozen = {1};
    out.seed = rank;
    return out;
  }

  const io::ScratchDirectory directory_;
};

TEST_P(InitialValuesOf, AllRanksAreThoseOfTheFirst) {
  Lines lines;
  const std::vector<Bits> first = SmallRank(options(0), comm::make_solo_world()).initial();
  const auto ended = run_ranks(3, [&](auto world) {
    SmallRank rank(options(world->rank()), world);
    if (world->rank() == 1) (void)rank.values();  // resident copies are of no use any more
    EXPECT_EQ(rank.attach(), world->rank() == 0 ? 0U : 4U);
    EXPECT_EQ(rank.values(), first) << "on rank " << world->rank();
    rank.backward(0);
    rank.step();
    const std::vector<Bits> trained = rank.values();
    EXPECT_EQ(trained[1], first[1]) << "a frozen page";
    EXPECT_NE(trained[2], first[2]);
    EXPECT_EQ(rank.release(), trained);
  });
  EXPECT_THAT(ended, Each(std::string()));
  EXPECT_THAT(lines.with("broadcast rank 0's values"),
              testing::ElementsAre(
                  AllOf(HasSubstr("in 4 of 4 parameters on rank 1"), HasSubstr("'page 0' first"))));
}

TEST_P(InitialValuesOf, OnlyWhatDiffersIsSent) {
  Lines lines;
  const auto ended = run_ranks(2, [&](auto world) {
    SmallRank::Options mine = options(0);
    if (world->rank() == 1) mine.blank = {2};
    SmallRank rank(mine, world);
    EXPECT_EQ(rank.attach(), world->rank() == 0 ? 0U : 1U);
    mine.blank = {};
    EXPECT_EQ(rank.values(), SmallRank(mine, comm::make_solo_world()).initial());
  });
  EXPECT_THAT(ended, Each(std::string()));
  EXPECT_THAT(lines.with("broadcast rank 0's values"),
              testing::ElementsAre(
                  AllOf(HasSubstr("in 1 of 4 parameters on rank 1"), HasSubstr("'page 2' first"))));
}

TEST_P(InitialValuesOf, EqualOnesAreLeftAlone) {
  Lines lines;
  const auto ended = run_ranks(2, [&](auto world) {
    SmallRank::Options mine = options(0);
    mine.blank = {0, 2};  // zeros, whatever is in the memory that they were given
    SmallRank rank(mine, world);
    EXPECT_EQ(rank.attach(), 0U);
    EXPECT_EQ(rank.values(), rank.initial());
  });
  EXPECT_THAT(ended, Each(std::string()));
  EXPECT_TRUE(lines.with("broadcast rank 0's values").empty());
}

TEST_P(InitialValuesOf, WhatWasWrittenBeforeCounts) {
  std::vector<std::vector<Bits>> seen(2);
  const auto ended = run_ranks(2, [&](auto world) {
    SmallRank rank(options(0), world);
    rank.write(2, rank.rank() + 1);
    if (world->rank() == 0) seen[0] = rank.values();
    EXPECT_EQ(rank.attach(), world->rank() == 0 ? 0U : 1U);
    if (world->rank() == 1) seen[1] = rank.values();
  });
  EXPECT_THAT(ended, Each(std::string()));
  EXPECT_EQ(seen[0], seen[1]);
}

TEST_P(InitialValuesOf, CanBeChecked) {
  const auto ended = run_ranks(3, [&](auto world) {
    SmallRank::Options mine = options(world->rank() == 2 ? 1 : 0);
    mine.config.initial = Initial::Check;
    SmallRank rank(mine, world);
    EXPECT_THAT(thrown_by([&] { rank.attach(); }),
                AllOf(HasSubstr("4 of 4 parameters on rank 2, 'page 0' first"),
                      HasSubstr("initial=\"broadcast\"")));
    EXPECT_EQ(rank.values(), rank.initial());  // each its own, and the engine lives
  });
  EXPECT_THAT(ended, Each(std::string()));
}

INSTANTIATE_TEST_SUITE_P(
    , InitialValuesOf,
    testing::Values(Case{"zero0_host", 0, Placement::Host, kernels::Dtype::F32},
                    Case{"zero1_nvme_bf16", 1, Placement::Nvme, kernels::Dtype::BF16},
                    Case{"zero2_device", 2, Placement::Device, kernels::Dtype::F32},
                    Case{"zero2_device_bf16", 2, Placement::Device, kernels::Dtype::BF16},
                    Case{"zero3_host", 3, Placement::Host, kernels::Dtype::F32},
                    Case{"zero3_host_bf16", 3, Placement::Host, kernels::Dtype::BF16},
                    Case{"zero3_nvme", 3, Placement::Nvme, kernels::Dtype::F32}),
    [](const auto& info) { return info.param.name; });

/// A buffer of a module.
struct Buffer {
  explicit Buffer(std::size_t bytes, int value) : bits(bytes, static_cast<std::byte>(value)) {}

  BufferSpec spec(std::string name) {
    return {std::move(name), bits.size(),
            [this](Bytes at, std::span<std::byte> to) {
              std::memcpy(to.data(), bits.data() + at, to.size());
              largest = std::max(largest, to.size());
            },
            [this](Bytes at, std::span<const std::byte> from) {
              std::memcpy(bits.data() + at, from.data(), from.size());
            }};
  }

  Bits bits;
  Bytes largest = 0;  // that was read at a time
};

TEST(InitialBuffers, AreThoseOfTheFirstRank) {
  Lines lines;
  const auto ended = run_ranks(3, [&](auto world) {
    Buffer same(100, 7);
    Buffer other(40'000, world->rank());
    SmallRank::Options mine;
    mine.config = tiny();
    mine.buffers = {same.spec("same"), other.spec("mean")};
    SmallRank rank(mine, world);
    EXPECT_EQ(rank.attach(), 0U);
    EXPECT_EQ(other.bits, Buffer(40'000, 0).bits);
    EXPECT_EQ(same.bits, Buffer(100, 7).bits);
    EXPECT_EQ(other.largest, mine.config.staging);
  });
  EXPECT_THAT(ended, Each(std::string()));
  EXPECT_THAT(lines.with("broadcast rank 0's values"),
              testing::ElementsAre(HasSubstr("0 of 4 parameters and 1 of 2 buffers on rank 1, "
                                             "'mean' first")));
}

TEST(InitialBuffers, OfOtherSizesAreLeftAlone) {
  Lines lines;
  const auto ended = run_ranks(2, [&](auto world) {
    Buffer cache(10 + static_cast<std::size_t>(world->rank()), world->rank());
    SmallRank::Options mine;
    mine.config = tiny();
    mine.buffers = {cache.spec("cache")};
    SmallRank rank(mine, world);
    rank.attach();
    EXPECT_EQ(cache.bits.front(), static_cast<std::byte>(world->rank()));
  });
  EXPECT_THAT(ended, Each(std::string()));
  EXPECT_THAT(lines.with("buffers are left"), testing::ElementsAre(HasSubstr("cache")));
}

TEST(InitialValues, APinnedPageThatWouldChangeIsAnErrorOnAllRanks) {
  const auto ended = run_ranks(2, [&](auto world) {
    SmallRank::Options mine;
    mine.config = tiny();
    mine.seed = world->rank();
    SmallRank rank(mine, world);
    std::optional<pager::Hold> hold;
    if (world->rank() == 1) hold.emplace(rank.runtime().pager().hold(rank.page(2), nullptr));
    EXPECT_THAT(thrown_by([&] { rank.attach(); }), HasSubstr("'page 2' is pinned"));
    hold.reset();
    EXPECT_EQ(rank.attach(), world->rank() == 0 ? 0U : 4U);  // the engine lives
  });
  EXPECT_THAT(ended, Each(std::string()));
}

}  // namespace
}  // namespace pagoda::engine
