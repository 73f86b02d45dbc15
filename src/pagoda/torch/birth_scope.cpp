// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/birth_scope.h"

#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

namespace pagoda::torch {

struct BirthScope::State {
  Adopt adopt;
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> candidates;
  std::exception_ptr error;
  at::CallbackHandle callback = 0;
  State* outer = nullptr;

  void remember(const c10::IValue& value) {
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      if (tensor.defined() && tensor.has_storage() && !tensor.is_meta()) {
        candidates.emplace_back(tensor.getIntrusivePtr());
      }
    } else if (value.isList()) {
      for (const c10::IValue& element : value.toListRef()) remember(element);
    }
  }

  void scan() {
    std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> still;
    for (auto& candidate : candidates) {
      auto alive = candidate.lock();
      if (alive == nullptr) continue;
      const at::Tensor tensor(std::move(alive));
      if (tensor.requires_grad() && tensor.is_leaf()) {
        adopt(tensor);
      } else {
        still.push_back(std::move(candidate));
      }
    }
    candidates.swap(still);
  }
};

namespace {

thread_local void* innermost_scope = nullptr;

}  // namespace

BirthScope::BirthScope(Adopt adopt) : state_(new State()) {
  state_->adopt = std::move(adopt);
  state_->outer = static_cast<State*>(innermost_scope);
  innermost_scope = state_;
  // Thread-local: other threads' operators are not ours. Outputs are known at the end only.
  state_->callback = at::addThreadLocalCallback(
      at::RecordFunctionCallback(
          [](const at::RecordFunction&) -> std::unique_ptr<at::ObserverContext> { return nullptr; },
          [](const at::RecordFunction& function, at::ObserverContext*) {
            auto* state = static_cast<State*>(innermost_scope);
            if (state == nullptr) return;
            for (const c10::IValue& value : function.outputs()) state->remember(value);
          })
          .needsOutputs(true)
          .scopes({at::RecordScope::FUNCTION}));
}

BirthScope::~BirthScope() {
  operator_starts();
  innermost_scope = state_->outer;
  at::removeCallback(state_->callback);
  delete state_;
}

void BirthScope::check() {
  operator_starts();
  if (state_->error != nullptr) std::rethrow_exception(std::exchange(state_->error, nullptr));
}

void BirthScope::operator_starts() noexcept {
  auto* state = static_cast<State*>(innermost_scope);
  if (state == nullptr || state->candidates.empty()) return;
  const at::RecordFunctionGuard no_recursion(false);
  try {
    state->scan();
  } catch (...) {
    if (state->error == nullptr) state->error = std::current_exception();
  }
}

}  // namespace pagoda::torch
