// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "torch/paged_loop.h"
namespace {
TEST(Smoke, Gpt) {
  for (const char* place : {"auto", "host", "nvme"}) {
    for (int ranks : {1, 2, 3})
      for (int zero : {3, 2, 0}) {
        SCOPED_TRACE(std::string(place) + " ranks " + std::to_string(ranks) + " zero " +
                     std::to_string(zero));
        zoo::Options options{.kind = zoo::Kind::Gpt};
        zoo::Training training;
        training.ranks = ranks;
        const auto size = zoo::model_bytes(options);
        pagoda::Config config;
        config.device = "cpu";
        config.zero = static_cast<unsigned>(zero);
        config.gradient_staging = size.largest * 2;
        config.device_budget =
            (std::string(place) == "auto" ? 4 * size.all : size.all / 3 + size.largest * 2) +
            config.gradient_staging;
        config.host_budget = pagoda::Bytes{512} << 20;
        config.nvme = {"/tmp"};
        config.nvme_budget = pagoda::Bytes{64} << 20;
        for (const char* key : {"parameters", "gradients", "optimizer"}) config.set(key, place);
        config.update_chunk = 32 << 10;
        config.staging = 64 << 10;
        zoo::use_one_torch_thread();
        const auto plain = zoo::plain_loop(options, training);
        const auto paged = zoo::paged_loop(options, training, config);
        EXPECT_TRUE(plain.losses == paged.losses);
        EXPECT_TRUE(plain.parameters == paged.parameters);
        printf("%s ranks %d zero %d model %lu largest %lu\n", place, ranks, zero, size.all,
               size.largest);
        fflush(stdout);
      }
  }
}
}  // namespace
