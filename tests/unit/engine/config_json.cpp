// SPDX-License-Identifier: Apache-2.0
#include <filesystem>
#include <fstream>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pagoda/base/error.h"
#include "pagoda/engine/config.h"

namespace pagoda {
namespace {

std::string json_error(std::string_view text) {
  try {
    static_cast<void>(Config::from_json(text));
  } catch (const UserError& error) {
    return error.what();
  }
  return "no error";
}

TEST(ConfigJson, NothingIsTheDefault) {
  EXPECT_EQ(Config::from_json("{}"), Config{});
  EXPECT_EQ(Config::from_json(R"({"clip": null, "device_limit": null, "nvme": null})"), Config{});
}

TEST(ConfigJson, ReadsNumbersTextsListsAndTruth) {
  const Config config = Config::from_json(R"({
    "device_budget": "1.5GiB", "host_budget": 68719476736, "device_limit": 2147483648,
    "nvme": ["/a", "/b,c"], "parameters": "host", "zero": 1, "clip": 1, "timeout": 2.5,
    "loss_scale": 128, "checksums": false})");
  EXPECT_EQ(config.device_budget, 1536_MiB);
  EXPECT_EQ(config.host_budget, 64_GiB);
  EXPECT_EQ(config.device_limit, 2_GiB);
  EXPECT_EQ(config.nvme, (std::vector<std::string>{"/a", "/b,c"}));
  EXPECT_EQ(config.parameters, Placement::Host);
  EXPECT_EQ(config.zero, 1U);
  EXPECT_EQ(config.clip, 1.0);
  EXPECT_EQ(config.timeout, 2.5);
  EXPECT_EQ(config.loss_scale, (LossScale{LossScale::Kind::Fixed, 128}));
  EXPECT_FALSE(config.checksums);
  EXPECT_EQ(Config::from_json(R"({"loss_scale": "dynamic", "nvme": "/a"})").nvme.size(), 1U);
}

TEST(ConfigJson, EveryValueSurvivesTheWayThereAndBack) {
  EXPECT_EQ(Config::from_json(Config{}.to_json()), Config{});
  Config config;
  config.device = "cuda:3";
  config.device_budget = 1'000'000'007;
  config.device_limit = 3_GiB + 1;
  config.host_budget = (Bytes{1} << 60U) - 1;
  config.nvme_budget = 5_GiB;
  config.nvme = {"/a \"quoted\"", "/b,c", "/ünïcode\\"};
  config.parameters = Placement::Nvme;
  config.gradients = Placement::Host;
  config.optimizer_state = Placement::Device;
  config.zero = 0;
  config.initial = Initial::Check;
  config.accumulation = 17;
  config.gradient_dtype = GradientType::Fp32;
  config.reduction = Reduction::Sum;
  config.clip = 0.1;
  config.loss_scale = {LossScale::Kind::Fixed, 1.0 / 3};
  config.loss_scale_initial = 1e30;
  config.loss_scale_minimum = 1e-30;
  config.loss_scale_window = 1;
  config.master = Master::Split;
  config.moments = MomentType::Bf16;
  config.seed = ~std::uint64_t{0};
  config.early_updates = false;
  config.clip_ahead = true;
  config.checksums = false;
  config.io_engine = io::EngineChoice::Uring;
  config.direct = io::Direct::On;
  config.prefetch = false;
  config.gradient_staging = 77;
  config.activation_reserve = 78;
  config.fetch_threads = 9;
  config.update_threads = 12;
  config.update_chunk = 12345;
  config.update_buffers = 3;
  config.staging = 16_KiB + 1;
  config.lookup_in_place = 79;
  config.bucket = 4097;
  config.timeout = 1.0 / 7;
  config.join_timeout = 2.0 / 7;
  config.heartbeat = 1e-9;
  config.check_order = true;
  config.trace = "/tmp/trace.json";
  config.trace_steps = "7";
  EXPECT_EQ(Config::from_json(config.to_json()), config) << config.to_json();
  for (const ConfigKey& key : Config::keys()) {
    EXPECT_NE(config.get(key.name), key.initial) << "this test leaves it out";
  }
}

TEST(ConfigJson, ErrorsSayWhatIsWrong) {
  using testing::HasSubstr;
  EXPECT_THAT(json_error("{"), HasSubstr("not JSON"));
  EXPECT_THAT(json_error("[1]"), HasSubstr("not a JSON object"));
  EXPECT_THAT(json_error(R"({"zerro": 1})"), HasSubstr("did you mean 'zero'?"));
  EXPECT_THAT(json_error(R"({"zero": "1"})"),
              HasSubstr("zero = '1' is not allowed: it is a string; expected an integer from 0"));
  EXPECT_THAT(json_error(R"({"zero": 1.5})"),
              HasSubstr("zero = 1.5 is not allowed: expected an integer from 0 to 3"));
  EXPECT_THAT(json_error(R"({"zero": 1, "zero": 2})"), HasSubstr("'zero' appears twice"));
  EXPECT_THAT(json_error(R"({"checksums": 1})"),
              HasSubstr("checksums = 1 is not allowed: expected true or false"));
  EXPECT_THAT(json_error(R"({"device": 0})"),
              HasSubstr("device = 0 is not allowed: expected auto,"));
  EXPECT_THAT(json_error(R"({"device": "tpu"})"), HasSubstr("device = 'tpu' is not allowed"));
  EXPECT_THAT(json_error(R"({"device_budget": -1})"),
              HasSubstr("device_budget = -1 is not allowed"));
  EXPECT_THAT(json_error(R"({"device_budget": "-1"})"), HasSubstr("device_budget = '-1' is not"));
  EXPECT_THAT(json_error(R"({"device_budget": [1]})"),
              HasSubstr("device_budget = [1] is not allowed: expected a byte size"));
  EXPECT_THAT(json_error(R"({"device_budget": 1e30})"), HasSubstr("more than 64 bits can count"));
  EXPECT_THAT(json_error(R"({"device_budget": {"x": 1, "x": 2}})"), HasSubstr("device_budget"));
  EXPECT_THAT(json_error(R"({"nvme": [1]})"), HasSubstr("expected a list of directories"));
  EXPECT_THAT(json_error(R"({"nvme": 1})"), HasSubstr("expected a list of directories"));
}

TEST(ConfigJson, AnInfiniteClipIsAText) {
  EXPECT_EQ(Config::from_json(R"({"clip": 1.5})").clip, 1.5);
  const Config config = Config::from_json(R"({"clip": "inf"})");
  EXPECT_EQ(config.clip, std::numeric_limits<double>::infinity());
  EXPECT_THAT(config.to_json(), testing::HasSubstr("\"clip\": \"inf\""));
  EXPECT_EQ(Config::from_json(config.to_json()), config);
  config.validate();
  EXPECT_THAT(json_error(R"({"clip": "1"})"),
              testing::HasSubstr("it is a string; expected a number"));
}

TEST(ConfigJson, FilesAreReadAndNamedInErrors) {
  const auto path = std::filesystem::path(testing::TempDir()) / "pagoda_config_test.json";
  std::ofstream(path) << R"({"clip": 2})";
  EXPECT_EQ(Config::from_json_file(path).clip, 2.0);
  std::ofstream(path) << R"({"clipp": 2})";
  try {
    static_cast<void>(Config::from_json_file(path));
    FAIL();
  } catch (const UserError& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("pagoda_config_test.json"));
    EXPECT_THAT(error.what(), testing::HasSubstr("did you mean 'clip'?"));
  }
  std::filesystem::remove(path);
  EXPECT_THROW(static_cast<void>(Config::from_json_file(path)), UserError);
}

}  // namespace
}  // namespace pagoda
