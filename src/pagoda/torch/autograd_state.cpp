// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/autograd_state.h"

#include <torch/csrc/autograd/graph_task.h>

namespace pagoda::torch {

bool in_backward() noexcept {
  return ::torch::autograd::get_current_graph_task_id() != -1;
}

int current_pass() noexcept {
  return ::torch::autograd::get_current_graph_task_id();
}

}  // namespace pagoda::torch
