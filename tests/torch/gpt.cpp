// SPDX-License-Identifier: Apache-2.0
// A GPT, with a head of its own or tied to the embedding.
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include "torch/specimen.h"

namespace zoo {
namespace {

namespace nn = ::torch::nn;

constexpr std::int64_t kVocabulary = 64;
constexpr std::int64_t kLength = 24;
constexpr std::int64_t kWidth = 64;
constexpr std::int64_t kHeads = 4;
constexpr std::int64_t kBlocks = 2;
constexpr std::int64_t kBatch = 4;

/// Attention and an MLP, each behind a norm and added to its input.
class GptBlock : public nn::Module {
 public:
  GptBlock() {
    norm1_ = register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    qkv_ = register_module("qkv", nn::Linear(kWidth, 3 * kWidth));
    out_ = register_module("out", nn::Linear(kWidth, kWidth));
    norm2_ = register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    up_ = register_module("up", nn::Linear(kWidth, 4 * kWidth));
    down_ = register_module("down", nn::Linear(4 * kWidth, kWidth));
  }

  at::Tensor forward(const at::Tensor& input) {
    const std::int64_t batch = input.size(0), length = input.size(1);
    const std::vector<at::Tensor> qkv = qkv_(norm1_(input))
                                            .view({batch, length, 3 * kHeads, kWidth / kHeads})
                                            .transpose(1, 2)
                                            .chunk(3, 1);
    const at::Tensor attended =
        at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], {}, 0.0, /*is_causal=*/true);
    const at::Tensor x = input + out_(attended.transpose(1, 2).reshape({batch, length, kWidth}));
    return x + down_(at::gelu(up_(norm2_(x))));
  }

 private:
  nn::LayerNorm norm1_{nullptr}, norm2_{nullptr};
  nn::Linear qkv_{nullptr}, out_{nullptr}, up_{nullptr}, down_{nullptr};
};

/// A projection with the weight it is given, registered here as well as there.
class TiedHead : public nn::Module {
 public:
  explicit TiedHead(const at::Tensor& weight) { weight_ = register_parameter("weight", weight); }
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight_); }

 private:
  at::Tensor weight_;
};

class Gpt : public Specimen {
 public:
  explicit Gpt(const Options& options) : Specimen(options), how_(options.checkpointing) {
    tokens_ = register_module("tokens", built(nn::Embedding(kVocabulary, kWidth)));
    positions_ = register_module("positions", built(nn::Embedding(kLength, kWidth)));
    for (std::int64_t i = 0; i < kBlocks; ++i) {
      auto block = built(std::make_shared<GptBlock>());
      register_module("block" + std::to_string(i), block);
      blocks_.emplace_back(
          [block = block.get()](const at::Tensor& x) { return block->forward(x); });
    }
    norm_ = register_module("norm", built(nn::LayerNorm(nn::LayerNormOptions({kWidth}))));
    if (options.kind == Kind::TiedGpt) {
      tied_ = register_module("head", std::make_shared<TiedHead>(tokens_->weight));
    } else {
      head_ = register_module(
          "head", built(nn::Linear(nn::LinearOptions(kWidth, kVocabulary).bias(false))));
    }
  }

  at::Tensor loss(at::Generator random) override {
    const at::Tensor text = sequences(random, kBatch, kLength, kVocabulary);
    const at::Tensor place = at::arange(kLength, text.options());
    at::Tensor x = tokens_(text.narrow(1, 0, kLength)) + positions_(place);
    for (const Forward& block : blocks_) x = checkpointed(how_, block, x);
    x = norm_(x);
    return cross_entropy(tied_ ? tied_->forward(x) : head_(x), text.narrow(1, 1, kLength));
  }

 private:
  Checkpointing how_;
  nn::Embedding tokens_{nullptr}, positions_{nullptr};
  std::vector<Forward> blocks_;
  nn::LayerNorm norm_{nullptr};
  nn::Linear head_{nullptr};
  std::shared_ptr<TiedHead> tied_;
};

}  // namespace

std::shared_ptr<Specimen> make_gpt(const Options& options) {
  return std::make_shared<Gpt>(options);
}

}  // namespace zoo
