// SPDX-License-Identifier: Apache-2.0
// Gradients on their way from autograd to the runtime: passes, hooks, and what of p.grad is whose.
#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/record_function.h>

#include "pagoda/base/error.h"
#include "pagoda/base/log.h"
#include "pagoda/torch/autograd_state.h"
#include "pagoda/torch/engine_impl.h"
#include "pagoda/torch/gradient_hook.h"
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
                 "parameter '{}' got a gradient that is no dense tensor", parameter);
}

}  // namespace

/// Called by autograd, on its threads. A pass may end later than the engine: then nobody is told.
class Engine::Impl::PassEvents final : public torch::PassListener {
 public:
  explicit PassEvents(Impl& engine) : engine_(&engine) {}

  void function_ended(const torch::CustomFunctions::Pages* pages) noexcept override {
    if (const Call call(*this); call.engine != nullptr) call.engine->function_ended(pages);
  }
  void pass_ended(int pass) override {
    const Call call(*this);
    if (call.engine == nullptr || !close(pass, false)) return;
    call.engine->plain_pass_ended();
  }
  void pass_failed(int pass) noexcept override { (void)close(pass, true); }
  /// The engine ends: waits for calls under way.
  void end() {
    RankedLock<LockRank::PlainPasses> lock(mutex);
    engine_ = nullptr;
    changed_.wait(lock, [&] { return calls_ == 0; });
  }

  RankedMutex<LockRank::PlainPasses> mutex;
  int open = torch::kNoPass;  // guarded by mutex: the user's pass that is a micro-batch
  bool failed = false;        // guarded by mutex: the one before ended with an error

 private:
  /// The engine stays while one lives.
  struct Call {
    explicit Call(PassEvents& of) : events(of) {
      const std::lock_guard lock(events.mutex);
      engine = events.engine_;
      ++events.calls_;
    }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;
    ~Call() {
      const std::lock_guard lock(events.mutex);
      if (--events.calls_ == 0) events.changed_.notify_all();
    }
    PassEvents& events;
    Impl* engine = nullptr;
  };

  /// False: another pass, inside that one, or backward()'s own.
  bool close(int pass, bool with_error) {
    const std::lock_guard lock(mutex);
    if (pass != open) return false;
    open = torch::kNoPass;
    failed = failed || with_error;
    return true;
  }

  Condition changed_;
  Impl* engine_;        // guarded by mutex
  unsigned calls_ = 0;  // guarded by mutex
};

std::shared_ptr<Engine::Impl::PassEvents> Engine::Impl::make_pass_events() {
  return std::make_shared<PassEvents>(*this);
}

void Engine::Impl::end_pass_events() {
  pass_events_->end();
}

void Engine::Impl::backward(const at::Tensor& loss, std::optional<bool> last) {
  const Calling calling(*this, "backward()");
  runtime_->check();
  PAGODA_REQUIRE(!parameters_.empty(), "no model is attached: call attach() first");
  end_failed_pass();
  keep_hooks();
  check_storages();
  for (const Parameter& parameter : parameters_) {
    const auto alive = parameter.tensor.lock();
    if (alive != nullptr && alive->requires_grad()) require_none_set(parameter);
  }
  {
    const std::lock_guard lock(gradient_mutex_);
    look_for_thawed();
  }
  runtime_->begin_backward(last.value_or(backwards_ + 1 == runtime_->config().accumulation));
  const double scale = runtime_->loss_scale();
  try {
    // Not a parameter itself, whose own hooks the pass must not change.
    torch::run_backward(scale == 1 && !loss.is_leaf() ? loss : loss * scale, pass_);
    rethrow_untaken();
  } catch (...) {
    pass_.store(torch::kNoPass);
    runtime_->check();  // the engine's own error says more than the operator's
    backward_failed();
    end_failed_pass();
    throw;
  }
  pass_.store(torch::kNoPass);
  ++backwards_;
  end_of_backward();
  runtime_->end_backward();
}

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
  if (parameter.fired > 0 || parameter.left || parameter.late) return;
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

void Engine::Impl::gradient_comes(std::size_t index) {
  require_one_pass(parameters_[index]);
  if (pass_.load() == torch::kNoPass) end_failed_pass();  // before torch adds to what it has left
  rethrow_untaken();
  const std::lock_guard lock(gradient_mutex_);
  require_none_set(parameters_[index]);
}

