// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace pagoda::device {

/// One operation on some bytes, as the ordering checker remembers it.
struct Access {
  std::size_t actor = 0;
  std::uint64_t time = 0;                   // the operation's number in its actor's clock
  std::shared_ptr<const std::string> what;  // "h2d copy 'page 12'"
};

/// An earlier access that the new one must come after, but is not known to.
struct Conflict {
  Access earlier;
  bool earlier_wrote = false;
  std::uintptr_t begin = 0;  // the bytes on which they meet
  std::uintptr_t end = 0;
};

/// For every byte of an address range: its last write, and each actor's last read since.
///
/// Ranges with the same history share an entry; a write makes its range one entry again. Not
/// thread-safe: the ordering checker's lock guards it.
class AccessMap {
 public:
  /// Whether an earlier access is over as far as the new one's actor knows.
  using Ordered = std::function<bool(const Access&)>;

  /// Notes a read of [begin, end); returns the first write that it is not ordered after.
  std::optional<Conflict> read(std::uintptr_t begin, std::uintptr_t end, const Access& access,
                               const Ordered& ordered);
  /// Notes a write of [begin, end); returns the first access that it is not ordered after.
  std::optional<Conflict> write(std::uintptr_t begin, std::uintptr_t end, const Access& access,
                                const Ordered& ordered);

  std::size_t entries() const noexcept { return segments_.size(); }

 private:
  struct Segment {
    std::uintptr_t end = 0;
    std::optional<Access> write;
    std::vector<Access> reads;  // since the write, at most one an actor
  };

  /// Makes `at` a border between entries, if it lies inside one.
  void split(std::uintptr_t at);

  std::map<std::uintptr_t, Segment> segments_;  // by first byte; they do not overlap
};

}  // namespace pagoda::device
