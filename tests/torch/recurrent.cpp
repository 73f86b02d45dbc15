// SPDX-License-Identifier: Apache-2.0
// Weights that are used again and again: an LSTM over a sequence, and a block in a loop.
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>

#include "torch/specimen.h"

namespace zoo {
namespace {

constexpr std::int64_t kLetters = 32;
constexpr std::int64_t kHidden = 48;
constexpr std::int64_t kTimes = 5;

class Lstm : public Specimen {
 public:
  explicit Lstm(const Options& options) : Specimen(options) {
    namespace nn = ::torch::nn;
    letters_ = register_module("letters", built(nn::Embedding(kLetters, kHidden)));
    lstm_ = register_module(
        "lstm", built(nn::LSTM(nn::LSTMOptions(kHidden, kHidden).num_layers(2).batch_first(true))));
    head_ = register_module("head", built(nn::Linear(kHidden, kLetters)));
  }

  at::Tensor loss(at::Generator random) override {
    constexpr std::int64_t kLong = 12;
    const at::Tensor text = sequences(random, 4, kLong, kLetters);
    const at::Tensor x = letters_(text.narrow(1, 0, kLong));
    return cross_entropy(head_(std::get<0>(lstm_(x))), text.narrow(1, 1, kLong));
  }

 private:
  ::torch::nn::Embedding letters_{nullptr};
  ::torch::nn::LSTM lstm_{nullptr};
  ::torch::nn::Linear head_{nullptr};
};

class Loop : public Specimen {
 public:
  explicit Loop(const Options& options) : Specimen(options), how_(options.checkpointing) {
    namespace nn = ::torch::nn;
    in_ = register_module("in", built(nn::Embedding(kLetters, kHidden)));
    norm_ = register_module("norm", built(nn::LayerNorm(nn::LayerNormOptions({kHidden}))));
    shared_ = register_module("shared", built(nn::Linear(kHidden, kHidden)));
    head_ = register_module("head", built(nn::Linear(kHidden, kLetters)));
    block_ = [this](const at::Tensor& x) { return x + at::tanh(shared_(norm_(x))); };
  }

  at::Tensor loss(at::Generator random) override {
    const at::Tensor pairs = sequences(random, 32, 1, kLetters);
    at::Tensor x = in_(pairs.select(1, 0));
    for (std::int64_t i = 0; i < kTimes; ++i) x = checkpointed(how_, block_, x);
    return cross_entropy(head_(x), pairs.select(1, 1));
  }

 private:
  Checkpointing how_;
  ::torch::nn::Embedding in_{nullptr};
  ::torch::nn::LayerNorm norm_{nullptr};
  ::torch::nn::Linear shared_{nullptr}, head_{nullptr};
  Forward block_;
};

}  // namespace

std::shared_ptr<Specimen> make_lstm(const Options& options) {
  return std::make_shared<Lstm>(options);
}

std::shared_ptr<Specimen> make_loop(const Options& options) {
  return std::make_shared<Loop>(options);
}

}  // namespace zoo
