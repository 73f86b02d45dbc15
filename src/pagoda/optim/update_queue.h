// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>

namespace pagoda::optim {

struct UpdateRecord;

/// The updates that wait for their turn: first those that somebody waits for, then in the order to
/// follow (UpdateRecord::place). Guarded by the updater's lock.
class UpdateQueue {
 public:
  bool empty() const noexcept { return records_.empty(); }
  void add(UpdateRecord& record);
  void remove(UpdateRecord& record);
  /// Somebody waits for it: it goes before all others that wait, if it is here.
  void bring_forward(UpdateRecord& record);
  /// The places of records have changed.
  void sort();
  /// The next one, which is nobody's urgent any more. Not while it is empty.
  UpdateRecord& take();

 private:
  std::deque<UpdateRecord*> records_;
};

}  // namespace pagoda::optim
