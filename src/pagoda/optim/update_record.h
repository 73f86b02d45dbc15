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
  /// What has become of the page's update. Early ones are those that begin before their step(); in
  /// brackets what they take: `next`, and where they can be rolled back TrainedPage::spare.
  enum class Stage : std::uint8_t {
    Idle,          ///< there is none
    Queued,        ///< step() has asked for it: nothing has been computed
    Running,       ///< step() has asked for it: chunks are under way [the same, if it was early]
    EarlyQueued,   ///< nothing has been computed, and step() has not come
    EarlyRunning,  ///< chunks are under way, and step() has not come [next, spare]
    RollingBack,   ///< chunks are under way, and the rest is left out [next, spare]
    Computed,      ///< all is: waits for step() [next, spare]
    Copying,       ///< step() has taken it: `next` goes to the page's home, in its turn [next]
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
  std::uint64_t done = 0;               // updates this rank's shard has seen
  std::uint64_t target = 0;             // …must see
  std::size_t place = ~std::size_t{0};  // in the order to follow
  bool urgent = false;                  // somebody waits for it
  /// Of the update under way, fixed while chunks of it are: where an early one leaves parameters
  /// until step() publishes them (null: it writes to the page's home)…
  pager::Home* next = nullptr;
  bool reversible = false;  // …and whether its state goes to the spare
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

  Stage stage() const noexcept { return stage_; }
  /// Changes the stage, as the table of docs/notes/lazy-updates.md says. With Idle and Queued the
  /// update has no memory of its own.
  void enter(Stage to);
  /// Has begun, or may begin, before the step() that asks for it.
  bool early() const noexcept {
    return stage_ == Stage::Computed || stage_ == Stage::EarlyQueued || early_under_way();
  }
  /// …and the updater's thread is working on it.
  bool early_under_way() const noexcept {
    return stage_ == Stage::EarlyRunning || stage_ == Stage::RollingBack;
  }

  std::uint64_t chunks() const noexcept { return layout.chunks(page->updated.size()); }
  UpdateChunk::Written written() const noexcept { return {reversible, next}; }

 private:
  Stage stage_ = Stage::Idle;
};

}  // namespace pagoda::optim
