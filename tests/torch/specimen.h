// SPDX-License-Identifier: Apache-2.0
// What the models of the zoo share. Includes torch: for the sources of the zoo only.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include <torch/nn/module.h>
#include <torch/types.h>

#include "torch/zoo.h"

namespace zoo {

/// A model that makes its own batches. One thread at a time.
class Specimen : public ::torch::nn::Module {
 public:
  explicit Specimen(const Options& options);

  virtual at::Tensor loss(at::Generator random) = 0;

 protected:
  /// The type that modules are cast to as they are made: fp32 where that comes afterwards.
  at::ScalarType build_type() const { return build_type_; }
  /// The type of activations: the model's.
  at::ScalarType type() const { return type_; }

  /// Casts a new module before the next one exists, if that is how this model is built.
  template <class Holder>
  Holder built(Holder holder) const {
    if (build_type_ != at::kFloat) holder->to(build_type_);
    return holder;
  }

  /// A batch of sequences in which each token follows from the one before: {batch, length + 1}.
  at::Tensor sequences(at::Generator random, std::int64_t batch, std::int64_t length,
                       std::int64_t vocabulary) const;
  /// Gaussian values in the model's type.
  at::Tensor noise(at::Generator random, at::IntArrayRef sizes) const;
  /// Mean cross entropy in fp32.
  static at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets);
  /// Mean squared error in fp32.
  static at::Tensor squared_error(const at::Tensor& values, const at::Tensor& targets);

 private:
  at::ScalarType type_;
  at::ScalarType build_type_;
  at::Device device_;
};

at::ScalarType scalar_type(Dtype type);
Dtype dtype_of(const at::Tensor& tensor);

/// Each parameter once, in the order of registration: torch lists a shared one at every place.
std::vector<std::pair<std::string, at::Tensor>> parameters_once(const ::torch::nn::Module& module);

using Forward = std::function<at::Tensor(const at::Tensor&)>;

/// block(input), keeping for backward what `how` says. `block` outlives the graph, and gives the
/// same result each time.
at::Tensor checkpointed(Checkpointing how, const Forward& block, const at::Tensor& input);

std::shared_ptr<Specimen> make_gpt(const Options& options);
std::shared_ptr<Specimen> make_moe(const Options& options);
std::shared_ptr<Specimen> make_conv(const Options& options);
std::shared_ptr<Specimen> make_lstm(const Options& options);
std::shared_ptr<Specimen> make_loop(const Options& options);
std::shared_ptr<Specimen> make_awkward(const Options& options);

}  // namespace zoo
