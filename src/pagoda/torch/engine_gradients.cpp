// SPDX-License-Identifier: Apache-2.0
// Gradients on their way from p.grad to the runtime, and what of p.grad is whose.
#include <algorithm>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "pagoda/base/error.h"
#include "pagoda/torch/autograd_state.h"
#include "pagoda/torch/engine_impl.h"
#include "pagoda/torch/passes.h"
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
                 "parameter '{}' got a gradient that is not a dense tensor", parameter);
}

}  // namespace

void Engine::Impl::zero_grad() {
  const Calling calling(*this, "zero_grad()");
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
    return parameter.given || parameter.fired > 0 || parameter.late;
  });
}

double Engine::Impl::grad_norm() {
  const Calling calling(*this, "grad_norm()");
  PAGODA_REQUIRE(!parameters_.empty(), "no model is attached: call attach() first");
  end_last_pass();
  take_set_gradients();
  push_late();
  return runtime_->grad_norm();
}

/// A gradient in p.grad that no hook of ours has seen, when a pass is about to add to it: that
/// would be torch's sum of both only if the engine had not taken what came before.
void Engine::Impl::require_none_set(const Parameter& parameter) const {
  // p.grad is held back until the pass is over, was left by one that failed, or waits for step().
  if (parameter.fired > 0 || parameter.coming || parameter.left || parameter.late) return;
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
    if (!tensor.grad().defined() || parameter.late) continue;
    PAGODA_REQUIRE(tensor.requires_grad(),
                   "p.grad of the frozen parameter '{}' is set: call requires_grad_() to train it, "
                   "or set its p.grad to None",
                   parameter.name);
    if (parameter.page == nullptr) {  // cannot be trained, as step() will say
      tensor.mutable_grad() = at::Tensor();
      continue;
    }
    PAGODA_REQUIRE(!parameter.given,
                   "p.grad of '{}' was set, and backward() has given it a gradient in this step: "
                   "set p.grad to None and call step() again. To change gradients use a hook "
                   "(p.register_hook), or call zero_grad() before p.grad is set",
                   parameter.name);
    PAGODA_REQUIRE(runtime_->config().loss_scale.kind == LossScale::Kind::None,
                   "p.grad of '{}' was set, and with a loss_scale it is not known whether it was "
                   "multiplied by it: call backward((p * gradient).sum()) instead",
                   parameter.name);
    require_dense(tensor.grad(), parameter.name);
    set.emplace_back(i, std::move(tensor));
  }
  if (set.empty()) return;
  {
    const std::lock_guard lock(gradient_mutex_);
    look_for_thawed();
  }
  try {
    runtime_->begin_backward(false);
  } catch (const UserError& error) {
    throw UserError(
        fmt::format("p.grad of '{}' was set: {}", parameters_[set[0].first].name, error.message()));
  }
  for (const auto& [index, tensor] : set) take_gradient(index, tensor);
  end_of_backward();
  runtime_->end_backward();
}

/// Behind what this thread has given to torch's current stream.
device::Mark Engine::Impl::mark_here() {
  const auto stream = consumer();
  return stream != nullptr ? stream->mark() : device::Mark{};
}

/// What this thread gives to torch's current stream from now on may use the tensor, which another
/// stream has made. (A custom function has a stream of its own only until its end is told.)
void Engine::Impl::wait_here(const device::Mark& made, const at::Tensor& tensor) {
  const auto stream = consumer();
  if (stream == nullptr || made.event == nullptr || made.stream == stream->id()) return;
  stream->wait(*made.event, device::Stream::OnFailure::Ignore);
  const c10::impl::VirtualGuardImpl guard(c10::kCUDA);  // torch must not reuse its memory before
  guard.recordDataPtrOnStream(tensor.storage().data_ptr(), guard.getStream(device()));
}

/// What a graph would replay is the kernels of a pass, and not what the engine does with gradients.
void Engine::Impl::require_no_capture(const Parameter& parameter, const at::Tensor& tensor) {
  const auto stream = consumer();
  if (stream == nullptr || !stream->capturing()) return;
  tensor.mutable_grad() = at::Tensor();  // nothing has been computed
  throw UserError(fmt::format(
      "the gradient of parameter '{}' came while a CUDA graph is captured, and the engine cannot "
      "take it from there: capture the forward (torch.cuda.make_graphed_callables), and call "
      "backward() outside of the capture",
      parameter.name));
}

