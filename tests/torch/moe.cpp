// SPDX-License-Identifier: Apache-2.0
// Experts, of which each batch uses a few and others than the next one.
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include "torch/specimen.h"

namespace zoo {
namespace {

constexpr std::int64_t kMoeVocabulary = 24;
constexpr std::int64_t kMoeWidth = 32;
constexpr std::int64_t kExperts = 8;
constexpr std::int64_t kMoeBatch = 32;
constexpr std::int64_t kWords = 3;  // that occur in a batch: at most as many experts are used

class Expert : public ::torch::nn::Module {
 public:
  Expert() {
    up_ = register_module("up", ::torch::nn::Linear(kMoeWidth, 2 * kMoeWidth));
    down_ = register_module("down", ::torch::nn::Linear(2 * kMoeWidth, kMoeWidth));
  }
  at::Tensor forward(const at::Tensor& x) { return down_(at::relu(up_(x))); }

 private:
  ::torch::nn::Linear up_{nullptr}, down_{nullptr};
};

class Moe : public Specimen {
 public:
  explicit Moe(const Options& options) : Specimen(options) {
    words_ = register_module("words", built(::torch::nn::Embedding(kMoeVocabulary, kMoeWidth)));
    router_ = register_module("router", built(::torch::nn::Linear(kMoeWidth, kExperts)));
    for (std::int64_t i = 0; i < kExperts; ++i) {
      experts_.push_back(
          register_module("expert" + std::to_string(i), built(std::make_shared<Expert>())));
    }
    head_ = register_module("head", built(::torch::nn::Linear(kMoeWidth, kMoeVocabulary)));
  }

  at::Tensor loss(at::Generator random) override {
    const at::Tensor first = sequences(random, kWords, 1, kMoeVocabulary);
    const at::Tensor pick = at::randint(kWords, {kMoeBatch}, random, at::kLong).to(first.device());
    const at::Tensor pairs = first.index_select(0, pick);  // a word and the one that follows it
    const at::Tensor x = words_(pairs.select(1, 0));
    const auto [weight, chosen] = router_(x).softmax(1).max(1);
    at::Tensor sum = x;
    for (std::int64_t i = 0; i < kExperts; ++i) {
      const at::Tensor rows = (chosen == i).nonzero().flatten();
      if (rows.numel() == 0) continue;  // an unused expert is not touched at all
      const at::Tensor out =
          experts_[static_cast<std::size_t>(i)]->forward(x.index_select(0, rows));
      sum = sum.index_add(0, rows, out * weight.index_select(0, rows).unsqueeze(1));
    }
    return cross_entropy(head_(sum), pairs.select(1, 1));
  }

 private:
  ::torch::nn::Embedding words_{nullptr};
  ::torch::nn::Linear router_{nullptr}, head_{nullptr};
  std::vector<std::shared_ptr<Expert>> experts_;
};

}  // namespace

std::shared_ptr<Specimen> make_moe(const Options& options) {
  return std::make_shared<Moe>(options);
}

}  // namespace zoo
