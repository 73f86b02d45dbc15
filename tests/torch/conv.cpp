// SPDX-License-Identifier: Apache-2.0
// Convolutions with both kinds of norm. The running averages of the batch norm are buffers: in
// training mode no loss depends on them.
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include "torch/specimen.h"

namespace zoo {
namespace {

constexpr std::int64_t kClasses = 8;
constexpr std::int64_t kImages = 16;
constexpr std::int64_t kSide = 12;

class Conv : public Specimen {
 public:
  explicit Conv(const Options& options) : Specimen(options) {
    namespace nn = ::torch::nn;
    conv1_ = register_module("conv1", built(nn::Conv2d(nn::Conv2dOptions(3, 16, 3).padding(1))));
    norm1_ = register_module("norm1", built(nn::BatchNorm2d(16)));
    conv2_ = register_module("conv2", built(nn::Conv2d(nn::Conv2dOptions(16, 32, 3).stride(2))));
    norm2_ = register_module("norm2", built(nn::GroupNorm(nn::GroupNormOptions(4, 32))));
    head_ = register_module("head", built(nn::Linear(32, kClasses)));
  }

  at::Tensor loss(at::Generator random) override {
    const at::Tensor noise_only = noise(random, {kImages, 3, kSide, kSide});
    const at::Tensor label = at::randint(kClasses, {kImages}, random, at::kLong);
    // A class is the frequency of its stripes.
    const at::Tensor across = at::arange(kSide, at::kFloat).view({1, 1, 1, kSide});
    const at::Tensor stripes = (across * (label + 1).view({kImages, 1, 1, 1}) * 0.4).cos();
    at::Tensor x = 0.2 * noise_only + stripes.to(noise_only.options());
    x = at::relu(norm1_(conv1_(x)));
    x = at::relu(norm2_(conv2_(x)));
    return cross_entropy(head_(x.mean({2, 3})), label.to(x.device()));
  }

 private:
  ::torch::nn::Conv2d conv1_{nullptr}, conv2_{nullptr};
  ::torch::nn::BatchNorm2d norm1_{nullptr};
  ::torch::nn::GroupNorm norm2_{nullptr};
  ::torch::nn::Linear head_{nullptr};
};

}  // namespace

std::shared_ptr<Specimen> make_conv(const Options& options) {
  return std::make_shared<Conv>(options);
}

}  // namespace zoo
