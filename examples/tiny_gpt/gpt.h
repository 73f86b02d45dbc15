// SPDX-License-Identifier: Apache-2.0
// A GPT over bytes, as one writes it for torch: it knows nothing of Pagoda.
#pragma once

#include <cstdint>
#include <string>

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

namespace tiny_gpt {

struct GptOptions {
  std::int64_t layers = 6;
  std::int64_t width = 384;
  std::int64_t heads = 6;
  std::int64_t sequence = 128;    ///< longest context
  std::int64_t vocabulary = 256;  ///< one token a byte
  bool tied = true;               ///< the head is the embedding's weight
};

/// Attention over what came before: each position asks (q), offers (k) and answers (v).
class AttentionImpl : public torch::nn::Module {
 public:
  AttentionImpl(std::int64_t width, std::int64_t heads);
  at::Tensor forward(const at::Tensor& x);

 private:
  std::int64_t heads_;
  torch::nn::Linear qkv_{nullptr}, out_{nullptr};
};
TORCH_MODULE(Attention);

/// Attention, then an MLP; each reads a normalised copy of its input and adds to it.
class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(const GptOptions& options);
  at::Tensor forward(at::Tensor x);

 private:
  torch::nn::LayerNorm norm1_{nullptr}, norm2_{nullptr};
  Attention attention_{nullptr};
  torch::nn::Linear up_{nullptr}, down_{nullptr};
};
TORCH_MODULE(Block);

/// The whole model. One thread at a time, as every torch module.
class GptImpl : public torch::nn::Module {
 public:
  explicit GptImpl(const GptOptions& options);

  /// Bytes {batch, length} → scores of the byte that follows each: {batch, length, vocabulary}.
  at::Tensor forward(const at::Tensor& bytes);
  /// Mean cross entropy of `targets`, the bytes that did follow.
  at::Tensor loss(const at::Tensor& bytes, const at::Tensor& targets);
  /// `prompt` and `count` bytes after it. A low temperature takes the likeliest, a high one dares.
  std::string generate(const std::string& prompt, std::int64_t count, double temperature,
                       std::uint64_t seed);

  std::int64_t parameter_count() const;

 private:
  at::Tensor head(const at::Tensor& x);

  GptOptions options_;
  torch::nn::Embedding tokens_{nullptr}, positions_{nullptr};
  torch::nn::ModuleList blocks_;
  torch::nn::LayerNorm norm_{nullptr};
  torch::nn::Linear head_{nullptr};  // null where tied
};
TORCH_MODULE(Gpt);

}  // namespace tiny_gpt
