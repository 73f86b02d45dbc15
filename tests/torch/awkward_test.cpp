// SPDX-License-Identifier: Apache-2.0
// Nothing in a user's model or loop has to change: awkward models, odd habits, and clear words
// where something cannot be.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "torch/parity_case.h"
#include "torch/quirks.h"

namespace zoo {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using namespace pagoda::literals;

TEST(AwkwardModels, TrainToTheSameBits) {
  for (const Kind kind :
       {Kind::Views, Kind::Transposed, Kind::Frozen, Kind::Outside, Kind::Empty, Kind::Mixed}) {
    for (const Dtype dtype : {Dtype::F32, Dtype::BF16}) {
      for (const int ranks : {1, 2}) {
        for (const unsigned zero : {0U, 2U, 3U}) {
          for (const bool tight : {false, true}) {
            if (ranks == 1 && zero != 3) continue;
            ParityCase parity;
            parity.options = {.kind = kind, .dtype = dtype};
            if (!exists(parity.options)) continue;
            parity.training.ranks = ranks;
            parity.training.micro_batches = tight ? 2 : 1;
            parity.backward = tight ? Backward::Plain : Backward::Engine;
            set_small_pieces(parity.config);
            parity.config.device = tight ? "emulated" : "cpu";
            parity.config.zero = zero;
            if (tight) {
              set_tight_budget(parity.config, parity.options);
            } else {
              parity.config.device_budget = 1_MiB;
            }
            EXPECT_EQ(check_parity(parity), "")
                << name(kind) << (dtype == Dtype::F32 ? ", fp32" : ", bf16") << ", ranks " << ranks
                << ", zero " << zero << (tight ? ", tight" : ", roomy");
          }
        }
      }
    }
  }
}

pagoda::Config config_of(unsigned zero, bool roomy) {
  pagoda::Config config;
  set_small_pieces(config);
  config.device = roomy ? "cpu" : "emulated";
  config.device_budget = roomy ? 4_MiB : 300_KiB;
  config.gradient_staging = 100_KiB;
  config.zero = zero;
  return config;
}

TEST(Quirks, GiveTheSameBits) {
  for (const Quirk& quirk : quirks()) {
    for (const auto& [ranks, zero] : {std::pair{1, 3U}, std::pair{2, 3U}, std::pair{2, 1U}}) {
      for (const bool roomy : {false, true}) {
        Setting setting{config_of(zero, roomy), ranks, roomy ? Dtype::BF16 : Dtype::F32};
        EXPECT_EQ(quirk.run(setting), "")
            << quirk.name << ", ranks " << ranks << ", zero " << zero << (roomy ? ", roomy" : "");
        if (!roomy) continue;
        setting.config.master = pagoda::Master::Split;
        setting.config.device_budget = 300_KiB;
        EXPECT_EQ(quirk.run(setting), "")
            << quirk.name << ", ranks " << ranks << ", zero " << zero << ", split";
      }
    }
  }
}

TEST(Refusals, SayWhatIsWrong) {
  EXPECT_THAT(refusal_of_double(), AllOf(HasSubstr("p0"), HasSubstr("float64")));
  EXPECT_THAT(refusal_of_complex(), AllOf(HasSubstr("p0"), HasSubstr("complex")));
  EXPECT_THAT(refusal_of_integers(), "nothing") << "integers that are not trained are only paged";
  EXPECT_THAT(refusal_of_overlap(), HasSubstr("share elements"));
  EXPECT_THAT(refusal_of_meta(),
              AllOf(HasSubstr("'p1' is on the meta device"), HasSubstr("build")));
  EXPECT_THAT(refusal_of_constants(),
              AllOf(HasSubstr("lr = nan"), HasSubstr("beta2 = 1"), HasSubstr("momentum = -1"),
                    HasSubstr("weight_decay = -1"), HasSubstr("lr = -1")));
  EXPECT_THAT(refusal_of_sparse_gradients(), HasSubstr("sparse"));
  EXPECT_THAT(refusal_of_two_models(), HasSubstr("attached already"));
  EXPECT_THAT(refusal_of_other_values(1), AllOf(HasSubstr("rank 1"), HasSubstr("weight")));
  EXPECT_THAT(refusal_of_other_values(0), HasSubstr("rank 1"));
}

TEST(Refusals, AnOperatorThatIsTooLargeNamesItsPagesAndTheEngineGoesOn) {
  const TooLarge said = too_large_operator();
  EXPECT_THAT(said.by_operator, AllOf(HasSubstr("first.weight (75 KiB)"),
                                      HasSubstr("second.weight (75 KiB)"), HasSubstr("120 KiB")));
  EXPECT_EQ(said.by_engine, "nothing");
}

TEST(RawPointers, ThrowTheNameOfAnAbsentPage) {
  EXPECT_THAT(raw_pointer_of_absent(), AllOf(HasSubstr("'first.weight'"), HasSubstr("pin")));
  EXPECT_THAT(raw_pointer_after_engine(), HasSubstr("went with its engine"));
}

TEST(RawPointers, MayBeReadWhilePinned) {
  EXPECT_EQ(pinned_is_readable(), "");
}

TEST(Lifetimes, ALateParameterStaysPlain) {
  EXPECT_EQ(late_parameter_stays_plain(), "");
}

TEST(Lifetimes, AStorageExchangedAfterAttachIsPagedAnew) {
  EXPECT_EQ(exchanged_storage_after_attach(1), "");
  EXPECT_EQ(exchanged_storage_after_attach(2), "");
  EXPECT_THAT(exchanged_storage_of_another_type(),
              AllOf(HasSubstr("parameter '"), HasSubstr("another size, type or device")));
}

}  // namespace
}  // namespace zoo
