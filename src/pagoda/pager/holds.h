// SPDX-License-Identifier: Apache-2.0
// Included by the pager's own files alone.
#pragma once

#include <string>
#include <vector>

#include "pagoda/pager/homes.h"

namespace pagoda::pager {

/// Pages that user code holds, to use them by raw pointers. Pointers are not seen when they write.
/// Their bytes are, where the host can read them; elsewhere a hold says that it may write.
class Holds {
 public:
  using Lock = PageTable::Lock;

  Holds(PageTable& table, Tiers& tiers, Bindings& bindings, Homes& homes, DeviceCopies& copies)
      : table_(table), tiers_(tiers), bindings_(bindings), homes_(homes), copies_(copies) {}

  /// One more hold of a page that an operator has pinned: the pin is the hold's. `writes`: what
  /// becomes of those by raw pointers.
  void add(PageRecord& page, bool write, RawWrites writes, Lock& lock);
  void remove(PageRecord& page, Lock& lock) noexcept;
  /// What pointers may write to is as it was now: for what find_writes() compares with, and for
  /// masters to follow.
  void keep(PageRecord& page, Lock& lock);
  /// What pointers have written counts as written by user code.
  void find_writes(Lock& lock);
  /// Pages that pointers have written to where that must be told, or is refused and was undone,
  /// each once.
  std::vector<std::string> take_reported(Lock& lock);

 private:
  bool put_back(PageRecord& page, Lock& lock) noexcept;
  template <class Visit>
  void for_each_held(Lock& lock, const Visit& visit);
  bool note_write(PageRecord& page, Lock& lock);
  void copy_bytes(PageRecord& page, Lock& lock);

  PageTable& table_;
  Tiers& tiers_;
  Bindings& bindings_;
  Homes& homes_;
  DeviceCopies& copies_;
  std::vector<std::string> reported_;  // guarded by the table's lock
};

}  // namespace pagoda::pager
