// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/enders.h"

#include <atomic>
#include <chrono>
#include <exception>

#include "pagoda/base/log.h"
#include "pagoda/base/start_thread.h"

namespace pagoda::torch {
namespace {

thread_local int ends_here = 0;  // EndsHere objects of this thread

}  // namespace

Enders& Enders::instance() {
  static std::atomic<Enders*> current = nullptr;  // never destroyed: its threads may outlast main()
  Enders* found = current.load();
  while (found == nullptr || !found->owner_.here()) {
    auto made = std::make_unique<Enders>();
    if (current.compare_exchange_strong(found, made.get())) return *made.release();
  }
  return *found;
}

Enders::EndsHere::EndsHere() {
  ++ends_here;
}

Enders::EndsHere::~EndsHere() {
  --ends_here;
}

void Enders::end(std::function<void()> ending) noexcept {
  if (ends_here > 0) {
    ending();
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    // Whoever needs Python's lock now never returns: the process takes it along.
    if (stopped_) return;
    ++running_;
  }
  try {
    start_thread([this, ending = std::move(ending)] {
      ending();
      const std::lock_guard lock(mutex_);
      --running_;
      changed_.notify_all();
    }).detach();
  } catch (const std::exception& error) {  // called by destructors: the process takes it along
    log::error("torch", "an engine cannot end", {{"cause", error.what()}});
    const std::lock_guard lock(mutex_);
    --running_;
    changed_.notify_all();
  }
}

void Enders::stop() {
  if (!owner_.here()) return;
  std::unique_lock lock(mutex_);
  stopped_ = true;
  changed_.wait_for(lock, std::chrono::seconds(10), [&] { return running_ == 0; });
}

}  // namespace pagoda::torch
