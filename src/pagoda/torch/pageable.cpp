// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/pageable.h"

#include <algorithm>

#include <ATen/MemoryOverlap.h>
#include <c10/core/DispatchKeySet.h>

#include "pagoda/base/error.h"
#include "pagoda/torch/element_type.h"
#include "pagoda/torch/page_storage.h"

namespace pagoda::torch {
namespace {

bool is_wrapper(const at::Tensor& tensor) {
  return tensor.key_set().has_any(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched,
                           c10::DispatchKey::FuncTorchGradWrapper}));
}

}  // namespace

void require_pageable(const at::Tensor& tensor, const std::string& name, c10::Device device) {
  PAGODA_REQUIRE(tensor.defined(), "parameter '{}' is no tensor", name);
  PAGODA_REQUIRE(!is_wrapper(tensor) && !tensor.is_nested(),
                 "parameter '{}' is a tensor subclass that keeps its own storage: "
                 "use a plain tensor for it",
                 name);
  PAGODA_REQUIRE(tensor.layout() == at::kStrided && !tensor.is_quantized(),
                 "parameter '{}' is sparse, quantized or packed ({}): only dense tensors of plain "
                 "numbers can be paged",
                 name, c10::toString(tensor.options().computeDispatchKey()));
  PAGODA_REQUIRE(tensor.has_storage() && !tensor.is_meta() && !tensor._is_zerotensor(),
                 "parameter '{}' has no values: materialize it before it becomes a page", name);
  PAGODA_REQUIRE(!PageStorage::lost(tensor.storage()),
                 "the page of parameter '{}' went with its engine: build or load the model again, "
                 "and release() it before its engine is closed the next time",
                 name);
  PAGODA_REQUIRE(tensor.is_cpu() || tensor.device() == device,
                 "parameter '{}' is on {} and the engine on {}: move the model there or to the "
                 "CPU, or make the engine with that device",
                 name, tensor.device().str(), device.str());
}

void require_pageable(const std::vector<std::pair<std::string, at::Tensor>>& parameters,
                      c10::Device device) {
  const auto on_meta = [](const auto& item) {
    return item.second.defined() && !is_wrapper(item.second) && item.second.is_meta();
  };
  const auto first = std::find_if(parameters.begin(), parameters.end(), on_meta);
  if (first != parameters.end()) {
    const auto others = std::count_if(first + 1, parameters.end(), on_meta);
    throw UserError(fmt::format(
        "parameter '{}'{} on the meta device and {} no values: make or load the model inside "
        "engine.build(), or call model.to_empty(device='cpu') and initialize it before attach()",
        first->first,
        others == 0 ? " is" : fmt::format(" and {} other{} are", others, others == 1 ? "" : "s"),
        others == 0 ? "has" : "have"));
  }
  for (const auto& [name, tensor] : parameters) require_pageable(tensor, name, device);
}

kernels::Dtype require_trainable(const at::Tensor& tensor, const std::string& name) {
  PAGODA_REQUIRE(!tensor.is_complex(),
                 "parameter '{}' is complex: train its real view (torch.view_as_real) "
                 "instead, or freeze it",
                 name);
  const auto known = element_type(tensor);
  PAGODA_REQUIRE(known.has_value(),
                 "parameter '{}' is {}; only fp32, bf16 and fp16 parameters can be trained: call "
                 "model.float(), or freeze it",
                 name, c10::getDtypeNames(tensor.scalar_type()).first);
  PAGODA_REQUIRE(!tensor.is_inference(),
                 "parameter '{}' was made in inference mode, where autograd does not see it: make "
                 "the model outside of it",
                 name);
  PAGODA_REQUIRE(at::has_internal_overlap(tensor) != at::MemOverlap::Yes,
                 "several elements of parameter '{}' share one place in memory (expand()): train a "
                 "parameter without copies, and expand it where it is used",
                 name);
  PAGODA_REQUIRE(
      !tensor.is_neg(),
      "parameter '{}' is a lazy negation (the imaginary part of a conjugate): make it of "
      "tensor.resolve_neg()",
      name);
  return *known;
}

}  // namespace pagoda::torch
