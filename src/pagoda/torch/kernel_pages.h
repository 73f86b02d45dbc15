// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "pagoda/base/bytes.h"

namespace at {
class Tensor;
}

namespace pagoda::torch {

/// The pages of a kernel that brings them in by itself, some after others (list_operators.h).
/// Operators that it runs meanwhile are observed as ever. One thread.
class KernelPages {
 public:
  KernelPages();
  KernelPages(const KernelPages&) = delete;
  KernelPages& operator=(const KernelPages&) = delete;
  /// Lets go of them.
  ~KernelPages();

  /// The tensor's page, if it has one. Before touch().
  void add(const at::Tensor& tensor, bool write);
  bool empty() const noexcept;
  /// What they need on the device together, and what there is for pages at all.
  Bytes needed() const;
  Bytes room() const;
  /// Brings them in; they stay until this goes. Returns why they do not fit together, if they do
  /// not; throws what else prevents it, as the operator's own error. Once.
  std::optional<std::string> touch();

 private:
  struct State;

  std::unique_ptr<State> state_;
};

}  // namespace pagoda::torch
