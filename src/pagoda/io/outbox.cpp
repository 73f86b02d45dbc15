// SPDX-License-Identifier: Apache-2.0
#include "pagoda/io/outbox.h"

#include "pagoda/io/piece.h"
#include "pagoda/io/volume.h"

namespace pagoda::io {

void Outbox::run(Piece& piece) noexcept {
  runnable_.push(piece);
}

void Outbox::submit(Piece& piece) noexcept {
  ready_.push(piece);
}

void Outbox::flush() noexcept {
  while (Request* next = runnable_.pop()) static_cast<Piece*>(next)->go_on(*this);
  // One batch per engine, taken out of the mixed list in passes: there are few engines.
  while (!ready_.empty()) {
    RequestList batch;
    RequestList rest;
    const unsigned engine = static_cast<Piece*>(ready_.first())->engine();
    while (Request* next = ready_.pop()) {
      (static_cast<Piece*>(next)->engine() == engine ? batch : rest).push(*next);
    }
    ready_ = rest;
    volume_.engine(engine).submit(batch);
  }
}

}  // namespace pagoda::io
