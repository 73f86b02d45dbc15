// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/sparse_parts.h"

#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>

namespace pagoda::torch {

c10::SmallVector<at::Tensor, 3> sparse_parts(const at::Tensor& tensor) {
  const c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  if (tensor.is_sparse()) {
    const auto& coo = *static_cast<const at::SparseTensorImpl*>(impl);
    return {coo.indices(), coo.values()};
  }
  if (impl->is_sparse_compressed()) {
    const auto& compressed = *static_cast<const at::SparseCsrTensorImpl*>(impl);
    return {compressed.compressed_indices(), compressed.plain_indices(), compressed.values()};
  }
  return {};
}

}  // namespace pagoda::torch
