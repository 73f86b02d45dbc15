// SPDX-License-Identifier: Apache-2.0
// Included by the updater's own files alone.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "pagoda/optim/state_layout.h"
#include "pagoda/optim/trained_page.h"
#include "pagoda/optim/update_chunk.h"
#include "pagoda/pager/home.h"
#include "pagoda/pager/sharding.h"

namespace pagoda::optim {

/// A trained page as the updater knows it. Guarded by the updater's lock, but for what is said to
/// be the thread's.
struct UpdateRecord {
  /// What has become of the page's update. Early ones are those that begin before their step();
  /// what they cost is in brackets.
  enum class Stage : std::uint8_t {
    Idle,      ///< there is none
    Waiting,   ///< in the queue: nothing has been computed
    Running,   ///< chunks of it are under way
    Computed,  ///< early: waits for step() [the gradient, or TrainedPage::next and ::spare]
  };

  /// Which elements of an update under way can be read before all of it is published.
  enum class Rows : std::uint8_t {
    Open,   ///< none; whoever asks first has some go before the others
    Asked,  ///< the thread will make, or makes, `asked`
    Made,   ///< `made`, and no others go first
    Whole,  ///< none, and none goes first: masters are made chunk by chunk
    All,    ///< every chunk has been computed: nothing may be made a second time
  };

  TrainedPage* page;
  StateLayout layout;
  Stage stage = Stage::Idle;
  std::uint64_t done = 0;               // updates this rank's shard has seen
  std::uint64_t target = 0;             // …must see
  std::size_t place = ~std::size_t{0};  // in the order to follow
  bool urgent = false;                  // somebody waits for it
  // Of the update under way. The first two are fixed while chunks of it are.
  bool early = false;        // writes parameters to `next`, which step() publishes
  bool reversible = false;   // …and state to the spare
  bool released = true;      // step() has asked for it
  bool rolled_back = false;  // its rest is left out
  bool copies = false;       // all is computed, and goes to the page's home
  const pager::Home* next = nullptr;
  std::shared_ptr<const StepScalars> step;
  std::uint64_t chunks_left = 0;  // the thread's
  std::uint64_t computed = 0;     // chunks of the update under way: the thread's
  bool in_place = false;          // nothing of it passes through buffers
  unsigned waiting = 0;           // for it
  bool removed = false;           // …in vain
  Rows rows = Rows::Open;
  /// Elements that go before the others of their page, in ascending order.
  std::vector<pager::Range> asked;
  std::vector<pager::Range> made;  // the thread's, which writes it under the lock

  std::uint64_t chunks() const noexcept { return layout.chunks(page->updated.size()); }
  UpdateChunk::Written written() const noexcept { return {reversible, early ? next : nullptr}; }
};

}  // namespace pagoda::optim
