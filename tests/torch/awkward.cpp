// SPDX-License-Identifier: Apache-2.0
// One trait each that breaks systems which assume that a parameter is a contiguous tensor with a
// storage and a gradient of its own, used by the module that owns it. All learn y = x rolled by
// one.
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include "pagoda/base/error.h"
#include "torch/specimen.h"

namespace zoo {
namespace {

using ::torch::nn::Linear;

constexpr std::int64_t kSize = 24;

class Awkward : public Specimen {
 public:
  using Specimen::Specimen;

  at::Tensor loss(at::Generator random) override {
    const at::Tensor x = noise(random, {32, kSize});
    return squared_error(forward(x), x.roll(1, 1));
  }

 protected:
  virtual at::Tensor forward(const at::Tensor& x) = 0;
};

/// module.to(other type) would give each a storage of its own, so it is made in its type.
class Views : public Awkward {
 public:
  explicit Views(const Options& options) : Awkward(options) {
    const at::Tensor buffer = at::zeros({2 * kSize * kSize + kSize}, type());
    const auto piece = [&](std::int64_t start, at::IntArrayRef sizes) {
      return buffer.narrow(0, start, c10::multiply_integers(sizes)).view(sizes).detach();
    };
    first_ = register_parameter("first_weight", piece(0, {kSize, kSize}));
    bias_ = register_parameter("bias", piece(kSize * kSize, {kSize}));
    second_ = register_parameter("second_weight", piece(kSize * kSize + kSize, {kSize, kSize}));
  }
  at::Tensor forward(const at::Tensor& x) override {
    return at::linear(x + 0.1 * at::tanh(at::linear(x, first_, bias_)), second_);
  }

 private:
  at::Tensor first_, bias_, second_;
};

class Transposed : public Awkward {
 public:
  explicit Transposed(const Options& options) : Awkward(options) {
    const auto slant = [&](at::IntArrayRef sizes) { return at::zeros(sizes, build_type()).t(); };
    in_ = register_parameter("in_weight", slant({kSize, 2 * kSize}));
    out_ = register_parameter("out_weight", slant({2 * kSize, kSize}));
  }
  at::Tensor forward(const at::Tensor& x) override { return at::linear(at::linear(x, in_), out_); }

 private:
  at::Tensor in_, out_;
};

/// A frozen layer between two that train, and a frozen bias in one of those.
class Frozen : public Awkward {
 public:
  explicit Frozen(const Options& options) : Awkward(options) {
    in_ = register_module("in", built(Linear(kSize, kSize)));
    frozen_ = register_module("frozen", built(Linear(kSize, kSize)));
    out_ = register_module("out", built(Linear(kSize, kSize)));
    for (at::Tensor& parameter : frozen_->parameters()) parameter.requires_grad_(false);
    in_->bias.requires_grad_(false);
  }
  at::Tensor forward(const at::Tensor& x) override { return out_(x + 0.1 * frozen_(in_(x))); }

 private:
  Linear in_{nullptr}, frozen_{nullptr}, out_{nullptr};
};

/// The owner of the weight is never called.
class Outside : public Awkward {
 public:
  explicit Outside(const Options& options) : Awkward(options) {
    owner_ = register_module("owner", built(Linear(kSize, kSize)));
    out_ = register_module("out", built(Linear(kSize, kSize)));
  }
  at::Tensor forward(const at::Tensor& x) override {
    return out_(x + 0.1 * at::matmul(x, owner_->weight.t()) * owner_->bias.exp());
  }

 private:
  Linear owner_{nullptr}, out_{nullptr};
};

class Empty : public Awkward {
 public:
  explicit Empty(const Options& options) : Awkward(options) {
    nothing_ = register_parameter("nothing", at::zeros({0, kSize}, build_type()));
    out_ = register_module("out", built(Linear(kSize, kSize)));
  }
  at::Tensor forward(const at::Tensor& x) override {
    return out_(at::cat({x, at::matmul(x, nothing_.t())}, 1));
  }

 private:
  at::Tensor nothing_;
  Linear out_{nullptr};
};

/// The model's type and another: a norm and the head are fp32, or bf16 where the model is fp32.
class Mixed : public Awkward {
 public:
  explicit Mixed(const Options& options)
      : Awkward(options), other_(type() == at::kFloat ? at::kBFloat16 : at::kFloat) {
    in_ = register_module("in", Linear(kSize, kSize));
    norm_ = register_module("norm", ::torch::nn::LayerNorm(::torch::nn::LayerNormOptions({kSize})));
    out_ = register_module("out", Linear(kSize, kSize));
    in_->to(type());
    norm_->to(other_);
    out_->to(other_);
  }
  at::Tensor forward(const at::Tensor& x) override {
    return out_(norm_((x + 0.1 * in_(x)).to(other_)));
  }

 private:
  at::ScalarType other_;
  Linear in_{nullptr}, out_{nullptr};
  ::torch::nn::LayerNorm norm_{nullptr};
};

}  // namespace

std::shared_ptr<Specimen> make_awkward(const Options& options) {
  switch (options.kind) {
    case Kind::Views:
      return std::make_shared<Views>(options);
    case Kind::Transposed:
      return std::make_shared<Transposed>(options);
    case Kind::Frozen:
      return std::make_shared<Frozen>(options);
    case Kind::Outside:
      return std::make_shared<Outside>(options);
    case Kind::Empty:
      return std::make_shared<Empty>(options);
    case Kind::Mixed:
      return std::make_shared<Mixed>(options);
    default:
      throw pagoda::EngineError("not one of the awkward kinds");
  }
}

}  // namespace zoo