/// Where loss.backward() was called and not ours, nobody has multiplied the loss, and step() would
/// divide all the same. What a GradScaler multiplies, nobody divides.
void Engine::Impl::require_scaled_loss(const Parameter& parameter, const at::Tensor& tensor) const {
  if (torch::Passes::instance().is_scaled()) {
    tensor.mutable_grad() = at::Tensor();
    throw UserError(fmt::format(
        "a loss that a GradScaler has scaled reached parameter '{}', and the engine, which owns "
        "its gradient, does not divide by that scale: create the engine with "
        "loss_scale='dynamic' and call engine.backward(loss) with the unscaled loss",
        parameter.name));
  }
  if (runtime_->config().loss_scale.kind == LossScale::Kind::None) return;
  if (pass_.load() != torch::kNoPass || loss_is_scaled_.load()) return;
  tensor.mutable_grad() = at::Tensor();
  throw UserError(
      fmt::format("loss.backward() reached parameter '{}', and with loss_scale = {} the loss must "
                  "be multiplied by it: call engine.backward(loss) instead",
                  parameter.name, runtime_->loss_scale()));
}

/// What the runtime has not been given yet. (What is in p.grad and came from no pass is the
/// user's.)
void Engine::Impl::drop_gradients() {
  (void)forget_failed_passes();
  forget_gradients();
}

void Engine::Impl::forget_gradients() {
  const auto partial = take_partial();
  std::vector<at::Tensor> dropped;  // after the lock: what a gradient's memory ends with may wait
  const std::lock_guard lock(gradient_mutex_);
  untaken_ = nullptr;
  for (Parameter& parameter : parameters_) {
    if (parameter.fired == 0 && !parameter.coming && !parameter.left && !parameter.late) continue;
    parameter.fired = parameter.taken = 0;
    parameter.coming = parameter.left = parameter.late = false;
    parameter.held = {};
    if (auto alive = parameter.tensor.lock()) {
      const at::Tensor& tensor = dropped.emplace_back(std::move(alive));  // nobody else may have it
      dropped.push_back(std::exchange(tensor.mutable_grad(), at::Tensor()));
    }
  }
}

/// Takes p.grad and hands it on, in the layout of the storage. Called without gradient_mutex_, for
/// it may wait: for room on the device, for a page, for memory. Nothing overtakes it all the same:
/// torch runs the hooks of one parameter one at a time, and a pass is over when its hooks are, so a
/// page's next gradient comes after this one has been handed on. Within a pass the reducer takes
/// pages in any order.
void Engine::Impl::take_gradient(std::size_t index, const at::Tensor& tensor, bool late) {
  Parameter& parameter = parameters_[index];
  // Another storage since forward: its gradient fits if that becomes the page.
  if (tensor.storage().unsafeGetStorageImpl() != parameter.storage->key()) storage_exchanged(index);
  at::Tensor grad = std::exchange(tensor.mutable_grad(), at::Tensor());
  device::Mark held;
  {
    const std::lock_guard lock(gradient_mutex_);
    parameter.left = false;
    held = std::exchange(parameter.held, {});
  }
  require_dense(grad, parameter.name);
  wait_here(held, grad);
  // A page's own memory is read by operators only.
  if (torch::StorageTable::instance().find(grad.storage().unsafeGetStorageImpl()) != nullptr) {
    grad = grad.clone();
  }
  const at::DisableRecordFunctionGuard unseen;
  {
    const std::lock_guard lock(gradient_mutex_);
    parameter.taken = parameter.fired;
    parameter.given = true;
  }
  grad = grad.detach();
  optim::TrainedPage& page = *parameter.page;
  const std::uint64_t elements = page.elements();
  if (page.parameters.size() == 1 && covers_storage(tensor, elements)) {
    if (grad.strides() != tensor.strides() || grad.scalar_type() != tensor.scalar_type() ||
        grad.is_neg() || grad._is_zerotensor()) {
      at::Tensor same = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options());
      same.copy_(grad);
      grad = std::move(same);
    }
    push(page, std::move(grad), {true}, late);
    return;
  }
  if (auto whole = add_to_partial(parameter, tensor, grad)) {
    push(page, std::move(*whole), late);
  }
}