/// Gradients of one micro-batch are those of one pass: two at a time would be added up in p.grad by
/// timing.
void Engine::Impl::require_one_pass(const Parameter& parameter) const {
  int open = pass_.load();
  if (open == torch::kNoPass) {
    const std::lock_guard lock(pass_events_->mutex);
    open = pass_events_->open;
  }
  PAGODA_REQUIRE(open == torch::kNoPass || !torch::Passes::instance().runs_beside(open),
                 "two backward passes reach parameter '{}' at the same time, on two threads: run "
                 "one after the other",
                 parameter.name);
}

/// A call that needs all gradients came while another thread's loss.backward() runs. (One that has
/// failed is under way until autograd's threads have let go of it.)
void Engine::Impl::require_no_other_pass() const {
  constexpr auto kPatience = std::chrono::seconds(2);
  int open = torch::kNoPass;
  {
    const std::lock_guard lock(pass_events_->mutex);
    open = pass_events_->open;
  }
  if (open == torch::kNoPass || torch::in_backward()) return;
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while (torch::Passes::instance().under_way(open)) {
    PAGODA_REQUIRE(std::chrono::steady_clock::now() < until,
                   "a backward pass runs on another thread: one engine's calls and passes come "
                   "one after the other");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

/// One thread at a time; a hook may call from inside.
Engine::Impl::Calling::Calling(Impl& engine, const char* call) : engine_(engine) {
  const std::lock_guard lock(engine.calls_mutex_);
  const auto here = std::this_thread::get_id();
  PAGODA_REQUIRE(engine.calls_ == 0 || engine.caller_ == here,
                 "{} came while another thread is in {}: one engine's calls come one after the "
                 "other",
                 call, engine.call_);
  if (engine.calls_++ == 0) engine.call_ = call;
  engine.caller_ = here;
}

Engine::Impl::Calling::~Calling() {
  const std::lock_guard lock(engine_.calls_mutex_);
  --engine_.calls_;
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
  std::unordered_map<const optim::TrainedPage*, Partial> partial;
  std::vector<at::Tensor> dropped;  // after the lock: what a gradient's memory ends with may wait
  const std::lock_guard lock(gradient_mutex_);
  untaken_ = nullptr;
  for (Parameter& parameter : parameters_) {
    if (parameter.fired == 0 && !parameter.left && !parameter.late) continue;
    parameter.fired = parameter.taken = 0;
    parameter.left = parameter.late = false;
    if (auto alive = parameter.tensor.lock()) {
      dropped.push_back(std::exchange(at::Tensor(std::move(alive)).mutable_grad(), at::Tensor()));
    }
  }
  partial.swap(partial_);
}

/// How often hooks fired says nothing. As ever with torch, the gradients that have come stay, until
/// zero_grad() drops them.
void Engine::Impl::backward_failed() {
  const std::lock_guard lock(gradient_mutex_);
  failed_ = true;
  untaken_ = nullptr;
  for (Parameter& parameter : parameters_) {
    parameter.left = parameter.left || parameter.fired > 0;
    parameter.fired = parameter.taken = 0;
  }
}

/// A pass that failed was a micro-batch of its own: the gradients that it left are handed on before
/// those of another come.
void Engine::Impl::end_failed_pass() {
  bool failed = false;
  if (!torch::in_backward()) {
    failed = forget_failed_passes();
  } else {  // inside an open one, a pass within it may have failed: that is the open one's affair
    const std::lock_guard lock(pass_events_->mutex);
    failed = pass_events_->open == torch::kNoPass && std::exchange(pass_events_->failed, false);
  }
  if (failed) backward_failed();
  {
    const std::lock_guard lock(gradient_mutex_);
    if (!std::exchange(failed_, false)) return;
  }
  try {
    end_of_backward();
  } catch (const UserError& error) {  // of a gradient that its hook would have refused
    log::warn("engine", "what a backward pass that failed has left in p.grad is dropped",
              {{"cause", error.message()}});
    drop_gradients();
  }
  runtime_->backward_failed();
}

void Engine::Impl::gradient_ready(std::size_t index, const at::Tensor& tensor) {
  runtime_->check();
  Parameter& parameter = parameters_[index];
  if (!tensor.grad().defined()) return;
  if (pass_.load() == torch::kNoPass) join_plain_pass();
  require_scaled_loss(parameter, tensor);
  {
    const std::lock_guard lock(gradient_mutex_);
    if (parameter.frozen && !parameter.thawed) {  // since the pass began: it stays in p.grad
      parameter.late = true;
      return;
    }
  }
  if (parameter.page == nullptr) {  // cannot be trained, as step() will say
    tensor.mutable_grad() = at::Tensor();
    return;
  }
  torch::Passes& passes = torch::Passes::instance();
  const bool complete = passes.accumulated(tensor, *parameter.storage->page());
  if (!complete) passes.listen(pass_events_);
  if (claim(parameter, tensor, complete)) take_gradient(index, tensor);
}

/// Counts a gradient that has been accumulated; whether it is to be taken now. If not it stays
/// where torch adds the next to it.
bool Engine::Impl::claim(Parameter& parameter, const at::Tensor& tensor, bool complete) {
  const std::lock_guard lock(gradient_mutex_);
  ++parameter.fired;
  if (parameter.taken > 0) {
    tensor.mutable_grad() = at::Tensor();
    parameter.unforeseen = !torch::Passes::instance().distrust_running_functions();
    throw UserError(fmt::format(
        "parameter '{}' got another gradient in one backward() after its gradient had been handed "
        "on: a custom autograd function uses it in backward() and not in forward(). From now on "
        "gradients wait for that function. Drop this step with zero_grad(), or, where its updates "
        "have begun, call step()",
        parameter.name));
  }
  if (!complete || parameter.unforeseen) return false;
  parameter.taken = parameter.fired;  // function_ended(), on another thread, leaves it alone
  return true;
}

/// The pass of the user's that this thread runs is a micro-batch, or part of one that is under way.
void Engine::Impl::join_plain_pass() {
  bool failed = false;
  {
    const std::lock_guard lock(pass_events_->mutex);
    failed = std::exchange(pass_events_->failed, false);
    if (pass_events_->open == torch::kNoPass) {
      pass_events_->open = torch::Passes::instance().listen(pass_events_);
      // Before a gradient of the pass is looked at, on any thread.
      const std::lock_guard looking(gradient_mutex_);
      look_for_thawed();
    }
  }
  if (failed) backward_failed();
}

void Engine::Impl::plain_pass_ended() {
  try {
    rethrow_untaken();
  } catch (...) {
    backward_failed();
    throw;
  }
  end_of_backward();
  runtime_->end_backward();
}

/// Gradients that waited for this function, and for nothing else, are complete.
void Engine::Impl::function_ended(const torch::CustomFunctions::Pages* pages) noexcept {
  std::vector<std::size_t> held;
  {
    const std::lock_guard lock(gradient_mutex_);
    const auto look_at = [&](std::size_t index) {
      const Parameter& parameter = parameters_[index];
      if (parameter.taken < parameter.fired && !parameter.unforeseen) held.push_back(index);
    };
    if (pages == nullptr) {
      for (std::size_t i = 0; i < parameters_.size(); ++i) look_at(i);
    } else {
      for (const pager::Page* page : *pages) {
        const auto found = of_page_.find(page);
        if (found != of_page_.end())
          std::for_each(found->second.begin(), found->second.end(), look_at);
      }
    }
  }
  for (const std::size_t index : held) {
    auto alive = parameters_[index].tensor.lock();
    if (alive == nullptr) continue;
    const at::Tensor tensor(std::move(alive));
    const pager::Page& page = *parameters_[index].storage->page();
    torch::Passes& passes = torch::Passes::instance();
    if (!passes.is_complete(tensor, page)) continue;
    {
      const std::lock_guard lock(gradient_mutex_);
      Parameter& parameter = parameters_[index];
      if (parameter.taken == parameter.fired) continue;  // by its own hook, meanwhile
      parameter.taken = parameter.fired;
    }
    try {
      take_gradient(index, tensor);
    } catch (...) {  // the pass throws it, where it can
      const std::lock_guard lock(gradient_mutex_);
      if (untaken_ == nullptr) untaken_ = std::current_exception();
    }
  }
}

void Engine::Impl::rethrow_untaken() {
  std::exception_ptr error;
  {
    const std::lock_guard lock(gradient_mutex_);
    error = std::exchange(untaken_, nullptr);
  }
  if (error != nullptr) std::rethrow_exception(error);
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
  {
    const std::lock_guard lock(gradient_mutex_);
    parameter.left = false;
  }
  require_dense(grad, parameter.name);
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
    if (grad.strides() != tensor.strides() || grad.scalar_type() != tensor.scalar_type()) {
      at::Tensor same = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options());
      same.copy_(grad);
      grad = std::move(same);
    }
    push(page, std::move(grad), {true}, late);
    return;
  }
  if (auto whole = add_to_partial(parameter, tensor, grad)) {
    push(page, std::move(whole->flat), std::move(whole->present), late);
  }
}

