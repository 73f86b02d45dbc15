// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "pagoda/io/request.h"

namespace pagoda::io {

class Piece;
class Volume;

/// What one call has set going, handed to the engines in one batch each at its end.
///
/// A piece that ends lets others start, which may end at once and let others start: they are run
/// one after another from here, not inside each other. A local of one thread.
class Outbox {
 public:
  explicit Outbox(Volume& volume) : volume_(volume) {}
  Outbox(const Outbox&) = delete;
  Outbox& operator=(const Outbox&) = delete;

  /// `piece` has its blocks (and its buffer, if it waited for one) and can go on.
  void run(Piece& piece) noexcept;
  /// `piece` is to be submitted to its engine.
  void submit(Piece& piece) noexcept;
  /// Runs what can run and submits what is to be submitted. The volume may be gone afterwards if
  /// this was its last transfer.
  void flush() noexcept;

 private:
  Volume& volume_;
  RequestList runnable_;
  RequestList ready_;
};

}  // namespace pagoda::io
