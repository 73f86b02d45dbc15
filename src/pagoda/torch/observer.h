// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <exception>
#include <memory>
#include <string>

#include "pagoda/device/device.h"

namespace pagoda::torch {

/// What an engine learns from the observer.
class ObserverClient {
 public:
  virtual ~ObserverClient() = default;
  /// A touch failed, which ends the operator, and the engine where bytes are lost. Returns the
  /// cause that the operator throws. Any thread.
  virtual std::string touch_failed(std::exception_ptr error) noexcept = 0;
  /// A parameter that is trained has been given a storage that is no page (`.data =`, `set_`,
  /// `module.to()`); an operator is about to use it. Throws what prevents that it becomes one: the
  /// operator runs on the plain storage.
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
/// install() and remove() count. After the last remove() storages that were pages must throw.
namespace observer {

void install();
void remove();
/// UserError if the calling thread is inside an operator that has pages: `call` would wait for it.
void require_no_operator(const char* call);
/// Whether no storage is a page, or is just becoming one.
bool no_pages() noexcept;
/// Whether the calling thread is inside an operator that is denied its pages.
bool is_denying() noexcept;

}  // namespace observer

}  // namespace pagoda::torch
