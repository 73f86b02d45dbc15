// SPDX-License-Identifier: Apache-2.0
// A process that loads torch takes half a second to start: one test goes through all models.
#include "torch/zoo.h"

#include <algorithm>
#include <set>

#include <gtest/gtest.h>

#include "pagoda/base/error.h"
#include "torch/plain_loop.h"

namespace zoo {
namespace {

std::string case_name(const Options& options) {
  return fmt::format("{} {} {}", name(options.kind), pagoda::kernels::dtype_name(options.dtype),
                     name(options.checkpointing));
}

/// Calls test(options) for every kind in each type.
template <class Test>
void for_each_model(std::initializer_list<Dtype> types, const Test& test) {
  use_one_torch_thread();
  for (const Kind kind : all_kinds()) {
    for (const Dtype dtype : types) {
      const Options options{.kind = kind, .dtype = dtype};
      SCOPED_TRACE(case_name(options));
      test(options);
    }
  }
}

TEST(Zoo, LearnsFromBatchesItHasNotSeen) {
  for_each_model({Dtype::F32, Dtype::BF16}, [](const Options& options) {
    Training training{.steps = options.kind == Kind::Moe ? 60 : 24};  // sees few words at a time
    training.optimizer = pagoda::kernels::AdamConfig{.lr = 1e-2};
    const Trained trained = plain_loop(options, training);
    double first = 0, last = 0;
    for (std::size_t i = 0; i < 4; ++i) {
      first += trained.mean_loss(i);
      last += trained.mean_loss(trained.losses.size() - 1 - i);
    }
    EXPECT_LT(last, 0.85 * first);
  });
}

TEST(Zoo, TheWayOfCastingDoesNotMatter) {
  for_each_model({Dtype::F32, Dtype::BF16, Dtype::F16}, [](const Options& options) {
    Options other = options;
    other.casting = Casting::Afterwards;
    const auto one = make(options), two = make(other);
    EXPECT_EQ(parameter_bits(*one), parameter_bits(*two));
    EXPECT_EQ(gradient_bits(*one, 1), gradient_bits(*two, 1));
  });
}

TEST(Zoo, EverythingFollowsFromTheSeeds) {
  for_each_model({Dtype::F32, Dtype::BF16, Dtype::F16}, [](const Options& options) {
    const auto a = make(options), b = make(options);
    const std::vector<Bits> gradients = gradient_bits(*a, batch_seed(1, 0, 0, 0));
    EXPECT_EQ(gradients, gradient_bits(*b, batch_seed(1, 0, 0, 0)));
    EXPECT_NE(gradients, gradient_bits(*b, batch_seed(1, 1, 0, 0)));
    EXPECT_NE(gradients, gradient_bits(*b, batch_seed(1, 0, 1, 0)));
    EXPECT_NE(gradients, gradient_bits(*b, batch_seed(1, 0, 0, 1)));
    Options other = options;
    other.seed = 2;
    EXPECT_NE(parameter_bits(*a), parameter_bits(*make(other)));
  });
}

TEST(Zoo, CheckpointedGradientsAreThoseOfAPlainBackward) {
  int models = 0;
  for_each_model({Dtype::F32, Dtype::BF16, Dtype::F16}, [&](Options options) {
    const std::uint64_t seed = batch_seed(7, 0, 0, 0);
    const std::vector<Bits> plain = gradient_bits(*make(options), seed);
    for (const Checkpointing how : {Checkpointing::Reentrant, Checkpointing::SavedHooks}) {
      options.checkpointing = how;
      if (!exists(options)) continue;
      SCOPED_TRACE(case_name(options));
      ++models;
      const auto model = make(options);
      EXPECT_EQ(gradient_bits(*model, seed), plain);
      EXPECT_EQ(gradient_bits(*model, seed), plain) << "the second time";
    }
  });
  EXPECT_EQ(models, 18);
}

std::set<std::string> used(Kind kind, std::uint64_t seed) {
  std::set<std::string> out;
  for (const Bits& gradient : gradient_bits(*make({.kind = kind}), seed)) {
    if (gradient.present) out.insert(gradient.name);
  }
  return out;
}

TEST(Zoo, RanksUseDifferentExpertsAndLeaveSomeOut) {
  const std::size_t parameters = parameter_bits(*make({.kind = Kind::Moe})).size();
  std::set<std::set<std::string>> choices;
  for (int rank = 0; rank < 4; ++rank) {
    const auto names = used(Kind::Moe, batch_seed(1, rank, 0, 0));
    EXPECT_LT(names.size(), parameters);
    EXPECT_TRUE(names.contains("router.weight"));
    choices.insert(names);
  }
  EXPECT_GE(choices.size(), 3U) << "of four ranks";
}

TEST(Zoo, AwkwardModelsHaveTheirTraits) {
  // Frozen parameters have no gradient and do not move.
  const std::set<std::string> names = used(Kind::Frozen, 1);
  EXPECT_EQ(names, (std::set<std::string>{"in.weight", "out.bias", "out.weight"}));
  const std::vector<Bits> before = parameter_bits(*make({.kind = Kind::Frozen}));
  const Trained after = plain_loop({.kind = Kind::Frozen}, {.steps = 2});
  for (std::size_t i = 0; i < before.size(); ++i) {
    EXPECT_EQ(before[i] == after.parameters[i], !names.contains(before[i].name)) << before[i].name;
  }

  // A tied weight is one parameter.
  EXPECT_EQ(parameter_bits(*make({.kind = Kind::TiedGpt})).size() + 1,
            parameter_bits(*make({.kind = Kind::Gpt})).size());

  const auto layouts = [](Kind kind, Casting casting) {
    return layout(*make({.kind = kind, .dtype = Dtype::BF16, .casting = casting}));
  };
  for (const Casting casting : {Casting::AsBuilt, Casting::Afterwards}) {
    EXPECT_EQ(layouts(Kind::Views, casting).storages, 1);
    EXPECT_EQ(layouts(Kind::Views, casting).parameters, 3);
    EXPECT_EQ(layouts(Kind::Transposed, casting).contiguous, 0);
    EXPECT_EQ(layouts(Kind::Gpt, casting).storages, layouts(Kind::Gpt, casting).parameters);
  }

  for (const Dtype dtype : {Dtype::F32, Dtype::BF16}) {
    std::set<Dtype> types;
    for (const Bits& bits : parameter_bits(*make({.kind = Kind::Mixed, .dtype = dtype}))) {
      types.insert(bits.type);
    }
    EXPECT_EQ(types, (std::set{Dtype::F32, Dtype::BF16}));
  }

  const std::vector<Bits> gradients = gradient_bits(*make({.kind = Kind::Empty}), 1);
  EXPECT_TRUE(std::any_of(gradients.begin(), gradients.end(),
                          [](const Bits& b) { return b.present && b.bytes.empty(); }));
}

TEST(Zoo, NamesReadBack) {
  for (const Kind kind : all_kinds()) EXPECT_EQ(parse_kind(name(kind)), kind);
  EXPECT_EQ(parse_checkpointing("saved_hooks"), Checkpointing::SavedHooks);
  EXPECT_THROW(parse_kind("llama"), pagoda::UserError);
  EXPECT_THROW(make({.kind = Kind::Lstm, .checkpointing = Checkpointing::Reentrant}),
               pagoda::UserError);
}

}  // namespace
}  // namespace zoo
