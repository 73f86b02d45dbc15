// SPDX-License-Identifier: Apache-2.0
#include "pagoda/engine/config.h"

#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pagoda/base/error.h"

namespace pagoda {
namespace {

using testing::HasSubstr;

template <class F>
std::string error_of(const F& f) {
  try {
    f();
  } catch (const UserError& error) {
    return error.message();
  }
  return "no error";
}

std::string set_error(std::string_view key, std::string_view text) {
  Config config;
  const std::string message = error_of([&] { config.set(key, text); });
  EXPECT_EQ(config, Config{}) << "a value that is refused changes nothing";
  return message;
}

TEST(Config, TheDefaultIsValid) {
  EXPECT_NO_THROW(Config{}.validate());
  EXPECT_EQ(Config{}.device, "auto");
  EXPECT_EQ(Config{}.zero, 3U);
}

TEST(Config, SetReadsTextOfEveryKind) {
  Config config;
  config.set("device", "cuda:1");
  config.set("device_budget", "8GiB");
  config.set("device_limit", "10GiB");
  config.set("nvme", "/a,/b c");
  config.set("optimizer_state", "nvme");
  config.set("zero", "2");
  config.set("clip", "0.5");
  config.set("loss_scale", "dynamic");
  config.set("master", "split");
  config.set("moments", "bf16");
  config.set("checksums", "false");
  config.set("io_engine", "posix");
  config.set("direct", "off");
  config.set("seed", "18446744073709551615");
  EXPECT_EQ(config.device, "cuda:1");
  EXPECT_EQ(config.device_budget, 8_GiB);
  EXPECT_EQ(config.device_limit, 10_GiB);
  EXPECT_EQ(config.nvme, (std::vector<std::string>{"/a", "/b c"}));
  EXPECT_EQ(config.optimizer_state, Placement::Nvme);
  EXPECT_EQ(config.zero, 2U);
  EXPECT_EQ(config.clip, 0.5);
  EXPECT_EQ(config.loss_scale.kind, LossScale::Kind::Dynamic);
  EXPECT_EQ(config.master, Master::Split);
  EXPECT_EQ(config.moments, MomentType::Bf16);
  EXPECT_FALSE(config.checksums);
  EXPECT_EQ(config.io_engine, io::EngineChoice::Posix);
  EXPECT_EQ(config.direct, io::Direct::Off);
  EXPECT_EQ(config.seed, ~std::uint64_t{0});
  EXPECT_NO_THROW(config.validate());

  config.set("loss_scale", "1024");
  EXPECT_EQ(config.loss_scale, (LossScale{LossScale::Kind::Fixed, 1024}));
  config.set("device_limit", "none");
  EXPECT_FALSE(config.device_limit);
  config.set("nvme", "");
  EXPECT_TRUE(config.nvme.empty());
}

TEST(Config, GetIsWhatSetTakes) {
  Config config;
  for (const ConfigKey& key : Config::keys()) {
    EXPECT_EQ(config.get(key.name), key.initial);
    Config other;
    other.set(key.name, key.initial);
    EXPECT_EQ(other, config) << key.name;
  }
  config.set("device_budget", "1000001");
  EXPECT_EQ(config.get("device_budget"), "1000001") << "exact, not 976.56 KiB";
  config.set("device_budget", "2GiB");
  EXPECT_EQ(config.get("device_budget"), "2 GiB");
}

TEST(Config, KeysAreDistinctAndExplained) {
  std::set<std::string> names;
  for (const ConfigKey& key : Config::keys()) {
    EXPECT_TRUE(names.insert(key.name).second) << key.name;
    EXPECT_FALSE(key.type.empty()) << key.name;
    EXPECT_GT(key.help.size(), 10U) << key.name;
    EXPECT_EQ(key.help.find('\n'), std::string::npos) << key.name;
    EXPECT_NE(key.help.back(), '.') << key.name;
  }
  EXPECT_EQ(names.size(), 43U) << "a field of Config that is not in the table is not settable";
}

TEST(Config, ErrorsNameTheKeyTheValueAndWhatIsAllowed) {
  EXPECT_EQ(set_error("zero", "4"), "zero = 4 is not allowed: expected an integer from 0 to 3");
  EXPECT_EQ(set_error("zero", "2x"), "zero = '2x' is not allowed: expected an integer from 0 to 3");
  EXPECT_THAT(set_error("zero", "-1"), HasSubstr("zero = -1 is not allowed"));
  EXPECT_THAT(set_error("zero", ""), HasSubstr("zero = '' is not allowed"));
  EXPECT_THAT(set_error("accumulation", "0"), HasSubstr("expected an integer from 1 to"));
  EXPECT_THAT(set_error("accumulation", "99999999999999999999"), HasSubstr("an integer from 1 to"));
  EXPECT_EQ(set_error("host_budget", "8 gigs"),
            "host_budget = '8 gigs' is not allowed: expected a byte size such as 8GiB");
  EXPECT_EQ(set_error("parameters", "disk"),
            "parameters = 'disk' is not allowed: expected auto, device, host or nvme; did you mean "
            "'nvme'?");
  EXPECT_THAT(set_error("clip", "-0.5"), HasSubstr("clip = -0.5 is not allowed"));
  EXPECT_EQ(set_error("clip", "nan"),
            "clip = nan is not allowed: it is not finite; expected a number ≥ 0, or inf");
  EXPECT_THAT(set_error("timeout", "0"), HasSubstr("expected a number > 0"));
  EXPECT_THAT(set_error("checksums", "yes"), HasSubstr("expected true or false"));
  EXPECT_THAT(set_error("loss_scale", "static"),
              HasSubstr("expected none, dynamic or a number from 2^-126 to 2^126"));
  EXPECT_THAT(set_error("loss_scale", "0"), HasSubstr("loss_scale = 0 is not allowed"));
  // Their inverse is an fp32 number in kernels.
  for (const char* key : {"loss_scale", "loss_scale_initial", "loss_scale_minimum"}) {
    for (const char* value : {"1e-39", "3e-320", "1e38", "1e300"}) {
      EXPECT_THAT(set_error(key, value), HasSubstr("a number from 2^-126 to 2^126")) << key;
    }
    EXPECT_NO_THROW(Config().set(key, "1e-37"));
  }
  EXPECT_THAT(set_error("device", "gpu"),
              HasSubstr("expected auto, cpu, cuda, cuda:N or emulated"));
  EXPECT_THAT(set_error("device", "cuda:x"), HasSubstr("device = 'cuda:x'"));
  EXPECT_THAT(set_error("device", "cuda:"), HasSubstr("device = 'cuda:'"));
  EXPECT_THAT(set_error("nvme", "/a,,/b"),
              HasSubstr("one of them is empty; expected a list of directories"));
  EXPECT_THAT(set_error("device_limit", "0"), HasSubstr("a byte size > 0 such as 8GiB, or none"));
  EXPECT_NO_THROW(Config().set("staging", "0"));
  EXPECT_THAT(set_error("staging", "1"),
              HasSubstr("expected a byte size from 16 KiB to 1 TiB, or 0"));
  EXPECT_THAT(set_error("bucket", "0"), HasSubstr("expected a byte size from 4 KiB to 1 TiB"));
  EXPECT_THAT(set_error("update_chunk", "2TiB"), HasSubstr("update_chunk = '2TiB'"));
  EXPECT_THAT(set_error("staging", "4KiB"), HasSubstr("a byte size from 16 KiB to 1 TiB"));
  EXPECT_THAT(set_error("host_budget", "8192PiB"), HasSubstr("it is more than 1024 PiB"));
  EXPECT_THAT(set_error("timeout", "1e10"), HasSubstr("a number > 0, at most 1"));
}

TEST(Config, AnUnknownKeyNamesTheNearestOrNone) {
  EXPECT_THAT(set_error("host_buget", "1"), HasSubstr("did you mean 'host_budget'?"));
  EXPECT_THAT(set_error("device-budget", "1"), HasSubstr("did you mean 'device_budget'?"));
  EXPECT_THAT(set_error("colour", "1"), HasSubstr("config_keys() and docs/config.md list all"));
  EXPECT_THAT(error_of([] { static_cast<void>(Config{}.get("Zero")); }), HasSubstr("'zero'"));
}

struct Combination {
  std::vector<std::pair<const char*, const char*>> settings;
  const char* word;  // of the error; null: allowed
};

class ConfigCombinations : public testing::TestWithParam<Combination> {};

TEST_P(ConfigCombinations, AreChecked) {
  Config config;
  for (const auto& [key, text] : GetParam().settings) config.set(key, text);
  const std::string message = error_of([&] { config.validate(); });
  EXPECT_THAT(message, HasSubstr(GetParam().word == nullptr ? "no error" : GetParam().word));
}

INSTANTIATE_TEST_SUITE_P(
    All, ConfigCombinations,
    testing::Values(
        Combination{{{"optimizer_state", "nvme"}}, "optimizer_state = 'nvme' needs directories"},
        Combination{{{"parameters", "nvme"}}, "parameters = 'nvme' needs directories"},
        Combination{{{"gradients", "nvme"}, {"nvme", "/a"}}, nullptr},
        Combination{{{"nvme_budget", "1GiB"}}, "nvme_budget = 1 GiB needs directories"},
        Combination{{{"nvme", "/a,/b/../a"}}, "'/b/../a' twice"},
        Combination{{{"device_budget", "2GiB"}, {"device_limit", "1GiB"}}, "device_limit"},
        Combination{{{"device_budget", "1GiB"}, {"device_limit", "1GiB"}}, nullptr},
        Combination{{{"device_budget", "16MiB"}, {"gradient_staging", "32MiB"}},
                    "gradient_staging = 32 MiB leaves nothing of device_budget = 16 MiB"},
        Combination{{{"device_budget", "16MiB"}, {"gradient_staging", "1MiB"}}, nullptr},
        Combination{{{"host_budget", "8MiB"}}, nullptr},
        Combination{{{"loss_scale_minimum", "1e9"}}, "loss_scale_minimum"},
        Combination{{{"timeout", "4"}}, nullptr},
        Combination{{{"timeout", "4"}, {"heartbeat", "3"}}, "heartbeat = 3 is more than half"},
        Combination{{{"timeout", "4"}, {"heartbeat", "1"}}, nullptr},
        Combination{{{"timeout", "0.005"}},
                    "timeout = 0.005 is too short: raise it to at least 0.012"},
        Combination{{{"timeout", "0.012"}}, nullptr},
        Combination{{{"heartbeat", "1e-4"}},
                    "heartbeat = 0.0001 is too short: raise it to at least"}));

TEST(Config, ValidateSeesWhatWasAssignedInCpp) {
  Config config;
  config.zero = 7;
  EXPECT_THAT(error_of([&] { config.validate(); }), HasSubstr("zero = 7"));
  config = Config{};
  config.device = "tpu";
  EXPECT_THAT(error_of([&] { config.validate(); }), HasSubstr("device = 'tpu'"));
  config = Config{};
  config.parameters = static_cast<Placement>(9);
  EXPECT_THAT(error_of([&] { config.validate(); }), HasSubstr("parameters = 9"));
  config = Config{};
  config.nvme = {"/with,comma", ""};
  EXPECT_THAT(error_of([&] { config.validate(); }), HasSubstr("empty"));
}

}  // namespace
}  // namespace pagoda
