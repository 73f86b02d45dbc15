// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <utility>

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include "pagoda/torch/activation_store.h"
#include "pagoda/torch/engine.h"
#include "pagoda/torch/python_errors.h"

namespace pagoda::torch {

/// A saved tensor; in autograd's graph instead of it. Keeps what it needs alive.
struct BoundSaved final : ::torch::CustomClassHolder {
  BoundSaved() = default;
  BoundSaved(std::shared_ptr<Engine> engine, std::shared_ptr<ActivationStore> store,
             ActivationStore::Saved saved)
      : engine(std::move(engine)), store(std::move(store)), saved(std::move(saved)) {}

  at::Tensor restore() {
    return translating_errors([&] { return store->unpack(saved); });
  }

  std::shared_ptr<Engine> engine;  // the first member is the last to go
  std::shared_ptr<ActivationStore> store;
  ActivationStore::Saved saved;
};

/// What engine.activations() gives Python: where saved tensors are kept.
struct BoundActivations final : ::torch::CustomClassHolder {
  BoundActivations() = default;
  BoundActivations(std::shared_ptr<Engine> engine, ActivationStore::Policy policy)
      : engine(std::move(engine)), store(this->engine->activations()), policy(policy) {}

  c10::intrusive_ptr<BoundSaved> keep(const at::Tensor& tensor) {
    return translating_errors([&] {
      return c10::make_intrusive<BoundSaved>(engine, store, store->pack(tensor, policy));
    });
  }
  void sweep() {
    translating_errors([&] { store->sweep(); });
  }
  void flush() {
    translating_errors([&] { store->flush(); });
  }
  void pause(bool paused) {
    translating_errors([&] { store->pause(paused); });
  }

  std::shared_ptr<Engine> engine;
  std::shared_ptr<ActivationStore> store;
  ActivationStore::Policy policy;
};

}  // namespace pagoda::torch
