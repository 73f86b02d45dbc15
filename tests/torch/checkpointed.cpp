// SPDX-License-Identifier: Apache-2.0
// Two ways to keep nothing of a block for its backward. Neither saves the state of a random
// generator: there is no dropout here.
#include <memory>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include "pagoda/base/error.h"
#include "torch/specimen.h"

namespace zoo {
namespace {

using ::torch::autograd::AutogradContext;
using ::torch::autograd::variable_list;

/// One node for the whole block; its backward builds the block's graph and runs it to the end.
class Rerun : public ::torch::autograd::Function<Rerun> {
 public:
  static at::Tensor forward(AutogradContext* context, const Forward& block,
                            const at::Tensor& input) {
    context->save_for_backward({input});
    context->saved_data["block"] = reinterpret_cast<std::int64_t>(&block);
    return block(input);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto& block = *reinterpret_cast<const Forward*>(context->saved_data["block"].toInt());
    at::AutoGradMode with_grad(true);
    at::Tensor input = context->get_saved_variables()[0].detach().requires_grad_();
    ::torch::autograd::backward({block(input)}, {gradients[0]});
    return {at::Tensor(), input.grad()};
  }
};

/// What one block saved in one forward: nothing, until backward asks for the first of it.
class Recomputation {
 public:
  Recomputation(Forward block, const at::Tensor& input)
      : block_(std::move(block)),
        input_(input.detach()),
        input_requires_grad_(input.requires_grad()) {}

  std::size_t add() { return count_++; }

  at::Tensor take(std::size_t index) {
    if (index >= again_.size() || !again_[index].defined()) recompute();
    PAGODA_CHECK_EQ(again_.size(), count_, "the block saved other tensors the second time");
    return std::exchange(again_[index], at::Tensor());
  }

  void add_again(const at::Tensor& tensor) { again_.push_back(tensor.detach()); }

 private:
  void recompute();

  Forward block_;
  at::Tensor input_;
  bool input_requires_grad_;
  std::size_t count_ = 0;
  std::vector<at::Tensor> again_;
};

/// What this thread does with tensors that operators save just now.
struct Saving {
  std::shared_ptr<Recomputation> dropping;  // in the block's first forward
  Recomputation* again = nullptr;           // in its second
};
thread_local Saving saving;

/// Puts the thread's state back, whatever happens.
class SavingScope {
 public:
  explicit SavingScope(Saving now) : before_(std::exchange(saving, std::move(now))) {}
  ~SavingScope() { saving = std::move(before_); }
  SavingScope(const SavingScope&) = delete;
  SavingScope& operator=(const SavingScope&) = delete;

 private:
  Saving before_;
};

void Recomputation::recompute() {
  again_.clear();
  const SavingScope scope({nullptr, this});
  const at::AutoGradMode with_grad(true);
  block_(input_.detach().requires_grad_(input_requires_grad_));
}

class Drop : public ::torch::autograd::SavedVariableHooks {
 public:
  explicit Drop(std::shared_ptr<Recomputation> from) : from_(std::move(from)) {}
  void call_pack_hook(const at::Tensor&) override { index_ = from_->add(); }
  at::Tensor call_unpack_hook() override { return from_->take(index_); }

 private:
  std::shared_ptr<Recomputation> from_;
  std::size_t index_ = 0;
};

class KeepAgain : public ::torch::autograd::SavedVariableHooks {
 public:
  explicit KeepAgain(Recomputation& to) : to_(to) {}
  void call_pack_hook(const at::Tensor& tensor) override { to_.add_again(tensor); }
  at::Tensor call_unpack_hook() override {
    throw pagoda::EngineError("the graph of a recomputation has no backward");
  }

 private:
  Recomputation& to_;
};

/// Torch asks its engine which hooks a saved tensor gets; only Python's has any. This one adds
/// ours.
class HookedEngine : public ::torch::autograd::Engine {
 public:
  static void install() {
    static const bool done = [] {
      ::torch::autograd::set_default_engine_stub([]() -> ::torch::autograd::Engine& {
        static auto* engine = new HookedEngine;  // never destroyed, as torch's own
        return *engine;
      });
      return true;
    }();
    static_cast<void>(done);
  }

  std::unique_ptr<::torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks()
      override {
    if (saving.dropping != nullptr) return std::make_unique<Drop>(saving.dropping);
    if (saving.again != nullptr) return std::make_unique<KeepAgain>(*saving.again);
    return nullptr;
  }
};

}  // namespace

at::Tensor checkpointed(Checkpointing how, const Forward& block, const at::Tensor& input) {
  switch (how) {
    case Checkpointing::None:
      return block(input);
    case Checkpointing::Reentrant:
      return Rerun::apply(block, input);
    case Checkpointing::SavedHooks: {
      HookedEngine::install();
      const SavingScope scope({std::make_shared<Recomputation>(block, input), nullptr});
      return block(input);
    }
  }
  throw pagoda::EngineError("unknown checkpointing");
}

}  // namespace zoo
