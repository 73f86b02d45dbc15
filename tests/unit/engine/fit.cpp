// SPDX-License-Identifier: Apache-2.0
// Whether a model's states fit is said before anything moves, and not too strictly.
#include <filesystem>
#include <optional>
#include <regex>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include "pagoda/base/error.h"
#include "pagoda/comm/solo_world.h"
#include "pagoda/engine/backend.h"
#include "pagoda/engine/host_buffers.h"
#include "pagoda/engine/runtime.h"
#include "unit/io/scratch_directory.h"

namespace pagoda::engine {
namespace {

constexpr std::uint64_t kFitElements = 256 << 10;
constexpr Bytes kFitParameter = kFitElements * sizeof(float);

/// Attaches one page of 1 MiB whose states, 4 MiB with AdamW, all go to one place. Returns what the
/// host holds to undo updates.
Bytes attach_on(Placement states, pager::Placement page_now, Config config) {
  config.device = "cpu";
  config.device_budget = 4 * kFitParameter;
  config.gradient_staging = kFitParameter;
  config.parameters = config.gradients = config.optimizer_state = states;
  Runtime runtime(config, comm::make_solo_world());
  const std::vector<std::byte> zeros(kFitParameter);
  pager::Page& page = runtime.pager().adopt("w", kFitElements, sizeof(float), page_now,
                                            zeros.data(), device::Direction::HostToHost);
  runtime.attach(
      {&page},
      {{&page, kernels::Dtype::F32, {{{0, kFitElements}, 0, 0}}, {{0, 0, 0, false, false}}}},
      {AdamW{}});
  return runtime.stats().held(pager::Tier::Host, pager::tag::kEarly);
}

void attach_on_disk(Bytes nvme_budget) {
  const io::ScratchDirectory scratch;
  Config config;
  config.nvme = {scratch.path().string()};
  config.nvme_budget = nvme_budget;
  attach_on(Placement::Nvme, pager::Placement::Nvme, config);
}

TEST(Fit, WhatLiesOnDiskAlreadyIsNotCountedTwice) {
  EXPECT_NO_THROW(attach_on_disk(4 * kFitParameter + 1_MiB - 64_KiB));
}

TEST(Fit, TooLittleDiskIsRefusedWithSizes) {
  try {
    attach_on_disk(3 * kFitParameter);
    ADD_FAILURE() << "4 MiB were put into 3 MiB";
  } catch (const UserError& error) {
    EXPECT_THAT(error.message(), testing::HasSubstr("raise nvme_budget to at least 4 MiB"));
  }
}

Bytes default_swap(const std::vector<std::string>& directories, int ranks) {
  Config config;
  config.device = "cpu";
  config.device_budget = 1_MiB;
  config.nvme = directories;
  return tiers_options(config, make_device(config), ranks).swap.capacity;
}

TEST(Fit, AFileSystemIsSharedByItsDirectoriesAndRanks) {
  const io::ScratchDirectory scratch;
  const std::string a = scratch.path().string();
  const std::string b = (scratch.path() / "..").string();
  const auto one = static_cast<double>(default_swap({a}, 1));
  // Others write to this disk, too.
  EXPECT_NEAR(static_cast<double>(default_swap({a, b}, 1)), one, 0.2 * one);
  EXPECT_NEAR(static_cast<double>(default_swap({a}, 4)), one / 4, 0.2 * one / 4);
  // Files are of one size: the smaller file system decides.
  const Bytes small = std::filesystem::space("/dev/shm").available;
  if (small < std::filesystem::space(a).available / 4) {
    EXPECT_LE(default_swap({a, "/dev/shm"}, 1), small);
  }
}

TEST(Fit, ByDefaultNoFileIsLargerThanThisProcessMayMake) {
  const io::ScratchDirectory scratch;
  struct rlimit before {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const struct rlimit lower { 1_MiB, before.rlim_max };
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &lower), 0);
  const Bytes capacity = default_swap({scratch.path().string()}, 1);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_EQ(capacity, 1_MiB);
}

TEST(Fit, GradientsOnTheDeviceTakeTheRoomOfPagesThatAreThereByChance) {
  Config config;
  config.device = "cpu";
  config.device_budget = 3 * kFitParameter;
  config.gradient_staging = kFitParameter;
  config.parameters = config.optimizer_state = Placement::Host;
  config.gradients = Placement::Device;
  const auto train = [](const Config& with) {
    Runtime runtime(with, comm::make_solo_world());
    const std::vector<std::byte> zeros(kFitParameter);
    const auto adopt = [&](const char* name) {
      return &runtime.pager().adopt(name, kFitElements, sizeof(float), pager::Placement::Host,
                                    zeros.data(), device::Direction::HostToHost);
    };
    pager::Page* const trained = adopt("trained");
    pager::Page* const frozen = adopt("frozen");
    const auto use_both = [&] {  // one after the other: both are resident, if there is room
      for (pager::Page* page : {trained, frozen}) {
        const pager::Access access{page, false};
        runtime.pager().touch({&access, 1}, 0, nullptr).release();
      }
    };
    use_both();
    runtime.attach(
        {trained, frozen},
        {{trained, kernels::Dtype::F32, {{{0, kFitElements}, 0, 0}}, {{0, 0, 0, false, false}}}},
        {AdamW{}});
    use_both();
  };
  EXPECT_NO_THROW(train(config));
  config.device_budget -= 512;  // the page and its gradient do not fit beside each other
  try {
    train(config);
    ADD_FAILURE() << "2 MiB were put into less";
  } catch (const UserError& error) {
    EXPECT_THAT(error.message(), testing::HasSubstr("raise device_budget to at least 3 MiB"));
  }
}

TEST(Fit, WhatUndoesUpdatesTakesOnlyWhatIsLeft) {
  Config config;
  config.staging = 64_KiB;
  config.update_chunk = 64_KiB;
  config.fetch_threads = 1;
  config.clip = 1;
  config.host_budget = 6_MiB;  // for states of 4 MiB and some buffers
  const auto undo = [&] { return attach_on(Placement::Host, pager::Placement::Host, config); };
  EXPECT_EQ(undo(), 0U);
  config.clip_ahead = true;
  EXPECT_EQ(undo(), 0U);
  config.host_budget = 9_MiB;  // …and for moments and parameters once more
  EXPECT_EQ(undo(), 3_MiB);
  config.early_updates = false;
  EXPECT_EQ(undo(), 0U);
}

/// Attaches linear layers of these dimensions. Returns the host_budget that a refusal asks for,
/// nothing where there is none.
std::optional<std::string> advised_host_budget(const Config& config) {
  constexpr std::uint64_t kDimensions[] = {200, 512, 300, 512, 200, 300};
  try {
    Runtime runtime(config, comm::make_solo_world());
    ModelSpec model;
    const auto adopt = [&](const std::string& name, std::uint64_t elements) {
      const std::vector<std::byte> zeros(elements * sizeof(float));
      pager::Page& page =
          runtime.pager().adopt(name, elements, sizeof(float), pager::Placement::Auto, zeros.data(),
                                device::Direction::HostToHost);
      model.pages.push_back(&page);
      model.trained.push_back(
          {&page, kernels::Dtype::F32, {{{0, elements}, 0, 0}}, {{0, 0, 0, false, false}}});
    };
    for (std::size_t i = 0; i + 1 < std::size(kDimensions); ++i) {
      adopt(fmt::format("{}.weight", i), kDimensions[i] * kDimensions[i + 1]);
      adopt(fmt::format("{}.bias", i), kDimensions[i + 1]);
    }
    runtime.attach(model.pages, std::move(model.trained), {AdamW{}});
    return std::nullopt;
  } catch (const UserError& error) {
    static const std::regex advice("host_budget to at least ([0-9.]+ [KMG]?i?B)");
    std::string last;
    const std::string& said = error.message();
    for (std::sregex_iterator it(said.begin(), said.end(), advice), end; it != end; ++it) {
      last = it->str(1);
    }
    EXPECT_FALSE(last.empty()) << said;
    return last;
  }
}

TEST(Fit, TheHostBudgetThatIsAdvisedIsTheSmallestThatFits) {
  const io::ScratchDirectory scratch;
  Config config;
  config.device = "cpu";
  config.device_budget = 1_MiB + 384_KiB;
  config.gradient_staging = 772_KiB;
  config.moments = MomentType::Bf16;
  config.nvme = {scratch.path().string()};
  int refused = 0;
  for (const Bytes nvme : {3_MiB, 5_MiB, 6_MiB + 133_KiB}) {
    for (const Bytes chunk : {Bytes{0}, 4_KiB, 32_KiB, 64_KiB}) {  // 0: derived, as staging then
      for (const unsigned buffers : {2U, 8U, 20U, 100U}) {
        for (const Bytes more : {4_KiB, 20_KiB, 200_KiB}) {
          config.nvme_budget = nvme;
          config.update_chunk = chunk;
          config.staging = chunk == 0 ? 0 : 64_KiB;
          config.update_buffers = buffers;
          config.host_budget = 0;
          const HostBuffers own(config, device::DeviceKind::Host, 1);
          // `more`: checksums of pages that come first.
          const Bytes least = own.least_budget(own.least(), more);
          config.host_budget = least;
          const auto advice = advised_host_budget(config);
          if (!advice) continue;
          SCOPED_TRACE(fmt::format("{} of NVMe, {} update buffers for {}, host_budget = {}: {}",
                                   format_bytes(nvme), buffers, format_bytes(chunk), least,
                                   *advice));
          ++refused;
          config.host_budget = parse_bytes(*advice);
          EXPECT_EQ(advised_host_budget(config), std::nullopt);
          while (format_bytes_up(config.host_budget) == *advice) --config.host_budget;
          if (config.host_budget > least && chunk != 0) {
            EXPECT_EQ(advised_host_budget(config), *advice);
          }
        }
      }
    }
  }
  EXPECT_GT(refused, 48);
}

TEST(HostBuffersOf, TakeAShareOfWhatThereIs) {
  const io::ScratchDirectory scratch;
  Config config;
  config.device = "cpu";
  config.nvme = {scratch.path().string()};
  const HostBuffers buffers(config, device::DeviceKind::Host, 1);
  EXPECT_EQ(buffers.staging(kNoLimit), 4_MiB);
  EXPECT_EQ(buffers.update_elements(kNoLimit), 1_MiB);
  EXPECT_EQ(buffers.update_buffers(kNoLimit), 8U);
  // 8 MiB of it are the swap files'.
  EXPECT_LE(buffers.bytes(64_MiB), 8_MiB + 2 * 64_MiB / 8);
  const Bytes least = buffers.least();
  EXPECT_LE(least, 12_MiB);
  config.host_budget = least;
  EXPECT_NO_THROW(check_host_budget(config, device::DeviceKind::Host, 1));
  config.host_budget = least * 98 / 100;  // messages have two decimals
  EXPECT_THROW(check_host_budget(config, device::DeviceKind::Host, 1), UserError);
  config.staging = 16_MiB;  // what is given is taken
  EXPECT_EQ(HostBuffers(config, device::DeviceKind::Host, 1).staging(64_MiB), 16_MiB);
}

}  // namespace
}  // namespace pagoda::engine
