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
#include "pagoda/torch/storage_table.h"

namespace pagoda {
namespace {

/// Does the tensor's memory, in order, hold each of its elements once and nothing else.
bool covers_storage(const at::Tensor& tensor, std::uint64_t elements) {
  return tensor.storage_offset() == 0 && static_cast<std::uint64_t>(tensor.numel()) == elements &&
         tensor.is_non_overlapping_and_dense();
}

void require_dense(const at::Tensor& grad, const std::string& parameter) {
  PAGODA_REQUIRE(!grad.is_sparse(),
                 "parameter '{}' got a sparse gradient: build its embedding with sparse=false",
                 parameter);
  PAGODA_REQUIRE(grad.layout() == at::kStrided && grad.has_storage() && !grad.is_meta(),
                 "parameter '{}' got a gradient that is no dense tensor", parameter);
}

}  // namespace

void Engine::Impl::backward(const at::Tensor& loss, std::optional<bool> last) {
  runtime_->check();
  PAGODA_REQUIRE(!parameters_.empty(), "no model is attached: call attach() first");
  for (const Parameter& parameter : parameters_) require_none_set(parameter);
  runtime_->begin_backward(last.value_or(backwards_ + 1 == runtime_->config().accumulation));
  const double scale = runtime_->loss_scale();
  try {
    // Not a parameter itself, whose own hooks the pass must not change.
    torch::run_backward(scale == 1 && !loss.is_leaf() ? loss : loss * scale, pass_);
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
  for (Parameter& parameter : parameters_) {
    parameter.given = false;
    if (auto alive = parameter.tensor.lock()) {
      at::Tensor(std::move(alive)).mutable_grad() = at::Tensor();
    }
  }
}

bool Engine::Impl::has_gradients() {
  const std::lock_guard lock(gradient_mutex_);
  return std::any_of(parameters_.begin(), parameters_.end(), [](const Parameter& parameter) {
    return parameter.given || parameter.fired > 0;
  });
}

double Engine::Impl::grad_norm() {
  PAGODA_REQUIRE(!parameters_.empty(), "no model is attached: call attach() first");
  end_of_backward(Learn::Nothing);
  take_set_gradients();
  return runtime_->grad_norm();
}

/// A gradient in p.grad that no hook of ours has seen, when a pass is about to add to it: that
/// would be torch's sum of both only if the engine had not taken what came before.
void Engine::Impl::require_none_set(const Parameter& parameter) const {
  // p.grad is held back until the pass is over, or was left by one that failed.
  if (parameter.fired > 0 || parameter.left) return;
  const auto alive = parameter.tensor.lock();
  PAGODA_REQUIRE(alive == nullptr || !at::Tensor(alive).grad().defined(),
                 "p.grad of '{}' is set and backward would add to it, but gradients belong to the "
                 "engine: call step() to train with it, or zero_grad() to drop it",
                 parameter.name);
}

/// What the user has put into p.grad becomes the gradient of this step, as torch.optim would take
/// it: on several ranks, the mean of what they have put there.
void Engine::Impl::take_set_gradients() {
  std::vector<std::pair<std::size_t, at::Tensor>> set;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const Parameter& parameter = parameters_[i];
    auto alive = parameter.tensor.lock();
    if (alive == nullptr) continue;
    at::Tensor tensor(std::move(alive));
    if (!tensor.grad().defined()) continue;
    PAGODA_REQUIRE(!parameter.given,
                   "p.grad of '{}' was set, and backward() has given it a gradient in this step: "
                   "change gradients in a hook (p.register_hook), or call zero_grad() before "
                   "p.grad is set",
                   parameter.name);
    PAGODA_REQUIRE(runtime_->config().loss_scale.kind == LossScale::Kind::None,
                   "p.grad of '{}' was set, and with a loss_scale it is not known whether it was "
                   "multiplied by it: call backward((p * gradient).sum()) instead",
                   parameter.name);
    require_dense(tensor.grad(), parameter.name);
    set.emplace_back(i, std::move(tensor));
  }
  if (set.empty()) return;
  try {
    runtime_->begin_backward(false);
  } catch (const UserError& error) {
    throw UserError(
        fmt::format("p.grad of '{}' was set: {}", parameters_[set[0].first].name, error.message()));
  }
  {
    const std::lock_guard lock(gradient_mutex_);
    for (const auto& [index, tensor] : set) take_gradient(index, tensor);
  }
  end_of_backward(Learn::Nothing);
  runtime_->end_backward();
}

void Engine::Impl::gradient_comes(std::size_t index) {
  const std::lock_guard lock(gradient_mutex_);
  require_none_set(parameters_[index]);
}

/// Where loss.backward() was called and not ours, nobody has multiplied the loss, and step() would
/// divide all the same.
void Engine::Impl::require_scaled_loss(const Parameter& parameter, const at::Tensor& tensor) const {
  if (runtime_->config().loss_scale.kind == LossScale::Kind::None) return;
  if (pass_.load() != torch::kNoPass || loss_is_scaled_.load()) return;
  tensor.mutable_grad() = at::Tensor();
  throw UserError(fmt::format(
      "a plain backward pass reached parameter '{}', and loss_scale ({}) asks for a loss that is "
      "multiplied by it: call engine.backward(loss) instead of loss.backward()",
      parameter.name, runtime_->loss_scale()));
}

/// What the runtime has not been given yet. (What is in p.grad and came from no pass is the
/// user's.)
void Engine::Impl::drop_gradients() {
  (void)forget_failed_passes();
  const std::lock_guard lock(gradient_mutex_);
  for (Parameter& parameter : parameters_) {
    if (parameter.fired == 0 && !parameter.left) continue;
    parameter.fired = parameter.taken = 0;
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
    parameter.fired = parameter.taken = 0;
  }
}

void Engine::Impl::gradient_ready(std::size_t index, const at::Tensor& tensor) {
  runtime_->check();
  Parameter& parameter = parameters_[index];
  if (!tensor.grad().defined()) return;
  const int ours = pass_.load();
  const int pass = ours != torch::kNoPass ? ours : plain_pass();
  const std::lock_guard lock(gradient_mutex_);
  require_scaled_loss(parameter, tensor);
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
  at::Tensor grad = tensor.grad();
  tensor.mutable_grad() = at::Tensor();
  require_dense(grad, parameter.name);
  // A page's own memory is read by operators only.
  if (torch::StorageTable::instance().find(grad.storage().unsafeGetStorageImpl()) != nullptr) {
    grad = grad.clone();
  }
  const at::DisableRecordFunctionGuard unseen;
  parameter.taken = parameter.fired;
  parameter.given = true;
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
      // What was set after it had been taken is the user's: step() sees to it.
      if (tensor.grad().defined() && (parameter.left || parameter.taken < parameter.fired)) {
        take_gradient(i, tensor);
      }
    }
    parameter.left = false;
    parameter.taken = 0;
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
  take_set_gradients();
  std::vector<float> flat(storage->page()->elements);
  runtime_->read_gradient(*storage->page(), flat);
  const at::Tensor all = at::empty({static_cast<std::int64_t>(flat.size())}, at::kFloat);
  std::copy(flat.begin(), flat.end(), all.mutable_data_ptr<float>());
  if (const double scale = runtime_->loss_scale(); scale != 1) all.div_(scale);
  return all.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset()).clone();
}

}  // namespace pagoda
