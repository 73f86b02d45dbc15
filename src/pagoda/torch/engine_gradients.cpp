// SPDX-License-Identifier: Apache-2.0
// Gradients on their way from autograd to the runtime: passes, hooks, and what of p.grad is whose.
#include <algorithm>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/record_function.h>

#include "pagoda/base/error.h"
#include "pagoda/torch/autograd_state.h"
#include "pagoda/torch/engine_impl.h"
#include "pagoda/torch/gradient_hook.h"

namespace pagoda {
namespace {

/// Does the tensor's memory, in order, hold each of its elements once and nothing else.
bool covers_storage(const at::Tensor& tensor, std::uint64_t elements) {
  return tensor.storage_offset() == 0 && static_cast<std::uint64_t>(tensor.numel()) == elements &&
         tensor.is_non_overlapping_and_dense();
}

}  // namespace

void Engine::Impl::backward(const at::Tensor& loss, std::optional<bool> last) {
  runtime_->check();
  PAGODA_REQUIRE(!parameters_.empty(), "no model is attached: call attach() first");
  ++backwards_;
  runtime_->begin_backward(last.value_or(backwards_ == runtime_->config().accumulation));
  const double scale = runtime_->loss_scale();
  try {
    torch::run_backward(scale == 1 ? loss : loss * scale, pass_);
  } catch (...) {
    pass_.store(torch::kNoPass);
    runtime_->check();  // the engine's own error says more than the operator's
    throw;
  }
  pass_.store(torch::kNoPass);
  end_of_backward();
  runtime_->end_backward();
}

void Engine::Impl::zero_grad() {
  end_of_backward();
  runtime_->zero_grad();
  backwards_ = 0;
}

void Engine::Impl::gradient_ready(std::size_t index, const at::Tensor& tensor) {
  runtime_->check();
  Parameter& parameter = parameters_[index];
  if (!tensor.grad().defined()) return;
  const std::lock_guard lock(gradient_mutex_);
  ++parameter.fired;
  const int pass = pass_.load() != torch::kNoPass ? pass_.load() : plain_pass();
  const bool nested = pass != torch::current_pass();
  // Inside a checkpoint's own backward the parameter may come again: until it is known how often,
  // its gradient stays where torch adds to it.
  const std::size_t expected = parameter.fires != 0 ? parameter.fires : nested ? 0 : 1;
  if (expected != 0 && parameter.fired == expected) take_gradient(parameter, tensor);
}

/// The outermost pass under way where the user calls loss.backward(): the first that was seen and
/// has not ended. When it ends, so does the micro-batch. Holds gradient_mutex_.
int Engine::Impl::plain_pass() {
  const int here = torch::current_pass();
  if (std::find(plain_passes_.begin(), plain_passes_.end(), here) == plain_passes_.end()) {
    plain_passes_.push_back(here);
    torch::at_end_of_pass([this, here] {
      {
        const std::lock_guard lock(gradient_mutex_);
        const bool outermost = !plain_passes_.empty() && plain_passes_.front() == here;
        std::erase(plain_passes_, here);
        if (!outermost) return;
        plain_passes_.clear();
      }
      end_of_backward();
      runtime_->end_backward();
    });
  }
  return plain_passes_.front();
}

/// Takes p.grad and hands it on, in the layout of the storage.
void Engine::Impl::take_gradient(Parameter& parameter, const at::Tensor& tensor) {
  const at::DisableRecordFunctionGuard unseen;
  at::Tensor grad = tensor.grad();
  tensor.mutable_grad() = at::Tensor();
  if (grad.is_sparse()) {
    throw UserError(
        fmt::format("parameter '{}' got a sparse gradient: build its embedding with "
                    "sparse=false",
                    parameter.name));
  }
  grad = grad.detach();
  optim::TrainedPage& page = *parameter.page;
  const std::uint64_t elements = page.elements();
  if (page.parameters.size() == 1 && covers_storage(tensor, elements)) {
    if (grad.strides() != tensor.strides() || grad.scalar_type() != tensor.scalar_type()) {
      at::Tensor same = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options());
      same.copy_(grad);
      grad = std::move(same);
    }
    push(page, std::move(grad), {true});
    return;
  }
  Partial& partial = partial_[&page];
  if (!partial.flat.defined()) {
    partial.flat = at::zeros({static_cast<std::int64_t>(elements)}, tensor.options());
    partial.present.assign(page.parameters.size(), false);
  }
  partial.flat.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset()).add_(grad);
  partial.present[parameter.in_page] = true;
  if (std::all_of(partial.present.begin(), partial.present.end(), [](bool p) { return p; })) {
    Partial whole = std::move(partial);
    partial_.erase(&page);
    push(page, std::move(whole.flat), std::move(whole.present));
  }
}

void Engine::Impl::push(optim::TrainedPage& page, at::Tensor flat, std::vector<bool> present) {
  engine::Contribution contribution;
  contribution.page = &page;
  contribution.present = std::move(present);
  contribution.data = static_cast<const std::byte*>(flat.const_data_ptr());
  if (const auto stream = consumer()) contribution.ready = stream->mark();
  contribution.keep = std::make_shared<at::Tensor>(std::move(flat));
  runtime_->contribute(std::move(contribution));
}

/// What was held back in this pass goes on its way; how often each hook fires is known now.
void Engine::Impl::end_of_backward() {
  const std::lock_guard lock(gradient_mutex_);
  for (Parameter& parameter : parameters_) {
    if (parameter.fired == 0) continue;
    if (auto alive = parameter.tensor.lock()) {
      const at::Tensor tensor(std::move(alive));
      if (tensor.grad().defined()) take_gradient(parameter, tensor);
    }
    parameter.fires = std::exchange(parameter.fired, 0);
  }
  auto partial = std::move(partial_);
  partial_.clear();
  for (auto& [page, gathered] : partial) {
    push(*const_cast<optim::TrainedPage*>(page), std::move(gathered.flat),
         std::move(gathered.present));
  }
}

at::Tensor Engine::Impl::grad(const at::Tensor& tensor) {
  torch::PageStorage* storage = find(tensor);
  PAGODA_REQUIRE(storage != nullptr, "the tensor is no parameter of this engine");
  end_of_backward();
  const std::uint64_t elements = storage->page()->elements;
  const at::Tensor all = at::empty({static_cast<std::int64_t>(elements)}, at::kFloat);
  runtime_->read_gradient(*storage->page(), {all.mutable_data_ptr<float>(), elements});
  const at::Tensor out =
      all.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return covers_storage(tensor, elements) ? out : out.clone();  // nobody else's elements
}

}  // namespace pagoda
