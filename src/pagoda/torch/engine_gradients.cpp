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
  runtime_->begin_backward(last.value_or(backwards_ + 1 == runtime_->config().accumulation));
  const double scale = runtime_->loss_scale();
  try {
    torch::run_backward(scale == 1 ? loss : loss * scale, pass_);
  } catch (...) {
    pass_.store(torch::kNoPass);
    runtime_->check();  // the engine's own error says more than the operator's
    backward_failed();
    throw;
  }
  pass_.store(torch::kNoPass);
  ++backwards_;
  end_of_backward(Learn::Exactly);
  runtime_->end_backward();
}

void Engine::Impl::zero_grad() {
  runtime_->zero_grad();  // throws before anything is dropped
  drop_gradients();
  backwards_ = 0;
}

/// What the runtime has not been given yet. (What is in p.grad and came from no pass is the
/// user's.)
void Engine::Impl::drop_gradients() {
  (void)forget_failed_passes();
  const std::lock_guard lock(gradient_mutex_);
  for (Parameter& parameter : parameters_) {
    if (parameter.fired == 0 && !parameter.left) continue;
    parameter.fired = 0;
    parameter.left = false;
    if (auto alive = parameter.tensor.lock()) {
      at::Tensor(std::move(alive)).mutable_grad() = at::Tensor();
    }
  }
  partial_.clear();
}

/// How often hooks fired says nothing. As ever with torch, the gradients that have come stay, until
/// zero_grad() drops them.
void Engine::Impl::backward_failed() {
  const std::lock_guard lock(gradient_mutex_);
  for (Parameter& parameter : parameters_) {
    parameter.left = parameter.left || parameter.fired > 0;
    parameter.fired = 0;
  }
}

void Engine::Impl::gradient_ready(std::size_t index, const at::Tensor& tensor) {
  runtime_->check();
  Parameter& parameter = parameters_[index];
  if (!tensor.grad().defined()) return;
  const int ours = pass_.load();
  const int pass = ours != torch::kNoPass ? ours : plain_pass();
  const std::lock_guard lock(gradient_mutex_);
  ++parameter.fired;
  const bool nested = pass != torch::current_pass();
  // Inside a checkpoint's own backward the parameter may come again: until it is known how often,
  // its gradient stays where torch adds to it.
  const std::size_t expected = parameter.fires != 0 ? parameter.fires : nested ? 0 : 1;
  if (expected != 0 && parameter.fired == expected) take_gradient(index, tensor);
}

/// In the callback that autograd queues for the end of a pass. Where the pass fails it is dropped
/// without having been called.
struct Engine::Impl::OpenPass {
  OpenPass(std::shared_ptr<PlainPasses> among, int number)
      : passes(std::move(among)), number(number) {}
  OpenPass(const OpenPass&) = delete;
  OpenPass& operator=(const OpenPass&) = delete;
  ~OpenPass() {
    const std::lock_guard lock(passes->mutex);
    if (std::erase(passes->open, number) > 0) passes->failed = true;
  }

  /// The pass goes to its end. Whether it is the outermost.
  bool ends() const {
    const std::lock_guard lock(passes->mutex);
    const bool outermost = !passes->open.empty() && passes->open.front() == number;
    std::erase(passes->open, number);
    if (outermost) passes->open.clear();
    return outermost;
  }

  const std::shared_ptr<PlainPasses> passes;
  const int number;
};

/// The outermost pass under way where the user calls loss.backward(): the first that was seen and
/// is not over. When it ends, so does the micro-batch.
int Engine::Impl::plain_pass() {
  const int here = torch::current_pass();
  bool fresh = false;
  bool failed = false;
  int outermost = here;
  {
    const std::lock_guard lock(plain_passes_->mutex);
    std::vector<int>& open = plain_passes_->open;
    failed = std::exchange(plain_passes_->failed, false);
    fresh = std::find(open.begin(), open.end(), here) == open.end();
    if (fresh) open.push_back(here);
    outermost = open.front();
  }
  if (failed) backward_failed();
  if (fresh) {
    torch::at_end_of_pass([this, pass = std::make_shared<OpenPass>(plain_passes_, here)] {
      if (!pass->ends()) return;
      // A checkpoint's own pass is seen, the one around it only if a hook fires there.
      end_of_backward(Learn::AtLeast);
      runtime_->end_backward();
    });
  }
  return outermost;
}

/// Takes p.grad and hands it on, in the layout of the storage.
void Engine::Impl::take_gradient(std::size_t index, const at::Tensor& tensor) {
  Parameter& parameter = parameters_[index];
  // Another storage since forward: its gradient fits if that becomes the page.
  if (tensor.storage().unsafeGetStorageImpl() != parameter.storage->key()) storage_exchanged(index);
  parameter.left = false;
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

/// Whether a pass of the user's has failed since. Where none can be under way, none is.
bool Engine::Impl::forget_failed_passes() {
  const std::lock_guard lock(plain_passes_->mutex);
  bool failed = std::exchange(plain_passes_->failed, false);
  if (!torch::in_backward()) {
    failed = failed || !plain_passes_->open.empty();
    plain_passes_->open.clear();
  }
  return failed;
}

/// What was held back in this pass goes on its way; how often each hook fires is known now.
void Engine::Impl::end_of_backward(Learn learn) {
  if (learn == Learn::Nothing && forget_failed_passes()) backward_failed();
  const std::lock_guard lock(gradient_mutex_);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    if (parameter.fired == 0 && !parameter.left) continue;
    if (auto alive = parameter.tensor.lock()) {
      const at::Tensor tensor(std::move(alive));
      if (tensor.grad().defined()) take_gradient(i, tensor);
    }
    parameter.left = false;
    const std::size_t fired = std::exchange(parameter.fired, 0);
    if (learn == Learn::AtLeast) parameter.fires = std::max(parameter.fires, fired);
    if (learn == Learn::Exactly && fired > 0) parameter.fires = fired;
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
  end_of_backward(Learn::Nothing);
  std::vector<float> flat(storage->page()->elements);
  runtime_->read_gradient(*storage->page(), flat);
  const at::Tensor all = at::empty({static_cast<std::int64_t>(flat.size())}, at::kFloat);
  std::copy(flat.begin(), flat.end(), all.mutable_data_ptr<float>());
  return all.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset()).clone();
}

}  // namespace pagoda
