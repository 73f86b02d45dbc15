// SPDX-License-Identifier: Apache-2.0
// Budgets are hard: states take the bytes that arithmetic says, and a plan that cannot fit fails at
// attach with words that help. That no peak exceeds a budget is part of every case of
// parity_test.cpp.
#include <cstdio>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pagoda/pager/tier.h"
#include "torch/parity_case.h"
#include "torch/process.h"
#include "torch/quirks.h"

namespace zoo {
namespace {

using pagoda::Bytes;
using pagoda::pager::Tier;
using testing::AllOf;
using testing::HasSubstr;
using namespace pagoda::literals;

struct StateBytes {
  Dtype dtype;
  bool fp32_gradients;
  bool split;
  Bytes parameter, gradient, optimizer;  // of each element
};

TEST(Budgets, StatesTakeTheBytesThatArithmeticSays) {
  const StateBytes cases[] = {
      {Dtype::BF16, false, false, 2, 2, 12},  // sixteen
      {Dtype::BF16, true, false, 2, 4, 12},   // eighteen
      {Dtype::BF16, false, true, 2, 2, 10},   // fourteen
      {Dtype::F32, false, false, 4, 4, 8},
  };
  for (const StateBytes& bytes : cases) {
    for (const auto& [ranks, zero] :
         {std::pair{1, 3U}, std::pair{2, 0U}, std::pair{2, 2U}, std::pair{2, 3U}}) {
      for (const bool nvme : {false, true}) {
        ParityCase parity;
        parity.options = {.kind = Kind::Gpt, .dtype = bytes.dtype};
        parity.training.steps = 1;
        parity.training.ranks = ranks;
        if (bytes.fp32_gradients) parity.training.accumulation = Dtype::F32;
        set_small_pieces(parity.config);
        set_tight_budget(parity.config, parity.options);
        parity.config.device = "cpu";
        parity.config.zero = zero;
        if (bytes.split) parity.config.master = pagoda::Master::Split;
        const auto place = nvme ? pagoda::Placement::Nvme : pagoda::Placement::Host;
        parity.config.parameters = parity.config.gradients = parity.config.optimizer_state = place;
        if (nvme) {
          parity.config.nvme = {scratch_directory()};
          parity.config.nvme_budget = 64_MiB;
        }
        const PagedTrained got = paged_loop(parity.options, parity.training, parity.config);
        const Tier tier = nvme ? Tier::Nvme : Tier::Host;
        // Shards are whole blocks, so rank 0 has up to a block a page more than its share.
        const Bytes elements =
            model_bytes(parity.options).all / pagoda::kernels::element_size(bytes.dtype);
        const Bytes more = got.parameters.size() * 4096;
        const auto expect = [&](std::string_view tag, Bytes each, bool sharded) {
          const Bytes share = sharded ? elements / static_cast<Bytes>(ranks) : elements;
          const Bytes most =
              (sharded && ranks > 1 ? std::min(elements, share + more) : elements) * each;
          const Bytes is = got.stats.held(tier, tag);
          // Arrays of a chunk are aligned to 64 bytes, and what is on NVMe to 4 KiB.
          const Bytes arrays = tag == "optimizer" ? got.parameters.size() * 3 * 64 * 8 : 0;
          const Bytes padding = arrays + (nvme ? got.parameters.size() * 4_KiB : 0);
          EXPECT_GE(is, share * each) << tag << ", ranks " << ranks << ", zero " << zero;
          EXPECT_LE(is, most + padding) << tag << ", ranks " << ranks << ", zero " << zero;
        };
        expect("parameters", bytes.parameter, zero == 3);
        expect("gradients", bytes.gradient, zero != 0);
        expect("optimizer", bytes.optimizer, zero != 0);
      }
    }
  }
}

pagoda::Config config() {
  pagoda::Config config;
  set_small_pieces(config);
  config.device = "cpu";
  config.device_budget = 400_KiB;
  config.gradient_staging = 100_KiB;
  config.parameters = pagoda::Placement::Host;
  return config;
}

// The model has two weights of 75 KiB and 39,292 elements in all.

TEST(Budgets, TooSmallADeviceIsSaidAtAttach) {
  pagoda::Config small = config();
  small.parameters = pagoda::Placement::Device;
  small.device_budget = 300_KiB - 60_KiB;
  EXPECT_THAT(refusal_of(small),
              AllOf(HasSubstr("parameters 152.72 KiB (device)"), HasSubstr("raise device_budget")));
}

TEST(Budgets, ADeviceSmallerThanAParameterIsSaid) {
  pagoda::Config small = config();
  small.device_budget = 160_KiB;
  EXPECT_THAT(refusal_of(small),
              AllOf(HasSubstr("75 KiB"), HasSubstr("60 KiB"), HasSubstr("raise device_budget")));
}

TEST(Budgets, TooSmallAHostIsSaidAtAttach) {
  pagoda::Config small = config();
  small.host_budget = 600_KiB;
  EXPECT_THAT(refusal_of(small),
              AllOf(HasSubstr("parameters 152.72 KiB"), HasSubstr("gradients 152.72 KiB"),
                    HasSubstr("optimizer 305.62 KiB"), HasSubstr("raise host_budget to"),
                    HasSubstr("or set nvme")));
}

TEST(Budgets, TooSmallADiskIsSaidAtAttach) {
  pagoda::Config small = config();
  small.gradients = small.optimizer_state = pagoda::Placement::Nvme;
  small.nvme = {scratch_directory()};
  small.nvme_budget = 256_KiB;
  EXPECT_THAT(refusal_of(small), AllOf(HasSubstr("optimizer 305.62 KiB"), HasSubstr("(nvme)"),
                                       HasSubstr("raise nvme_budget to")));
}

/// What the message advises is enough.
void expect_help(pagoda::Config small, const std::string& key) {
  const std::string said = refusal_of(small);
  const std::string before = fmt::format("raise {} to at least ", key);
  const std::size_t at = said.find(before);
  ASSERT_NE(at, std::string::npos) << said;
  const std::size_t begin = at + before.size();
  small.set(key, said.substr(begin, said.find("iB", begin) + 2 - begin));
  EXPECT_EQ(refusal_of(small), "nothing") << said;
}

TEST(Budgets, WhatIsAdvisedHelps) {
  pagoda::Config small = config();
  small.host_budget = 600_KiB;
  expect_help(small, "host_budget");
  small.host_budget = 0;
  small.gradients = small.optimizer_state = pagoda::Placement::Nvme;
  small.nvme = {scratch_directory()};
  small.nvme_budget = 256_KiB;
  expect_help(small, "nvme_budget");
}

/// What the budgets count is what the process has: more would be memory that nobody counts, less a
/// count of what nobody uses.
class ResidentMemory : public testing::TestWithParam<const char*> {};

TEST_P(ResidentMemory, OfAProcessIsWhatTheBudgetsSay) {
  Process worker({PAGODA_RESIDENT_WORKER, GetParam(), scratch_directory()}, {});
  const std::string line = worker.line_with("");
  unsigned long long resident = 0;
  unsigned long long counted = 0;
  ASSERT_EQ(std::sscanf(line.c_str(), "resident %llu counted %llu", &resident, &counted), 2)
      << line;
  EXPECT_EQ(worker.wait(), 0);
  EXPECT_NEAR(static_cast<double>(resident), static_cast<double>(counted),
              0.1 * static_cast<double>(counted))
      << "in MiB: " << (resident >> 20U) << " resident, " << (counted >> 20U) << " counted";
}

INSTANTIATE_TEST_SUITE_P(, ResidentMemory, testing::Values("host", "nvme"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace zoo
