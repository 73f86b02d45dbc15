// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "pagoda/prefetch/context_table.h"
#include "pagoda/prefetch/expected_queue.h"
#include "pagoda/prefetch/touch.h"

namespace pagoda::prefetch {

/// Learns in which order a program touches pages, and tells what it will touch next.
///
/// A context is the last n touches, for several n; for each, the table knows what followed last
/// time. The shortest context predicts as long as it is right; where something else follows once,
/// longer ones are learnt for that place, and the longest known one predicts. So most places cost
/// one lookup, and places that depend on what went before (the end of a pass, a layer that is used
/// 200 times) are still told apart. Nothing is thrown away when the program turns to another phase:
/// its first touch already is a context from which the whole phase follows.
///
/// The expected touches are a queue: a touch that was expected pops it and adds one at the far end,
/// a surprise builds it anew from the table. The note "Knowing what comes next"
/// (docs/notes/prefetch.md) explains the choices.
///
/// One thread at a time: the caller holds its lock.
class Predictor {
 public:
  struct Options {
    /// How many touches ahead to look.
    std::size_t horizon = 4096;
    /// Contexts kept, half of them of one touch and the others in equal shares of each length; 48
    /// to 96 bytes each, once used. Those not confirmed for longest are dropped.
    std::size_t max_contexts = std::size_t{1} << 19;
    /// Expected touches made at once after a surprise; the others follow, kCatchUp a touch.
    std::size_t rebuild = 128;
  };
  struct Stats {
    std::uint64_t hits = 0;     // the touch was the expected one
    std::uint64_t misses = 0;   // another one was expected
    std::uint64_t unknown = 0;  // none was expected
    std::size_t contexts = 0;   // kept now
  };
  static constexpr std::size_t kCatchUp = 16;
  /// Lengths of contexts. Those near to each other at the end are for loops: the end of one that
  /// takes n touches is foreseen after n plus the length that covers it.
  static constexpr std::array<std::size_t, 10> kLengths = {1,   2,    8,    32,   128,
                                                           512, 1024, 2048, 4096, 8192};

  Predictor() : Predictor(Options{}) {}
  explicit Predictor(const Options& options);

  /// Learns from a touch and steps forward. A repeat of the current touch is part of it.
  void touch(Touch touch, Nanos now);
  /// The program waited for so long since the current touch (a fetch, a full arena): the time does
  /// not count, or a slow fetch would look like an operator that leaves time for fetching.
  void stalled(Nanos wait) noexcept { stalled_ += wait; }
  /// The page is gone: what was learnt of it is not predicted any more.
  void forget(PageId page);

  /// How many touches ahead are known.
  std::size_t size() const noexcept { return queue_.size(); }
  /// The i-th of them, 0 being the very next.
  Expected ahead(std::size_t i) const noexcept {
    Expected expected = queue_.at(i);
    expected.in = static_cast<Nanos>(static_cast<double>(expected.in) * pace_);
    return expected;
  }
  /// Its page alone.
  PageId page_ahead(std::size_t i) const noexcept { return queue_.page_at(i); }
  /// How many touches from now the page is expected, 1 being the very next; nothing when it is not
  /// expected within the horizon. Constant time.
  std::optional<std::size_t> next_use(PageId page) const noexcept { return queue_.next_use(page); }
  /// How many touches ago the page was touched, 0 being the current one. Constant time.
  std::optional<std::uint64_t> last_use(PageId page) const noexcept;

  /// Touches so far, repeats left out; and those of them that were not expected.
  std::uint64_t position() const noexcept { return position_; }
  std::uint64_t surprises() const noexcept { return stats_.misses + stats_.unknown; }
  Stats stats() const;

 private:
  struct Page {
    std::uint64_t last = 0;  // position of its last touch; 0: never
    std::uint32_t life = 0;  // how often the number was forgotten
  };

  std::uint64_t& prefix(std::uint64_t position) noexcept {
    return prefixes_[position & (prefixes_.size() - 1)];
  }
  std::uint64_t prefix(std::uint64_t position) const noexcept {
    return prefixes_[position & (prefixes_.size() - 1)];
  }
  Page& page(PageId id);
  bool alive(const Followed& followed) const noexcept;
  std::uint64_t symbol(Touch touch) const noexcept;
  std::uint64_t key(std::uint64_t position, std::size_t order) const noexcept;
  void learn(Touch next, Nanos gap);
  const Followed* follows(std::uint64_t position) const noexcept;
  void extend(std::size_t count);
  void keep_pace(double expected, double measured) noexcept;

  std::size_t rebuild_;
  std::vector<ContextTable> tables_;     // one for each length
  std::vector<std::uint64_t> prefixes_;  // a ring of hashes of everything up to a position
  std::vector<Page> pages_;              // by page
  ExpectedQueue queue_;                  // position_ + 1 and on
  std::uint64_t position_ = 0;           // of the current touch; the first is 1
  std::optional<Touch> current_;
  Nanos current_at_ = 0;
  Nanos stalled_ = 0;
  // Times in the queue are those known when it was made, up to a horizon ago. The program may have
  // become faster since (its first passes are slow): what recent touches took, over what they were
  // expected to take, corrects them.
  double pace_ = 1;
  double recent_expected_ = 0;
  double recent_measured_ = 0;
  Stats stats_;
};

}  // namespace pagoda::prefetch
