// SPDX-License-Identifier: Apache-2.0
#include "torch/specimen.h"

#include <unordered_set>

#include "pagoda/base/error.h"
#include "pagoda/torch/element_type.h"

namespace zoo {

at::ScalarType scalar_type(Dtype type) {
  switch (type) {
    case Dtype::F32:
      return at::kFloat;
    case Dtype::BF16:
      return at::kBFloat16;
    case Dtype::F16:
      return at::kHalf;
  }
  throw pagoda::EngineError("unknown element type");
}

Dtype dtype_of(const at::Tensor& tensor) {
  if (const auto known = pagoda::torch::element_type(tensor)) return *known;
  throw pagoda::UserError("a parameter is fp32, bf16 or fp16");
}

Specimen::Specimen(const Options& options)
    : type_(scalar_type(options.dtype)),
      build_type_(options.casting == Casting::AsBuilt ? type_ : at::kFloat),
      device_(options.device) {}

at::Tensor Specimen::sequences(at::Generator random, std::int64_t batch, std::int64_t length,
                               std::int64_t vocabulary) const {
  std::vector<at::Tensor> columns{at::randint(vocabulary, {batch}, random, at::kLong)};
  for (std::int64_t i = 0; i < length; ++i) {
    columns.push_back((columns.back() * 5 + 3).remainder(vocabulary));
  }
  return at::stack(columns, 1).to(device_);
}

at::Tensor Specimen::noise(at::Generator random, at::IntArrayRef sizes) const {
  return at::randn(sizes, random, at::kFloat).to(device_).to(type_);
}

at::Tensor Specimen::cross_entropy(const at::Tensor& logits, const at::Tensor& targets) {
  return at::cross_entropy_loss(logits.to(at::kFloat).flatten(0, -2), targets.flatten());
}

at::Tensor Specimen::squared_error(const at::Tensor& values, const at::Tensor& targets) {
  return at::mse_loss(values.to(at::kFloat), targets.to(at::kFloat));
}

std::vector<std::pair<std::string, at::Tensor>> parameters_once(const ::torch::nn::Module& module) {
  std::vector<std::pair<std::string, at::Tensor>> out;
  std::unordered_set<const at::TensorImpl*> seen;
  for (const auto& item : module.named_parameters()) {
    if (seen.insert(item.value().unsafeGetTensorImpl()).second) {
      out.emplace_back(item.key(), item.value());
    }
  }
  return out;
}

}  // namespace zoo
