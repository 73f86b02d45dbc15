// SPDX-License-Identifier: Apache-2.0
#include "gpt.h"

#include <algorithm>
#include <cmath>

#include <ATen/CPUGeneratorImpl.h>
#include <torch/nn/init.h>

namespace tiny_gpt {

namespace nn = torch::nn;

AttentionImpl::AttentionImpl(std::int64_t width, std::int64_t heads) : heads_(heads) {
  qkv_ = register_module("qkv", nn::Linear(width, 3 * width));
  out_ = register_module("out", nn::Linear(width, width));
}

at::Tensor AttentionImpl::forward(const at::Tensor& x) {
  const std::int64_t batch = x.size(0), length = x.size(1), width = x.size(2);
  // {batch, length, 3·width} → three of {batch, heads, length, width ÷ heads}
  const auto qkv =
      qkv_(x).view({batch, length, 3, heads_, width / heads_}).permute({2, 0, 3, 1, 4});
  const at::Tensor mixed =
      at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], /*attn_mask=*/{}, /*dropout_p=*/0.0,
                                       /*is_causal=*/true);
  return out_(mixed.transpose(1, 2).reshape({batch, length, width}));
}

BlockImpl::BlockImpl(const GptOptions& options) {
  const std::int64_t width = options.width;
  norm1_ = register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({width})));
  attention_ = register_module("attention", Attention(width, options.heads));
  norm2_ = register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({width})));
  up_ = register_module("up", nn::Linear(width, 4 * width));
  down_ = register_module("down", nn::Linear(4 * width, width));
}

at::Tensor BlockImpl::forward(at::Tensor x) {
  x = x + attention_(norm1_(x));
  return x + down_(at::gelu(up_(norm2_(x))));
}

GptImpl::GptImpl(const GptOptions& options) : options_(options) {
  tokens_ = register_module("tokens", nn::Embedding(options.vocabulary, options.width));
  positions_ = register_module("positions", nn::Embedding(options.sequence, options.width));
  register_module("blocks", blocks_);
  for (std::int64_t i = 0; i < options.layers; ++i) blocks_->push_back(Block(options));
  norm_ = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({options.width})));
  if (!options.tied) {
    head_ = register_module(
        "head", nn::Linear(nn::LinearOptions(options.width, options.vocabulary).bias(false)));
  }
  // Small weights, and smaller ones where a branch adds to the residual stream, so that the sum of
  // all branches starts out as large as one.
  const double narrow = 0.02 / std::sqrt(2.0 * static_cast<double>(options.layers));
  for (auto& item : named_parameters()) {
    if (item.key().ends_with("bias")) {
      nn::init::zeros_(item.value());
    } else if (item.value().dim() == 2) {
      const bool adds = item.key().ends_with("out.weight") || item.key().ends_with("down.weight");
      nn::init::normal_(item.value(), 0.0, adds ? narrow : 0.02);
    }
  }
}

at::Tensor GptImpl::head(const at::Tensor& x) {
  return head_ ? head_(x) : at::linear(x, tokens_->weight);
}

at::Tensor GptImpl::forward(const at::Tensor& bytes) {
  const at::Tensor places = at::arange(bytes.size(1), bytes.options());
  at::Tensor x = tokens_(bytes) + positions_(places);
  for (const auto& block : *blocks_) x = block->as<Block>()->forward(x);
  return head(norm_(x));
}

at::Tensor GptImpl::loss(const at::Tensor& bytes, const at::Tensor& targets) {
  return at::cross_entropy_loss(forward(bytes).flatten(0, 1), targets.flatten());
}

std::string GptImpl::generate(const std::string& prompt, std::int64_t count, double temperature,
                              std::uint64_t seed) {
  const at::NoGradGuard no_grad;
  at::Generator random = at::detail::createCPUGenerator(seed);
  std::string text = prompt.empty() ? "\n" : prompt;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::size_t context = std::min(text.size(), static_cast<std::size_t>(options_.sequence));
    const at::Tensor bytes = at::empty({1, static_cast<std::int64_t>(context)}, at::kLong);
    for (std::size_t j = 0; j < context; ++j) {
      bytes.data_ptr<std::int64_t>()[j] =
          static_cast<unsigned char>(text[text.size() - context + j]);
    }
    const at::Tensor scores = forward(bytes.to(tokens_->weight.device())).select(1, -1).cpu();
    const at::Tensor chances = (scores.to(at::kFloat) / std::max(temperature, 1e-3)).softmax(-1);
    text += static_cast<char>(at::multinomial(chances, 1, false, random).item<std::int64_t>());
  }
  return text;
}

std::int64_t GptImpl::parameter_count() const {
  std::int64_t count = 0;
  for (const at::Tensor& parameter : parameters()) count += parameter.numel();
  return count;
}

}  // namespace tiny_gpt