/// Adds to what the parameters of a page have of their gradients; all of it, when it is complete.
std::optional<Engine::Impl::Partial> Engine::Impl::add_to_partial(const Parameter& parameter,
                                                                  const at::Tensor& tensor,
                                                                  const at::Tensor& grad) {
  const optim::TrainedPage& page = *parameter.page;
  at::Tensor zeros;
  std::unique_lock lock(gradient_mutex_);
  while (!partial_.contains(&page)) {
    if (zeros.defined()) {
      partial_[&page] = {std::move(zeros), std::vector<bool>(page.parameters.size())};
      break;
    }
    lock.unlock();  // memory may have to be waited for
    zeros = at::zeros({static_cast<std::int64_t>(page.elements())}, tensor.options());
    lock.lock();
  }
  Partial& partial = partial_[&page];
  partial.flat.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset()).add_(grad);
  partial.present[parameter.in_page] = true;
  if (!is_complete(partial, page)) return std::nullopt;
  return std::move(partial_.extract(&page).mapped());
}

void Engine::Impl::push(optim::TrainedPage& page, at::Tensor flat, std::vector<bool> present,
                        bool late) {
  engine::Contribution contribution;
  contribution.page = &page;
  contribution.present = std::move(present);
  contribution.late = late;
  contribution.data = static_cast<const std::byte*>(flat.const_data_ptr());
  if (const auto stream = consumer()) contribution.ready = stream->mark();
  contribution.keep = std::make_shared<at::Tensor>(std::move(flat));
  runtime_->contribute(std::move(contribution));
}

