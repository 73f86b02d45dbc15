// SPDX-License-Identifier: Apache-2.0
#include "pagoda/device/arena_state.h"

#include <algorithm>
#include <exception>
#include <iterator>

#include "pagoda/base/log.h"
#include "pagoda/device/device.h"
#include "pagoda/device/ordering_checker.h"

namespace pagoda::device {

class ArenaState::Lock {
 public:
  explicit Lock(const ArenaState& arena) : arena_(arena), lock_(arena.mutex_) {
    if (const auto& checker = arena_.device_->checker()) checker->acquire(arena_.known_);
  }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
  ~Lock() {
    if (const auto& checker = arena_.device_->checker()) arena_.known_ = checker->publish();
  }

 private:
  const ArenaState& arena_;
  const RankedGuard<LockRank::Arena> lock_;
};

ArenaState::ArenaState(std::shared_ptr<Device> device, MemoryKind kind, Reservation reservation,
                       ArenaOptions options)
    : device_(std::move(device)),
      reservation_(std::move(reservation)),
      options_(std::move(options)) {
  PAGODA_REQUIRE(is_power_of_two(options_.alignment), "arena '{}': alignment {}", options_.name,
                 options_.alignment);
  PAGODA_REQUIRE_GT(reservation_.bytes(), 0u, "arena '{}' has an empty reservation", options_.name);
  memory_ = device_->allocate(kind, reservation_.bytes(),
                              {.name = options_.name, .touchers = options_.touchers});
  // Only an alignment beyond the device's own loses bytes at the start.
  const auto address = reinterpret_cast<std::uintptr_t>(memory_->data());
  const Bytes skipped = align_up(address, options_.alignment) - address;
  PAGODA_REQUIRE_LE(skipped + options_.alignment, memory_->size(),
                    "arena '{}' is too small for one block", options_.name);
  base_ = memory_->data() + skipped;
  capacity_ = align_down(memory_->size() - skipped, options_.alignment);
  if (const auto& checker = device_->checker()) checker->managed_by_arena(memory_->data());
  free_.give({0, capacity_, {}});
}

ArenaState::~ArenaState() {
  // Nothing may still be using the memory when it goes; a failure belongs to its stream.
  for (const auto& [offset, range] : free_.all()) {
    for (const Fence& fence : range.fences) {
      try {
        fence.mark.event->wait();
      } catch (const std::exception&) {
      }
    }
  }
}

LiveBlock* ArenaState::take_range(Bytes taken, Fences& fences, const Lock&) {
  std::optional<FreeRange> range = free_.take(taken);
  if (!range) {
    ++counters_.failures;
    return nullptr;
  }
  fences = std::move(range->fences);
  LiveBlock& live = live_[range->offset];
  live.offset = range->offset;
  live.taken = taken;
  ++counters_.allocations;
  counters_.peak = std::max(counters_.peak, capacity_ - free_.total() - counters_.quarantined);
  return &live;
}

namespace {

/// Has the stream, or the host, go on after the mark. A failure belongs to the stream of the mark.
/// False: that is over already.
bool wait_for(const Mark& mark, Stream* stream) {
  if (stream != nullptr && mark.stream == stream->id()) return false;
  if (mark.event->done()) return false;
  if (stream != nullptr) {
    stream->wait(*mark.event, Stream::OnFailure::Ignore);
  } else {
    try {
      mark.event->wait();
    } catch (const std::exception&) {
    }
  }
  return true;
}

}  // namespace

LiveBlock* ArenaState::take(Bytes bytes, Stream* stream, std::string_view name) {
  if (bytes > capacity_) {
    const Lock lock(*this);
    ++counters_.failures;
    return nullptr;
  }
  const Bytes taken = std::max(align_up(bytes, options_.alignment), options_.alignment);
  Fences fences;
  LiveBlock* live = nullptr;
  {
    const Lock lock(*this);
    live = take_range(taken, fences, lock);
    if (live == nullptr) return nullptr;
    live->size = bytes;
    live->name = name.empty() ? fmt::format("#{}", counters_.allocations) : std::string(name);
    if (stream != nullptr) live->streams.push_back(stream->shared_from_this());
  }
  // The bytes are ours now: waiting needs no lock. A stream need not wait for itself.
  std::uint64_t waits = 0;
  try {
    for (const Fence& fence : fences) {
      if (wait_for(fence.mark, stream)) ++waits;
    }
  } catch (...) {
    const Lock lock(*this);
    free_.give({live->offset, live->taken, std::move(fences)});
    live_.erase(live->offset);
    throw;
  }
  const Lock lock(*this);
  counters_.reuse_waits += waits;
  return live;
}

void ArenaState::announce(const LiveBlock& live, const Stream* stream) {
  if (const auto& checker = device_->checker()) {
    checker->allocated(base_ + live.offset, live.size, live.name, stream);
  }
}

void ArenaState::touch(const std::byte* data, Stream& stream) {
  PAGODA_REQUIRE(stream.device().kind() == device_->kind(),
                 "a block of '{}' was touched by stream '{}' of another kind of device",
                 options_.name, stream.name());
  const Lock lock(*this);
  LiveBlock& live = find(data, lock);
  const auto known = [&](const auto& other) { return other->id() == stream.id(); };
  if (std::ranges::none_of(live.streams, known)) live.streams.push_back(stream.shared_from_this());
}

void ArenaState::free(const std::byte* data) {
  std::vector<std::shared_ptr<Stream>> streams;  // dropped without the lock: a last one waits
  FreeRange range;
  {
    const Lock lock(*this);
    LiveBlock& live = find(data, lock);
    live.freeing = true;
    streams = std::move(live.streams);
    range = {live.offset, live.taken, {}};
    if (const auto& checker = device_->checker()) checker->freed(data);
  }
  // Marked without the lock: a stream may be freeing a block of this arena while it is held.
  std::exception_ptr failure;
  try {
    for (const auto& stream : streams) {
      range.fences.push_back({range.offset, range.offset + range.bytes, stream->mark()});
    }
  } catch (...) {
    failure = std::current_exception();
  }
  const Lock lock(*this);
  live_.erase(range.offset);
  if (failure) {
    // Nothing tells when its streams are done with it, so nobody else may have it.
    counters_.quarantined += range.bytes;
    std::rethrow_exception(failure);
  }
  free_.give(std::move(range));
}

void ArenaState::mark_users(const std::byte* data, std::vector<Mark>& taken) {
  std::vector<std::shared_ptr<Stream>> streams;
  {
    const Lock lock(*this);
    streams = find(data, lock).streams;
  }
  std::vector<Mark> marks;  // taken without the lock, as in free()
  for (const auto& stream : streams) {
    const auto same = [&](const Mark& mark) { return mark.stream == stream->id(); };
    auto mark = std::ranges::find_if(taken, same);
    if (mark == taken.end()) {
      if (stream->capturing()) continue;  // what is captured runs when the graph is replayed
      mark = taken.insert(taken.end(), stream->mark());
    }
    marks.push_back(*mark);
  }
  const Lock lock(*this);
  find(data, lock).users = std::move(marks);  // later ones of the same streams
}

void ArenaState::wait_for_users(const std::byte* data, Stream* stream) {
  std::vector<Mark> users;
  {
    const Lock lock(*this);
    users = find(data, lock).users;
  }
  for (const Mark& mark : users) wait_for(mark, stream);
}

LiveBlock& ArenaState::find(const std::byte* data, const Lock&) {
  if (data < base_ || data >= base_ + capacity_) {
    throw EngineError(fmt::format("{} is not in arena '{}'", fmt::ptr(data), options_.name));
  }
  const Bytes offset = static_cast<Bytes>(data - base_);
  const auto it = live_.find(offset);
  if (it != live_.end() && !it->second.freeing) return it->second;
  if (it != live_.end() || free_.contains(offset)) {
    throw EngineError(
        fmt::format("offset {} of arena '{}' is free: a block there was freed twice, "
                    "or never allocated",
                    offset, options_.name));
  }
  const auto after = live_.upper_bound(offset);
  throw EngineError(
      fmt::format("offset {} of arena '{}' is not where a block starts{}", offset, options_.name,
                  after == live_.begin()
                      ? std::string()
                      : fmt::format(": it is inside or behind block '{}' at {}",
                                    std::prev(after)->second.name, std::prev(after)->first)));
}

ArenaStats ArenaState::stats() const {
  const Lock lock(*this);
  return stats(lock);
}

ArenaStats ArenaState::stats(const Lock&) const {
  ArenaStats stats = counters_;
  stats.capacity = capacity_;
  stats.free = free_.total();
  stats.used = capacity_ - stats.free - stats.quarantined;
  stats.largest_free = free_.largest();
  stats.free_ranges = free_.count();
  stats.blocks = live_.size();
  return stats;
}

std::vector<LeakedBlock> ArenaState::live() const {
  const Lock lock(*this);
  std::vector<LeakedBlock> blocks;
  for (const auto& [offset, live] : live_) blocks.push_back({live.name, offset, live.size});
  return blocks;
}

}  // namespace pagoda::device
