// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/kernel_pages.h"

#include <algorithm>
#include <cstdint>
#include <exception>
#include <stdexcept>

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include "pagoda/torch/custom_functions.h"
#include "pagoda/torch/held_pages.h"
#include "pagoda/torch/observer.h"
#include "pagoda/torch/page_search.h"
#include "pagoda/torch/table_change.h"
#include "pagoda/torch/table_use.h"

namespace pagoda::torch {

struct KernelPages::State {
  HeldPages pages;
  TableUse use;                                        // until touch()
  std::uint64_t found = TableChange::wait_for_none();  // when `pages` were
  c10::SmallVector<AddedTensor, 8> added;              // also plain ones: they may become pages

  /// Finds those of what was added from `first` on, and of all if there was an exchange since.
  void find_pages(std::size_t first) {
    Unlocked unlocked;  // kernels are called without it as it is
    PageSearch search(use, unlocked);
    search.find({added.data(), added.size()}, first, found, pages);
    found = search.moment();
  }

  std::optional<std::string> bring() {
    const Touching unobserved;
    for (Held& held : pages) {
      try {
        held.find_consumer();
        held.touch();
      } catch (const pager::OperatorTooLarge& error) {
        return error.what();
      } catch (...) {
        throw std::runtime_error(held.client->touch_failed(std::current_exception()));
      }
    }
    return std::nullopt;
  }
};

KernelPages::KernelPages() : state_(std::make_unique<State>()) {}

KernelPages::~KernelPages() = default;

void KernelPages::add(const at::Tensor& tensor, bool write) {
  state_->added.emplace_back(tensor, write);
  state_->find_pages(state_->added.size() - 1);
}

bool KernelPages::empty() const noexcept {
  return state_->pages.empty();
}

Bytes KernelPages::needed() const {
  Bytes sum = 0;
  for (const Held& held : state_->pages) sum += held.pager->needed(held.all());
  return sum;
}

Bytes KernelPages::room() const {
  Bytes least = ~Bytes{0};
  for (const Held& held : state_->pages) {
    least = std::min(least, held.pager->tiers().arena().stats().capacity);
  }
  return least;
}

std::optional<std::string> KernelPages::touch() {
  for (;;) {
    if (auto too_large = state_->bring()) return too_large;
    if (TableChange::none_since(state_->found)) break;
    state_->find_pages(0);  // another thread has exchanged a storage
  }
  for (const Held& held : state_->pages) {
    for (const pager::Access& access : held.accesses) CustomFunctions::uses(*access.page);
  }
  state_->use.leave();
  state_->added.clear();
  return std::nullopt;
}

}  // namespace pagoda::torch
