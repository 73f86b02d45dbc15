// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include "pagoda/torch/enders.h"
#include "pagoda/torch/engine.h"
#include "pagoda/torch/interpreter_lock.h"
#include "pagoda/torch/kernel_pages.h"
#include "pagoda/torch/python_errors.h"

namespace pagoda::torch {

/// Keeps pages where raw pointers can see them, until it goes or is told to let go.
struct BoundPin final : ::torch::CustomClassHolder {
  BoundPin() = default;
  BoundPin(const BoundPin&) = delete;
  BoundPin& operator=(const BoundPin&) = delete;
  ~BoundPin() override {
    const WithoutInterpreterLock unlocked;  // a release takes the pager's lock
    held.clear();
  }

  void release() {
    const Enders::EndsHere here;  // Python's lock is not held in a method
    const std::shared_ptr<Engine> of = std::move(engine);
    held.clear();
    if (of != nullptr) translating_errors([&] { of->check_pinned_writes(); });
  }

  std::shared_ptr<Engine> engine;  // a pin must not reach into one that is gone
  std::vector<std::shared_ptr<void>> held;
};

/// The pages among the tensors of a compiled region, from its call to its end.
struct BoundRegionPages final : ::torch::CustomClassHolder {
  BoundRegionPages(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& written) {
    pages.emplace();
    for (const at::Tensor& tensor : tensors) pages->add(tensor, false);
    for (const at::Tensor& tensor : written) pages->add(tensor, true);
    if (const auto too_large = pages->touch()) throw std::runtime_error(*too_large);
  }
  BoundRegionPages(const BoundRegionPages&) = delete;
  BoundRegionPages& operator=(const BoundRegionPages&) = delete;
  ~BoundRegionPages() override {
    const WithoutInterpreterLock unlocked;  // as of a pin
    pages.reset();
  }
  void release() { pages.reset(); }

  std::optional<KernelPages> pages;
};

}  // namespace pagoda::torch
