// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/gradient_hook.h"

#include <memory>
#include <utility>

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "pagoda/torch/autograd_state.h"

namespace pagoda::torch {
namespace {

using ::torch::autograd::PostAccumulateGradHook;

class GradientHook final : public PostAccumulateGradHook {
 public:
  GradientHook(std::shared_ptr<GradientCalls> calls, unsigned before_it,
               std::unique_ptr<PostAccumulateGradHook> before)
      : calls_(std::move(calls)), before_it_(before_it), before_(std::move(before)) {}
  GradientHook(const GradientHook&) = delete;
  GradientHook& operator=(const GradientHook&) = delete;

  void operator()(const at::Tensor& tensor) override {
    if (before_ != nullptr) (*before_)(tensor);
    calls_->accumulated(tensor);
  }
  /// The hook that calls `comes`, as torch numbers it.
  unsigned before_it() const noexcept { return before_it_; }
  std::unique_ptr<PostAccumulateGradHook> take_before() { return std::move(before_); }

 private:
  const std::shared_ptr<GradientCalls> calls_;  // the other hook has them weakly
  const unsigned before_it_;
  std::unique_ptr<PostAccumulateGradHook> before_;  // torch has one slot: the user's is chained
};

}  // namespace

void* set_gradient_hook(const at::Tensor& parameter, GradientCalls calls) {
  auto& slot = ::torch::autograd::impl::post_acc_grad_hooks(parameter);
  auto shared = std::make_shared<GradientCalls>(std::move(calls));
  const unsigned before_it = parameter.register_hook(
      [weak = std::weak_ptr(shared)](const at::Tensor& /*gradient*/) -> void {
        if (const auto alive = weak.lock()) alive->comes();
      });
  auto hook = std::make_unique<GradientHook>(std::move(shared), before_it, std::move(slot));
  void* ours = hook.get();
  ::torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::move(hook));
  return ours;
}

void* hook_of(const at::Tensor& parameter) {
  return ::torch::autograd::impl::post_acc_grad_hooks(parameter).get();
}

void remove_gradient_hook(const at::Tensor& parameter) {
  auto& slot = ::torch::autograd::impl::post_acc_grad_hooks(parameter);
  if (auto* ours = dynamic_cast<GradientHook*>(slot.get())) {
    parameter.remove_hook(ours->before_it());
    auto before = ours->take_before();
    slot = std::move(before);
  }
}

void bump_version(const at::Tensor& parameter) {
  ::torch::autograd::impl::bump_version(parameter);
}

void at_end_of_pass(std::function<void()> then) {
  ::torch::autograd::Engine::get_default_engine().queue_callback(std::move(then));
}

void run_backward(const at::Tensor& loss, std::atomic<int>& pass) {
  // The gradient of the loss itself comes first.
  const unsigned hook = loss.register_hook(
      [&pass](const at::Tensor& /*gradient*/) -> void { pass.store(current_pass()); });
  try {
    ::torch::autograd::backward({loss}, {});
  } catch (...) {
    loss.remove_hook(hook);
    throw;
  }
  loss.remove_hook(hook);
}

}  // namespace pagoda::torch
