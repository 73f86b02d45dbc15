// SPDX-License-Identifier: Apache-2.0
#include "pagoda/device/ordering_checker.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>

#include "pagoda/base/log.h"

namespace pagoda::device {
namespace {

std::uintptr_t address(const void* data) {
  return reinterpret_cast<std::uintptr_t>(data);
}

}  // namespace

OrderingChecker::OrderingChecker(HostThreads host_threads) : host_threads_(host_threads) {
  if (host_threads_ == HostThreads::Together) actors_.push_back({"the host", true, {}});
}

OrderingChecker::~OrderingChecker() {
  for (const std::string& violation : violations_) {
    log::error("device", "an ordering violation was never looked at", {{"violation", violation}});
  }
}

std::shared_ptr<OrderingChecker> OrderingChecker::from_environment() {
  const char* value = std::getenv("PAGODA_CHECK_ORDER");
  const std::string_view text = value == nullptr ? "" : value;
  if (text.empty() || text == "0") return nullptr;
  PAGODA_REQUIRE_EQ(text, "1", "PAGODA_CHECK_ORDER is 0 or 1");
  return std::make_shared<OrderingChecker>();
}

// ---- who knows what

std::size_t OrderingChecker::host(const Lock&) {
  if (host_threads_ == HostThreads::Together) return 0;
  const auto [it, fresh] = threads_.emplace(std::this_thread::get_id(), actors_.size());
  if (fresh) actors_.push_back({fmt::format("host thread {}", threads_.size()), true, {}});
  return it->second;
}

std::size_t OrderingChecker::actor(const Stream& stream, const Lock&) {
  const auto [it, fresh] = streams_.emplace(stream.id(), actors_.size());
  if (fresh) actors_.push_back({fmt::format("stream '{}'", stream.name()), false, {}});
  return it->second;
}

std::size_t OrderingChecker::issue(const Stream& stream, const Lock& lock) {
  const std::size_t issuer = host(lock);
  const std::size_t self = actor(stream, lock);
  actors_[self].clock.join(actors_[issuer].clock);
  return self;
}

void OrderingChecker::recorded(const Stream& stream, Event& event) {
  const Lock lock(mutex_);
  event.recorded_ = actors_[issue(stream, lock)].clock;
}

void OrderingChecker::waited(const Stream& stream, const Event& event) {
  const Lock lock(mutex_);
  actors_[issue(stream, lock)].clock.join(event.recorded_);
}

VectorClock OrderingChecker::covered_by(const Event& event) const {
  const Lock lock(mutex_);
  return event.recorded_;
}

VectorClock OrderingChecker::issued_on(const Stream& stream) {
  const Lock lock(mutex_);
  return actors_[actor(stream, lock)].clock;
}

VectorClock OrderingChecker::publish() {
  const Lock lock(mutex_);
  return actors_[host(lock)].clock;
}

void OrderingChecker::acquire(const VectorClock& known) {
  const Lock lock(mutex_);
  actors_[host(lock)].clock.join(known);
}

// ---- memory and blocks

void OrderingChecker::added_memory(const Memory& memory, std::string_view name) {
  const Lock lock(mutex_);
  const std::uintptr_t begin = address(memory.data());
  Region region;
  region.end = begin + memory.size();
  region.kind = memory.kind();
  region.name = name;
  regions_.insert_or_assign(begin, std::move(region));
}

void OrderingChecker::removed_memory(const void* data) {
  const Lock lock(mutex_);
  regions_.erase(address(data));
}

void OrderingChecker::managed_by_arena(const void* data) {
  const Lock lock(mutex_);
  const auto it = find(address(data), lock);
  PAGODA_CHECK(it != regions_.end(), "an arena over memory the checker does not know");
  it->second.managed = true;
}

void OrderingChecker::allocated(const void* data, Bytes bytes, std::string_view block,
                                const Stream* stream) {
  const Lock lock(mutex_);
  const auto found = find(address(data), lock);
  PAGODA_CHECK(found != regions_.end(), "a block of memory the checker does not know");
  Region& region = found->second;
  const std::uintptr_t begin = address(data);
  const std::uintptr_t end = begin + bytes;
  std::erase_if(region.freed,
                [&](const auto& old) { return old.first < end && old.second.end > begin; });
  region.live.insert_or_assign(begin, BlockName{end, std::string(block)});
  // Taking a block counts as a write: whatever its bytes were used for must be over for the new
  // owner's stream, and every other stream must be ordered after that one.
  const std::size_t self = stream != nullptr ? issue(*stream, lock) : host(lock);
  use(self, Mode::Write, data, bytes, "allocation", lock);
}

void OrderingChecker::freed(const void* data) {
  const Lock lock(mutex_);
  const auto found = find(address(data), lock);
  if (found == regions_.end()) return;
  auto node = found->second.live.extract(address(data));
  if (!node.empty()) found->second.freed.insert_or_assign(node.key(), std::move(node.mapped()));
}

// ---- uses

void OrderingChecker::read(const Stream& stream, const void* data, Bytes bytes,
                           std::string_view what) {
  const Lock lock(mutex_);
  use(issue(stream, lock), Mode::Read, data, bytes, what, lock);
}

void OrderingChecker::write(const Stream& stream, const void* data, Bytes bytes,
                            std::string_view what) {
  const Lock lock(mutex_);
  use(issue(stream, lock), Mode::Write, data, bytes, what, lock);
}

void OrderingChecker::host_read(const void* data, Bytes bytes, std::string_view what) {
  const Lock lock(mutex_);
  use(host(lock), Mode::Read, data, bytes, what, lock);
}

void OrderingChecker::host_write(const void* data, Bytes bytes, std::string_view what) {
  const Lock lock(mutex_);
  use(host(lock), Mode::Write, data, bytes, what, lock);
}

void OrderingChecker::copy(const Stream& stream, const void* dst, const void* src, Bytes bytes,
                           Direction direction, std::string_view label) {
  std::string what = fmt::format("{} copy", name(direction));
  if (!label.empty()) what += fmt::format(" '{}'", label);
  const bool from_device =
      direction == Direction::DeviceToHost || direction == Direction::DeviceToDevice;
  const bool to_device =
      direction == Direction::HostToDevice || direction == Direction::DeviceToDevice;
  const Lock lock(mutex_);
  check_kind(src, from_device ? MemoryKind::Device : MemoryKind::Pinned, what + "'s source", lock);
  check_kind(dst, to_device ? MemoryKind::Device : MemoryKind::Pinned, what + "'s target", lock);
  const std::size_t self = issue(stream, lock);
  use(self, Mode::Read, src, bytes, what, lock);
  use(self, Mode::Write, dst, bytes, what, lock);
}

std::map<std::uintptr_t, OrderingChecker::Region>::iterator OrderingChecker::find(std::uintptr_t at,
                                                                                  const Lock&) {
  const auto it = regions_.upper_bound(at);
  if (it == regions_.begin() || std::prev(it)->second.end <= at) return regions_.end();
  return std::prev(it);
}

void OrderingChecker::use(std::size_t self, Mode mode, const void* data, Bytes bytes,
                          std::string_view what, const Lock& lock) {
  if (bytes == 0) return;
  const std::uintptr_t begin = address(data);
  const std::uintptr_t end = begin + bytes;
  const auto found = find(begin, lock);
  if (found == regions_.end()) return;  // not ours: nothing is known about its lifetime
  Region& region = found->second;
  const char* verb = mode == Mode::Read ? "reads" : "writes";
  const std::string who = fmt::format("{} on {} {}", what, actors_[self].name, verb);
  check_bounds(region, begin, end, who, lock);

  VectorClock& clock = actors_[self].clock;
  const Access access{self, clock.tick(self), std::make_shared<const std::string>(what)};
  const bool by_host = actors_[self].host;
  const auto ordered = [&](const Access& earlier) {
    // Two host threads order each other by means that are not seen here.
    if (by_host && actors_[earlier.actor].host) return true;
    return clock.at(earlier.actor) >= earlier.time;
  };
  const std::optional<Conflict> conflict = mode == Mode::Read
                                               ? region.accesses.read(begin, end, access, ordered)
                                               : region.accesses.write(begin, end, access, ordered);
  if (!conflict) return;
  const Access& earlier = conflict->earlier;
  const std::string& other = actors_[earlier.actor].name;
  fail(fmt::format(
           "{} {} that {} on {} {}, and nothing orders the second after the first: {} has "
           "waited for no event that {} recorded after its {}",
           who,
           describe(region, std::max(begin, conflict->begin), std::min(end, conflict->end), lock),
           *earlier.what, other, conflict->earlier_wrote ? "wrote" : "read", actors_[self].name,
           other, *earlier.what),
       lock);
}

void OrderingChecker::check_bounds(const Region& region, std::uintptr_t begin, std::uintptr_t end,
                                   const std::string& who, const Lock& lock) {
  if (end > region.end) {
    fail(fmt::format("{} {} bytes past the end of '{}'", who, end - region.end, region.name), lock);
  }
  if (!region.managed) return;
  const auto after = region.live.upper_bound(begin);
  const bool inside = after != region.live.begin() && std::prev(after)->second.end > begin;
  if (!inside) {
    fail(
        fmt::format("{} {}, which is not in a live block", who, describe(region, begin, end, lock)),
        lock);
  }
  const BlockName& block = std::prev(after)->second;
  if (end > block.end) {
    fail(fmt::format("{} {} bytes past the end of block '{}' of '{}'", who, end - block.end,
                     block.name, region.name),
         lock);
  }
}

void OrderingChecker::check_kind(const void* data, MemoryKind kind, std::string_view what,
                                 const Lock& lock) {
  const auto found = find(address(data), lock);
  if (found == regions_.end() || found->second.kind == kind) return;
  fail(fmt::format("{} lies in '{}', which is {} memory", what, found->second.name,
                   name(found->second.kind)),
       lock);
}

std::string OrderingChecker::describe(const Region& region, std::uintptr_t begin,
                                      std::uintptr_t end, const Lock&) const {
  const auto named = [&](const std::map<std::uintptr_t, BlockName>& blocks, const char* state) {
    const auto after = blocks.upper_bound(begin);
    if (after == blocks.begin() || std::prev(after)->second.end <= begin) return std::string();
    const auto& [start, block] = *std::prev(after);
    return fmt::format("bytes [{}, {}) of {}block '{}' of '{}'", begin - start, end - start, state,
                       block.name, region.name);
  };
  std::string text = named(region.live, "");
  if (text.empty()) text = named(region.freed, "the freed ");
  if (!text.empty()) return text;
  const std::uintptr_t start = std::prev(regions_.upper_bound(begin))->first;
  return fmt::format("bytes [{}, {}) of '{}'", begin - start, end - start, region.name);
}

// ---- what was found

void OrderingChecker::fail(std::string message, const Lock&) {
  violations_.push_back(message);
  throw OrderingViolation(std::move(message));
}

void OrderingChecker::check() const {
  const Lock lock(mutex_);
  if (!violations_.empty()) throw OrderingViolation(violations_.front());
}

std::vector<std::string> OrderingChecker::take_violations() {
  const Lock lock(mutex_);
  return std::exchange(violations_, {});
}

}  // namespace pagoda::device