/// Adds to what the parameters of a page have of their gradients; all of it, when it is complete.
/// The sum is taken out meanwhile: operators run without the lock, and memory may be waited for.
std::optional<Engine::Impl::Partial> Engine::Impl::add_to_partial(const Parameter& parameter,
                                                                  const at::Tensor& tensor,
                                                                  const at::Tensor& grad) {
  const optim::TrainedPage& page = *parameter.page;
  std::vector<c10::intrusive_ptr<c10::TensorImpl>> seen;  // go after the lock, as the sum does
  Partial partial;
  std::unique_lock lock(gradient_mutex_);
  added_.wait(lock, [&] { return !adding_.contains(&page); });
  adding_.insert(&page);
  if (auto known = partial_.extract(&page)) partial = std::move(known.mapped());
  lock.unlock();
  const auto put_back = [&] {
    lock.lock();
    adding_.erase(&page);
    added_.notify_all();
    if (partial.flat.defined()) partial_.insert_or_assign(&page, std::move(partial));
  };
  try {
    if (!partial.flat.defined()) {
      partial.flat = at::zeros({static_cast<std::int64_t>(page.elements())}, tensor.options());
      partial.present.resize(page.parameters.size());
    }
    wait_here(partial.summed, partial.flat);
    partial.flat.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset()).add_(grad);
    partial.summed = mark_here();
  } catch (...) {
    put_back();
    throw;
  }
  partial.present[parameter.in_page] = true;
  put_back();
  if (!is_complete(partial_.at(&page), page, seen)) return std::nullopt;
  return std::move(partial_.extract(&page).mapped());
}

/// The sums that pages with several parameters have; nobody adds to one meanwhile.
std::unordered_map<const optim::TrainedPage*, Engine::Impl::Partial> Engine::Impl::take_partial() {
  std::unique_lock lock(gradient_mutex_);
  added_.wait(lock, [&] { return adding_.empty(); });
  return std::exchange(partial_, {});
}

void Engine::Impl::push(const optim::TrainedPage& page, Partial gathered, bool late) {
  wait_here(gathered.summed, gathered.flat);
  push(const_cast<optim::TrainedPage&>(page), std::move(gathered.flat), std::move(gathered.present),
       late);
}

void Engine::Impl::push(optim::TrainedPage& page, at::Tensor flat, std::vector<bool> present,
                        bool late) {
  engine::Contribution contribution;
  contribution.page = &page;
  contribution.present = std::move(present);
  contribution.late = late;
  contribution.data = static_cast<const std::byte*>(flat.const_data_ptr());
  contribution.ready = mark_here();
  contribution.keep = std::make_shared<at::Tensor>(std::move(flat));
  runtime_->contribute(std::move(contribution));
}

/// The page of a parameter, also of one that was given a storage (.data =) which no operator has
/// used yet, and could be its page; or that of the tensor's storage.
const pager::Page& Engine::Impl::page_of(const at::Tensor& tensor) const {
  for (const Parameter& parameter : parameters_) {
    if (parameter.key != tensor.unsafeGetTensorImpl()) continue;
    if (tensor.storage().unsafeGetStorageImpl() != parameter.storage->key()) {
      require_page_of_its_kind(parameter, tensor);
    }
    require_layout(parameter, tensor);
    return *parameter.storage->page();
  }
  const torch::PageStorage* const storage = find(tensor);
  PAGODA_REQUIRE(storage != nullptr, "the tensor is not a parameter of this engine");
  return *storage->page();
}

at::Tensor Engine::Impl::grad(const at::Tensor& tensor) {
  const Calling calling(*this, "grad()");
  const pager::Page& page = page_of(tensor);
  end_last_pass();
  take_set_gradients();
  push_late();
  const std::uint64_t elements = page.elements;
  const at::Tensor all = at::empty({static_cast<std::int64_t>(elements)}, at::kFloat);
  runtime_->read_gradient(page, {all.mutable_data_ptr<float>(), elements});
  if (const double scale = runtime_->loss_scale(); scale != 1) all.div_(scale);
  const at::Tensor out = all.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return covers_storage(tensor, elements) ? out : out.clone();  // nobody else's elements
}

}  // namespace pagoda
