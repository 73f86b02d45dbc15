// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include "pagoda/torch/held_pages.h"
#include "pagoda/torch/interpreter_lock.h"
#include "pagoda/torch/table_use.h"

namespace pagoda::torch {

/// Lets go of Python's lock, for what may wait.
using Unlocked = std::optional<WithoutInterpreterLock>;

/// A tensor of a kernel that brings its pages in by itself, and whether the kernel writes to it.
using AddedTensor = std::pair<at::Tensor, bool>;

/// The search for the pages of an operator's arguments. A parameter that was given another storage
/// gets its page on the way; what was found before may be that one, by the storage that it had, so
/// all are looked for again then. One thread.
class PageSearch {
 public:
  /// `use`: what is found can be used until it is pinned, or that ends.
  PageSearch(TableUse& use, Unlocked& unlocked) : use_(use), unlocked_(unlocked) {}

  /// The pages of all inputs, none of which is written to.
  void find(c10::ArrayRef<const c10::IValue> inputs, HeldPages& held);
  /// Those of one more argument, or that the operator writes to it.
  void add(const c10::IValue& argument, bool write, HeldPages& held);
  /// Those of a kernel's tensors, from `first` on; of all if anything was exchanged since `found`.
  void find(std::span<const AddedTensor> added, std::size_t first, std::uint64_t found,
            HeldPages& held);
  /// Parameters may get another page again: none that was found is in use.
  void start_over() noexcept { may_exchange_ = true; }

  /// The moment (TableChange) at which everything was found.
  std::uint64_t moment() const noexcept { return began_; }
  /// Whether nothing was exchanged since.
  bool is_valid() const noexcept;

 private:
  template <class Look>
  void run(const Look& look);
  void add(const at::Tensor& tensor, bool write, HeldPages& held);
  PageStorage* page_of(const at::Tensor& tensor);
  void readopt(const at::Tensor& tensor) noexcept;

  TableUse& use_;
  Unlocked& unlocked_;
  bool found_new_storage_ = false;
  bool may_exchange_ = true;
  std::uint64_t began_ = 0;
};

}  // namespace pagoda::torch
