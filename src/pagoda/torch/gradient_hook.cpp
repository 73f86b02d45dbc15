// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/gradient_hook.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "pagoda/torch/autograd_state.h"

namespace pagoda::torch {
namespace {

using ::torch::autograd::FunctionPreHook;
using ::torch::autograd::PostAccumulateGradHook;
using ::torch::autograd::variable_list;

class GradientHook final : public PostAccumulateGradHook {
 public:
  GradientHook(std::shared_ptr<GradientCalls> calls, std::unique_ptr<PostAccumulateGradHook> before)
      : calls_(std::move(calls)), before_(std::move(before)) {}

  void operator()(const at::Tensor& tensor) override {
    if (before_ != nullptr) (*before_)(tensor);
    calls_->accumulated(tensor);
  }
  std::unique_ptr<PostAccumulateGradHook> take_before() { return std::move(before_); }
  const std::shared_ptr<GradientCalls>& calls() const noexcept { return calls_; }

 private:
  const std::shared_ptr<GradientCalls> calls_;
  std::unique_ptr<PostAccumulateGradHook> before_;  // torch has one slot: the user's is chained
};

/// Of those that see a gradient before it is accumulated a tensor may have several.
class ComingHook final : public FunctionPreHook {
 public:
  explicit ComingHook(std::weak_ptr<GradientCalls> calls) : calls_(std::move(calls)) {}

  variable_list operator()(const variable_list& gradients) override {
    if (const auto alive = calls_.lock()) alive->comes();
    return gradients;
  }

 private:
  const std::weak_ptr<GradientCalls> calls_;
};

bool is_ours(const std::unique_ptr<FunctionPreHook>& hook) {
  return dynamic_cast<const ComingHook*>(hook.get()) != nullptr;
}

}  // namespace

void* set_gradient_hook(const at::Tensor& parameter, GradientCalls calls) {
  // A tensor that has never required a gradient has no place for hooks.
  ::torch::autograd::impl::materialize_autograd_meta(parameter);
  auto& slot = ::torch::autograd::impl::post_acc_grad_hooks(parameter);
  auto hook = std::make_unique<GradientHook>(std::make_shared<GradientCalls>(std::move(calls)),
                                             std::move(slot));
  void* ours = hook.get();
  std::erase_if(::torch::autograd::impl::hooks(parameter), is_ours);  // of one that was replaced
  ::torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::move(hook));
  keep_gradient_hook(parameter);
  return ours;
}

void keep_gradient_hook(const at::Tensor& parameter) {
  // Not by register_hook(), which takes those of Python away.
  const auto* post = dynamic_cast<const GradientHook*>(
      ::torch::autograd::impl::post_acc_grad_hooks(parameter).get());
  auto& before = ::torch::autograd::impl::hooks(parameter);
  if (post == nullptr || std::any_of(before.begin(), before.end(), is_ours)) return;
  before.push_back(std::make_unique<ComingHook>(post->calls()));
}

void* hook_of(const at::Tensor& parameter) {
  if (::torch::autograd::impl::get_autograd_meta(parameter) == nullptr) return nullptr;
  return ::torch::autograd::impl::post_acc_grad_hooks(parameter).get();
}

void remove_gradient_hook(const at::Tensor& parameter) {
  if (::torch::autograd::impl::get_autograd_meta(parameter) == nullptr) return;
  auto& slot = ::torch::autograd::impl::post_acc_grad_hooks(parameter);
  if (auto* ours = dynamic_cast<GradientHook*>(slot.get())) {
    std::erase_if(::torch::autograd::impl::hooks(parameter), is_ours);
    auto before = ours->take_before();
    slot = std::move(before);
  }
}

void bump_version(const at::Tensor& parameter) {
  ::torch::autograd::impl::bump_version(parameter);
}

void run_backward(const at::Tensor& loss, std::atomic<int>& pass, bool retain_graph) {
  // The gradient of the loss itself comes first.
  const unsigned hook = loss.register_hook(
      [&pass](const at::Tensor& /*gradient*/) -> void { pass.store(current_pass()); });
  try {
    ::torch::autograd::backward({loss}, {}, retain_graph);
  } catch (...) {
    loss.remove_hook(hook);
    throw;
  }
  loss.remove_hook(hook);
}

}  // namespace pagoda::torch
