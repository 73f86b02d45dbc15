// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <span>

#include <c10/util/SmallVector.h>

#include "pagoda/device/device.h"
#include "pagoda/pager/pager.h"

namespace pagoda::torch {

class ObserverClient;
class PageStorage;

/// What an operator holds between its start and its end, with one engine. One thread.
struct Held {
  pager::Pager* pager = nullptr;
  ObserverClient* client = nullptr;
  std::shared_ptr<device::Stream> consumer;
  c10::SmallVector<pager::Access, 4> accesses;
  pager::Pin pin;  // of `accesses`, which stay in their place from then on

  std::span<const pager::Access> all() const { return {accesses.data(), accesses.size()}; }
  /// The stream that the operator runs on is known from now on.
  void find_consumer();
  /// Brings the pages in and pins them; throws what the pager does.
  void touch();
};

/// One entry, unless an operator mixes engines. Small ones need no allocation.
using HeldPages = c10::SmallVector<Held, 1>;

/// Adds the storage's page, once.
void note(PageStorage& storage, bool write, HeldPages& held);

/// While one lives, what this thread's operators do is not observed: a touch runs some. Not a
/// RecordFunctionGuard: every change of that rebuilds torch's list of callbacks, which costs more
/// than the touch.
class Touching {
 public:
  Touching() { here_ = true; }
  Touching(const Touching&) = delete;
  Touching& operator=(const Touching&) = delete;
  ~Touching() { here_ = false; }

  /// Whether the calling thread is at it.
  static bool here() noexcept { return here_; }

 private:
  static thread_local bool here_;
};

}  // namespace pagoda::torch