/// Whether a pass of the user's has failed since. Where none can be under way, none is.
bool Engine::Impl::forget_failed_passes() {
  require_no_other_pass();
  const std::lock_guard lock(pass_events_->mutex);
  bool failed = std::exchange(pass_events_->failed, false);
  if (!torch::in_backward()) {
    failed = failed || pass_events_->open != torch::kNoPass;
    pass_events_->open = torch::kNoPass;
  }
  return failed;
}

/// Of a pass that ended without its end being told, all that has come has come.
void Engine::Impl::end_last_pass() {
  if (forget_failed_passes()) backward_failed();
  end_of_backward();
}

/// What was held back in this pass goes on its way.
void Engine::Impl::end_of_backward() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    bool held_back = false;
    {
      const std::lock_guard lock(gradient_mutex_);
      if (parameter.fired == 0 && !parameter.left) continue;
      held_back = parameter.left || parameter.taken < parameter.fired;
    }
    if (auto alive = parameter.tensor.lock()) {
      const at::Tensor tensor(std::move(alive));
      // What was set after it had been taken is the user's: step() sees to it.
      if (held_back && tensor.grad().defined()) take_gradient(i, tensor);
    }
    const std::lock_guard lock(gradient_mutex_);
    parameter.left = false;
    parameter.fired = parameter.taken = 0;
  }
  std::unordered_map<const optim::TrainedPage*, Partial> partial;
  {
    const std::lock_guard lock(gradient_mutex_);
    partial.swap(partial_);
  }
  for (auto& [page, gathered] : partial) {
    push(*const_cast<optim::TrainedPage*>(page), std::move(gathered.flat),
         std::move(gathered.present));
  }
}

at::Tensor Engine::Impl::grad(const at::Tensor& tensor) {
  const Calling calling(*this, "grad()");
  torch::PageStorage* storage = find(tensor);
  PAGODA_REQUIRE(storage != nullptr, "the tensor is no parameter of this engine");
  end_last_pass();
  take_set_gradients();
  push_late();
  const std::uint64_t elements = storage->page()->elements;
  const at::Tensor all = at::empty({static_cast<std::int64_t>(elements)}, at::kFloat);
  runtime_->read_gradient(*storage->page(), {all.mutable_data_ptr<float>(), elements});
  if (const double scale = runtime_->loss_scale(); scale != 1) all.div_(scale);
  const at::Tensor out = all.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return covers_storage(tensor, elements) ? out : out.clone();  // nobody else's elements
}

}  // namespace pagoda
