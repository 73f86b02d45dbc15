// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "pagoda/engine/frozen_parameters.h"
#include "pagoda/engine/initial_values.h"
#include "pagoda/kernels/element.h"
#include "pagoda/optim/optimizer.h"
#include "pagoda/optim/trained_page.h"
#include "pagoda/pager/page.h"

namespace pagoda::engine {

/// A page that is given to the optimizer, as the model describes it.
struct TrainedSpec {
  pager::Page* page = nullptr;
  kernels::Dtype dtype = kernels::Dtype::F32;
  std::vector<optim::Segment> segments;
  std::vector<optim::TrainedParameter> parameters;
};

/// A parameter as a tensor. Its bytes go from rank to rank as they lie in the storage, so ranks
/// must agree on how to read them.
struct TensorSpec {
  std::string name;
  std::string form;  ///< its type, shape and place in the storage: "float32 [4, 16]"
};

/// A model, as attach() takes it.
struct ModelSpec {
  std::vector<pager::Page*> pages;  // trained or not, in an order that is the same on all ranks
  std::vector<TrainedSpec> trained;
  std::vector<Optimizer> groups;
  std::vector<BufferSpec> buffers;
  /// Which parameters of `trained` are not, until set_thawed() says so.
  std::vector<FrozenSpec> frozen = {};
  /// What lies in `pages`, in the model's order.
  std::vector<TensorSpec> tensors = {};
};

}  // namespace pagoda::engine
