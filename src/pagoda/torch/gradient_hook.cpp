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
  GradientHook(std::function<void(const at::Tensor&)> taken,
               std::unique_ptr<PostAccumulateGradHook> before)
      : taken_(std::move(taken)), before_(std::move(before)) {}

  void operator()(const at::Tensor& tensor) override {
    if (before_ != nullptr) (*before_)(tensor);
    taken_(tensor);
  }
  std::unique_ptr<PostAccumulateGradHook> take_before() { return std::move(before_); }

 private:
  const std::function<void(const at::Tensor&)> taken_;
  std::unique_ptr<PostAccumulateGradHook> before_;  // torch has one slot: the user's is chained
};

}  // namespace

void* set_gradient_hook(const at::Tensor& parameter, std::function<void(const at::Tensor&)> taken) {
  // A tensor that has never required a gradient has no slot.
  ::torch::autograd::impl::materialize_autograd_meta(parameter);
  auto& slot = ::torch::autograd::impl::post_acc_grad_hooks(parameter);
  auto hook = std::make_unique<GradientHook>(std::move(taken), std::move(slot));
  void* ours = hook.get();
  ::torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::move(hook));
  return ours;
}

void* hook_of(const at::Tensor& parameter) {
  if (::torch::autograd::impl::get_autograd_meta(parameter) == nullptr) return nullptr;
  return ::torch::autograd::impl::post_acc_grad_hooks(parameter).get();
}

void remove_gradient_hook(const at::Tensor& parameter) {
  if (::torch::autograd::impl::get_autograd_meta(parameter) == nullptr) return;
  auto& slot = ::torch::autograd::impl::post_acc_grad_hooks(parameter);
  if (auto* ours = dynamic_cast<GradientHook*>(slot.get())) {
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
