// SPDX-License-Identifier: Apache-2.0
// What Python sees after torch.ops.load_library("libpagoda.so"), under torch.ops.pagoda. Part of
// the shared library only, so that the `pagoda` program registers nothing.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "pagoda/base/error.h"
#include "pagoda/base/version.h"
#include "pagoda/kernels/adam.h"
#include "pagoda/torch/element_type.h"

namespace pagoda::torch {
namespace {

using kernels::Dtype;

Dtype dtype_of(const at::Tensor& tensor, const char* name) {
  if (const auto known = element_type(tensor)) return *known;
  throw UserError(fmt::format("{} must be float32, bfloat16 or float16, not {}", name,
                              c10::toString(tensor.scalar_type())));
}

/// Kernels read arrays: a tensor must be one, as long as the master, in host memory.
void require_array(const at::Tensor& tensor, const char* name, std::int64_t count) {
  PAGODA_REQUIRE(tensor.device().is_cpu(), "{} must be a CPU tensor", name);
  PAGODA_REQUIRE(tensor.is_contiguous(), "{} must be contiguous", name);
  PAGODA_REQUIRE_EQ(tensor.numel(), count, "{} must have as many elements as master", name);
}

kernels::Elements elements(const at::Tensor& tensor, const char* name, std::int64_t count) {
  require_array(tensor, name, count);
  return {dtype_of(tensor, name), tensor.mutable_data_ptr()};
}

/// One fused Adam or AdamW step on this thread, in place: kernels/adam.h says what it computes.
void adam_step(const at::Tensor& master, const at::Tensor& grad, const at::Tensor& momentum,
               const at::Tensor& variance, const std::optional<at::Tensor>& param,
               std::int64_t step, double lr, double beta1, double beta2, double eps,
               double weight_decay, bool decoupled, double grad_scale) {
  const std::int64_t count = master.numel();
  require_array(grad, "grad", count);
  PAGODA_REQUIRE(dtype_of(master, "master") == Dtype::F32, "master must be float32");
  PAGODA_REQUIRE_GE(step, 1, "steps are counted from 1");

  kernels::OptimizerShard shard;
  shard.count = static_cast<std::size_t>(count);
  shard.grad = {dtype_of(grad, "grad"), grad.const_data_ptr()};
  shard.master = static_cast<float*>(elements(master, "master", count).data);
  shard.momentum = elements(momentum, "momentum", count);
  shard.variance = elements(variance, "variance", count);
  if (param.has_value()) shard.param = elements(*param, "param", count);

  kernels::AdamConfig config;
  config.lr = lr;
  config.beta1 = beta1;
  config.beta2 = beta2;
  config.eps = eps;
  config.weight_decay = weight_decay;
  config.decay = decoupled ? kernels::Decay::Decoupled : kernels::Decay::L2;
  kernels::adam_step(config, {.number = static_cast<std::uint64_t>(step), .grad_scale = grad_scale},
                     shard);
}

}  // namespace
}  // namespace pagoda::torch

// Outside our namespaces: the macros say torch:: and mean the library.
TORCH_LIBRARY(pagoda, library) {
  library.def("version() -> str", [] { return std::string(pagoda::kVersion); });
  library.def(
      "adam_step_(Tensor(a!) master, Tensor grad, Tensor(b!) momentum, Tensor(c!) variance, "
      "Tensor(d!)? param=None, *, int step, float lr=1e-3, float beta1=0.9, float beta2=0.999, "
      "float eps=1e-8, float weight_decay=0.0, bool decoupled=True, float grad_scale=1.0) -> ()");
}

TORCH_LIBRARY_IMPL(pagoda, CPU, library) {
  library.impl("adam_step_", pagoda::torch::adam_step);
}
