// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>

#include "pagoda/device/device.h"

namespace pagoda::torch {

/// What an engine learns from the observer.
class ObserverClient {
 public:
  virtual ~ObserverClient() = default;
  /// A touch failed, and the engine shall not go on. Returns the cause that the operator throws.
  /// Any thread.
  virtual std::string touch_failed(std::exception_ptr error) noexcept = 0;
  /// A parameter that is trained has been given a storage that is no page (`.data =`, `set_`,
  /// `module.to()`); an operator is about to use it. Throws what prevents that it becomes one.
  virtual void storage_exchanged(std::size_t parameter) = 0;
  /// The stream that the calling thread's operators run on; null: they run on the thread itself.
  virtual std::shared_ptr<device::Stream> consumer() = 0;
};

/// What ParameterTable knows of a parameter.
struct AttachedParameter {
  ObserverClient* client = nullptr;
  std::size_t number = 0;
};

/// Sees every operator before it runs and brings in the pages that it is about to read or write
/// (at::RecordFunction). One for the process, while any engine lives; docs/notes/paging.md.
///
/// install() and remove() count; they are called when no operator runs on pages.
namespace observer {

void install();
void remove();
/// Operators seen, and those of them that touched pages; since the process began.
struct Counts {
  std::uint64_t operators = 0;
  std::uint64_t touching = 0;
};
/// Counts only while `on`; off at first, for it costs a contended write an operator.
void count(bool on);
Counts counts();

}  // namespace observer

}  // namespace pagoda::torch
