// SPDX-License-Identifier: Apache-2.0
// Backward passes as an engine sees them: its own, the user's, and those that fail. See
// docs/notes/passes.md.
#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include <ATen/TensorOperators.h>

#include "pagoda/base/error.h"
#include "pagoda/base/log.h"
#include "pagoda/torch/autograd_state.h"
#include "pagoda/torch/engine_impl.h"
#include "pagoda/torch/gradient_hook.h"
#include "pagoda/torch/pass_events.h"
#include "pagoda/torch/passes.h"

namespace pagoda {

/// One thread at a time; a hook may call from inside.
Engine::Impl::Calling::Calling(Impl& engine, const char* call, const std::atomic<int>* pass)
    : engine_(engine), call_(call), pass_(pass) {
  const std::lock_guard lock(engine.calls_mutex_);
  around_ = engine.calling_;
  PAGODA_REQUIRE(around_ == nullptr || around_->is_around_this_thread(),
                 "{} was called while another thread is in {}: "
                 "call one engine from one thread at a time",
                 call, around_->call_);
  if (around_ == nullptr) engine.require_open();
  engine.calling_ = this;
}

Engine::Impl::Calling::~Calling() {
  const std::lock_guard lock(engine_.calls_mutex_);
  engine_.calling_ = around_;
}

/// Autograd runs the hooks of a pass on a device's thread, while the caller's waits for its end.
bool Engine::Impl::Calling::is_around_this_thread() const {
  if (thread_ == std::this_thread::get_id()) return true;
  const int pass = pass_ != nullptr ? pass_->load() : torch::kNoPass;
  return pass != torch::kNoPass && torch::Passes::runs_inside(pass);
}

/// A pass under way ends here: whoever has called close() waits for it.
void Engine::Impl::require_open() const {
  PAGODA_REQUIRE(!closing_.load(), "the engine has been closed: another thread has called close()");
}

std::string Engine::Impl::call_under_way() {
  {
    const std::lock_guard lock(calls_mutex_);
    if (calling_ != nullptr) return calling_->call();
  }
  return runs_plain_pass() ? "a backward pass" : "a call of it";
}

void Engine::Impl::require_no_call_around(const char* call) {
  const std::lock_guard lock(calls_mutex_);
  PAGODA_REQUIRE(calling_ == nullptr || !calling_->is_around_this_thread(),
                 "{} was called inside {}: call it when that has returned", call, calling_->call());
  const int open = pass_events_->micro_batch();
  PAGODA_REQUIRE(open == torch::kNoPass || !torch::Passes::runs_inside(open),
                 "{} was called inside a backward pass: call it when that has returned", call);
}

bool Engine::Impl::runs_plain_pass() const {
  if (hooks_.load() > 0) return true;
  const int open = pass_events_->micro_batch();
  return open != torch::kNoPass && torch::Passes::instance().under_way(open);
}

void Engine::Impl::begin_call(const std::string& label, const std::string& name,
                              const std::string& argument) {
  auto call = std::make_unique<OthersCall>(*this, label);
  require_no_other_pass();
  runtime_->begin_call(label, name, argument);
  others_calls_.push_back(std::move(call));
}

void Engine::Impl::end_call(const std::string& error) {
  PAGODA_REQUIRE(!others_calls_.empty(), "no call has begun");
  const auto call = std::move(others_calls_.back());
  others_calls_.pop_back();
  runtime_->end_call(error);
}

void Engine::Impl::begin_work(const std::string& label) {
  auto call = std::make_unique<OthersCall>(*this, label);
  require_no_other_pass();
  runtime_->begin_work(label);
  others_calls_.push_back(std::move(call));
}

void Engine::Impl::end_work() {
  runtime_->end_work();
  if (!others_calls_.empty()) others_calls_.pop_back();
}

std::size_t Engine::Impl::open_calls() {
  const std::lock_guard lock(calls_mutex_);
  const bool mine = calling_ != nullptr && calling_->is_around_this_thread();
  return mine ? others_calls_.size() : 0;
}

bool Engine::Impl::is_in_call(bool of_this_thread) {
  const std::lock_guard lock(calls_mutex_);
  return calling_ != nullptr && calling_->is_around_this_thread() == of_this_thread;
}

void Engine::Impl::barrier() {
  const Calling calling(*this, "barrier()");
  require_no_other_pass();
  runtime_->barrier();
}

void Engine::Impl::backward(const at::Tensor& loss, std::optional<bool> last, bool retain_graph) {
  const Calling calling(*this, "backward()", &pass_);
  runtime_->check();
  PAGODA_REQUIRE(!parameters_.empty(), "no model is attached: call attach() first");
  drop_retired();
  end_failed_pass();
  check_parameters();
  for (const Parameter& parameter : parameters_) {
    const auto tensor = reachable(parameter);
    if (tensor && tensor->requires_grad()) require_none_set(parameter);
  }
  {
    const std::lock_guard lock(gradient_mutex_);
    look_for_thawed();
  }
  runtime_->begin_backward(last.value_or(backwards_ + 1 == runtime_->config().accumulation));
  const double scale = runtime_->loss_scale();
  try {
    // Not a parameter itself, whose own hooks the pass must not change.
    torch::run_backward(scale == 1 && !loss.is_leaf() ? loss : loss * scale, pass_, retain_graph);
    rethrow_untaken();
  } catch (...) {
    const bool over = !runtime_->failed() && has_ended(pass_.load());  // on all threads of autograd
    pass_.store(torch::kNoPass);
    runtime_->check();  // the engine's own error says more than the operator's
    backward_failed();
    end_failed_pass(over);
    throw;
  }
  pass_.store(torch::kNoPass);
  ++backwards_;
  end_of_backward();
  runtime_->end_backward();
}

void Engine::Impl::gradient_comes(std::size_t index) {
  const InHook inside(*this);
  require_open();
  require_one_pass(parameters_[index]);
  if (pass_.load() == torch::kNoPass) end_failed_pass();  // before torch adds to what it has left
  rethrow_untaken();
  const std::lock_guard lock(gradient_mutex_);
  require_none_set(parameters_[index]);
  parameters_[index].coming = true;
}

void Engine::Impl::gradient_ready(std::size_t index, const at::Tensor& tensor) {
  const InHook inside(*this);
  require_open();
  runtime_->check();
  Parameter& parameter = parameters_[index];
  if (!tensor.grad().defined()) return;
  require_no_capture(parameter, tensor);
  if (pass_.load() == torch::kNoPass) join_plain_pass();
  require_scaled_loss(parameter, tensor);
  {
    const std::lock_guard lock(gradient_mutex_);
    parameter.coming = false;
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
  at::Tensor dropped;  // after the lock
  const std::lock_guard lock(gradient_mutex_);
  ++parameter.fired;
  if (parameter.taken > 0) {
    dropped = std::exchange(tensor.mutable_grad(), at::Tensor());
    parameter.unforeseen = !torch::Passes::instance().distrust_running_functions();
    throw UserError(fmt::format(
        "parameter '{}' got another gradient in one backward() after its gradient had been handed "
        "on: a custom autograd function uses it in backward() and not in forward(). From now on "
        "gradients wait for that function. Drop this step with zero_grad(), or, if its updates "
        "have started, call step()",
        parameter.name));
  }
  if (!complete || parameter.unforeseen) {
    parameter.held = mark_here();
    return false;
  }
  parameter.taken = parameter.fired;  // function_ended(), on another thread, leaves it alone
  return true;
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

/// What was held back in this pass goes on its way.
void Engine::Impl::end_of_backward() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    bool held_back = false;
    {
      const std::lock_guard lock(gradient_mutex_);
      parameter.coming = false;
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
    parameter.held = {};
  }
  auto partial = take_partial();
  for (auto& [page, gathered] : partial) push(*page, std::move(gathered));
}

/// The pass of the user's that this thread runs is a micro-batch, or part of one that is under way.
void Engine::Impl::join_plain_pass() {
  const bool failed = pass_events_->join([this] {
    const std::lock_guard lock(gradient_mutex_);
    look_for_thawed();
  });
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

/// Gradients of one micro-batch are those of one pass: two at a time would be added up in p.grad by
/// timing.
void Engine::Impl::require_one_pass(const Parameter& parameter) const {
  int open = pass_.load();
  if (open == torch::kNoPass) open = pass_events_->micro_batch();
  PAGODA_REQUIRE(open == torch::kNoPass || !torch::Passes::instance().runs_beside(open),
                 "two backward passes reach parameter '{}' at the same time, on two threads: run "
                 "one after the other",
                 parameter.name);
}

/// Waits for the end of a pass, for some time. (One that has failed is under way until autograd's
/// threads have let go of it.)
bool Engine::Impl::has_ended(int pass) {
  constexpr auto kPatience = std::chrono::seconds(2);
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while (torch::Passes::instance().under_way(pass)) {
    if (std::chrono::steady_clock::now() >= until) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

/// A call that needs all gradients came while another thread's loss.backward() runs.
void Engine::Impl::require_no_other_pass() const {
  const int open = pass_events_->micro_batch();
  if (open == torch::kNoPass || torch::in_backward()) return;
  PAGODA_REQUIRE(has_ended(open),
                 "a backward pass runs on another thread: call one engine, and run its backward "
                 "passes, from one thread at a time");
}

/// How often hooks fired says nothing. As ever with torch, the gradients that have come stay, until
/// zero_grad() drops them.
void Engine::Impl::backward_failed() {
  const std::lock_guard lock(gradient_mutex_);
  failed_ = true;
  untaken_ = nullptr;
  for (Parameter& parameter : parameters_) {
    parameter.left = parameter.left || parameter.coming || parameter.fired > 0;
    parameter.fired = parameter.taken = 0;
    parameter.coming = false;
  }
}

/// A pass that failed was a micro-batch of its own: the gradients that it left are handed on before
/// those of another come. `over`: nobody runs it any more.
void Engine::Impl::end_failed_pass(bool over) {
  if (torch::in_backward() ? pass_events_->take_failure_of_last() : forget_failed_passes()) {
    backward_failed();
  }
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
  runtime_->backward_failed(over);
}

/// Whether a pass of the user's has failed since. Where none can be under way, none is.
bool Engine::Impl::forget_failed_passes() {
  require_no_other_pass();
  return torch::in_backward() ? pass_events_->take_failure() : pass_events_->take_failure_of_all();
}

/// Of a pass that ended without its end being told, all that has come has come.
void Engine::Impl::end_last_pass() {
  if (forget_failed_passes()) backward_failed();
  end_of_backward();
}

}  // namespace pagoda
