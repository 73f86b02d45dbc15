// SPDX-License-Identifier: Apache-2.0
// The engine with CUDA tensors: the same bits as a plain loop on the GPU.
#include <filesystem>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "pagoda/device/cuda/cuda_device.h"
#include "torch/paged_loop.h"
#include "torch/trainee.h"

namespace {

struct CudaCase {
  std::string name;
  zoo::Kind kind = zoo::Kind::Gpt;
  zoo::Dtype dtype = zoo::Dtype::F32;
  std::string place = "host";
  zoo::Checkpointing checkpointing = zoo::Checkpointing::None;
  int micro_batches = 1;
  bool clip = false;
  bool check_order = false;
  std::string master = "whole";
};

void PrintTo(const CudaCase& c, std::ostream* out) {
  *out << c.name;
}

class CudaEngine : public testing::TestWithParam<CudaCase> {};

TEST_P(CudaEngine, EqualsThePlainLoop) {
  std::string why;
  if (!pagoda::device::cuda::available(&why)) GTEST_SKIP() << why;
  zoo::use_cuda();
  zoo::use_one_torch_thread();
  const CudaCase& c = GetParam();
  zoo::Options options;
  options.kind = c.kind;
  options.dtype = c.dtype;
  options.checkpointing = c.checkpointing;
  options.device = "cuda";
  zoo::Training training;
  training.steps = 4;
  training.micro_batches = c.micro_batches;
  if (c.clip) training.clip = 0.5;
  const zoo::ModelBytes size = zoo::model_bytes(options);
  pagoda::Config config;
  config.device = "cuda";
  config.gradient_staging = 2 * size.largest + (16 << 10);
  config.device_budget = config.gradient_staging + size.all / 3 + 2 * size.largest;
  if (c.place == "device") config.device_budget = 16 * size.all;
  config.host_budget = pagoda::Bytes{4} << 30;
  if (c.place == "nvme") {
    config.nvme = {std::filesystem::temp_directory_path()};
    config.nvme_budget = pagoda::Bytes{256} << 20;
  }
  for (const char* key : {"parameters", "gradients", "optimizer_state"}) config.set(key, c.place);
  config.set("master", c.master);
  config.check_order = c.check_order;
  config.staging = 64 << 10;
  config.update_chunk = 32 << 10;
  const zoo::Trained plain = zoo::plain_loop(options, training);
  // What the GPU itself does not repeat, no engine can.
  if (!(zoo::plain_loop(options, training).losses == plain.losses)) {
    GTEST_SKIP() << "the plain loop does not repeat its own bits here";
  }
  const zoo::PagedTrained paged = zoo::paged_loop(options, training, config);
  EXPECT_TRUE(plain.losses == paged.losses) << "losses differ";
  ASSERT_EQ(plain.parameters.size(), paged.parameters.size());
  for (std::size_t i = 0; i < plain.parameters.size(); ++i) {
    EXPECT_TRUE(plain.parameters[i] == paged.parameters[i]) << plain.parameters[i].name;
  }
  if (c.place != "device") {
    EXPECT_GT(paged.stats.pager.evictions, 0U) << paged.stats.table();
  }
}

// No saved_hooks: the zoo puts an autograd engine of its own in place, which knows the CPU only.
std::vector<CudaCase> cuda_cases() {
  using zoo::Checkpointing;
  using zoo::Dtype;
  using zoo::Kind;
  return {
      {.name = "gpt_fp32_host"},
      {.name = "gpt_bf16_host", .dtype = Dtype::BF16},
      {.name = "gpt_bf16_host_split", .dtype = Dtype::BF16, .master = "split"},
      {.name = "gpt_fp32_nvme", .place = "nvme"},
      {.name = "gpt_bf16_device", .dtype = Dtype::BF16, .place = "device"},
      {.name = "gpt_fp32_host_clip", .clip = true},
      {.name = "gpt_bf16_host_accumulate", .dtype = Dtype::BF16, .micro_batches = 3},
      {.name = "gpt_fp32_reentrant", .checkpointing = Checkpointing::Reentrant},
      {.name = "gpt_fp32_checked", .check_order = true},
      {.name = "tied_bf16_nvme", .kind = Kind::TiedGpt, .dtype = Dtype::BF16, .place = "nvme"},
      {.name = "moe_fp32_host", .kind = Kind::Moe},
      {.name = "conv_fp32_host", .kind = Kind::Conv},
      {.name = "lstm_fp32_host", .kind = Kind::Lstm},
      {.name = "loop_bf16_host", .kind = Kind::Loop, .dtype = Dtype::BF16},
      {.name = "views_fp32_host", .kind = Kind::Views},
      {.name = "transposed_fp32_nvme", .kind = Kind::Transposed, .place = "nvme"},
      {.name = "mixed_fp32_host", .kind = Kind::Mixed},
  };
}

INSTANTIATE_TEST_SUITE_P(Cases, CudaEngine, testing::ValuesIn(cuda_cases()),
                         [](const auto& info) { return info.param.name; });

TEST(CudaLimit, HoldsForWhatTorchTakesBesideThePages) {
  std::string why;
  if (!pagoda::device::cuda::available(&why)) GTEST_SKIP() << why;
  zoo::use_cuda();
  pagoda::Config config;
  config.device = "cuda";
  config.device_budget = 64 << 20;
  config.device_limit = pagoda::Bytes{1} << 30;
  config.host_budget = 256 << 20;
  {
    const zoo::Trainee empty({}, {}, config, nullptr, zoo::Trainee::Start::Empty);
    EXPECT_TRUE(zoo::torch_can_take(512 << 20, "cuda"));
    EXPECT_FALSE(zoo::torch_can_take(1100 << 20, "cuda"));
  }
  EXPECT_TRUE(zoo::torch_can_take(1100 << 20, "cuda"));  // the engine has gone, and its limit
}

}  // namespace
