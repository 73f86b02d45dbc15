// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "pagoda/base/bytes.h"
#include "pagoda/device/stream.h"

namespace pagoda::device {

class Arena;
class ArenaState;

/// What an arena knows of a block that is in use.
struct LiveBlock {
  Bytes offset = 0;
  Bytes size = 0;   // as asked for
  Bytes taken = 0;  // rounded up to the arena's alignment
  std::string name;
  bool freeing = false;                          // its streams are being marked
  std::vector<std::shared_ptr<Stream>> streams;  // every stream that touched it
  std::vector<Mark> users;                       // Block::mark_users()
};

/// Some bytes of an Arena, given back when the handle goes.
///
/// Freeing is stream-ordered: the bytes may be handed out again at once, and the next user's stream
/// waits for every stream that touched the block. So a block may be dropped while work that uses
/// it is still queued, provided each such stream was told by touch() or on(). Move-only; one handle
/// is used by one thread at a time, but touch() may be called from several. May outlive its Arena
/// (which is reported as a leak).
class Block {
 public:
  /// Holds nothing.
  Block() = default;
  Block(Block&& other) noexcept;
  Block& operator=(Block&& other) noexcept;
  ~Block();

  explicit operator bool() const noexcept { return live_ != nullptr; }
  std::byte* data() const noexcept { return data_; }
  Bytes size() const noexcept { return live_ != nullptr ? live_->size : 0; }
  /// Distance from the start of the arena.
  Bytes offset() const noexcept { return live_ != nullptr ? live_->offset : 0; }
  const std::string& name() const;

  /// `stream` has used or will use the block: freeing it waits for what that stream has been issued
  /// until then. The stream it was allocated for is known already.
  void touch(Stream& stream) const;
  /// data(), remembered as used by `stream`: `s.copy_async(dst.on(s), src.on(s), …)`.
  std::byte* on(Stream& stream) const;

  /// For whoever will overwrite the block while it stays: what its streams have been given until
  /// now still uses it. `taken` has the marks that were taken for other blocks at the same moment.
  void mark_users(std::vector<Mark>& taken) const;
  /// `stream` goes on when the users that were marked are done; the other one has the host wait.
  void wait_for_users(Stream& stream) const;
  void wait_for_users() const;

  /// Frees now; throws what the destructor could only log.
  void free();
  /// Lets go of the handle, not of the bytes: for owners that can keep a pointer only. They call
  /// Arena::free(pointer) before the arena goes.
  [[nodiscard]] std::byte* detach() noexcept;

 private:
  friend class Arena;
  Block(std::shared_ptr<ArenaState> arena, LiveBlock* live, std::byte* data) noexcept;

  std::shared_ptr<ArenaState> arena_;
  LiveBlock* live_ = nullptr;  // lives in *arena_
  std::byte* data_ = nullptr;
};

}  // namespace pagoda::device
