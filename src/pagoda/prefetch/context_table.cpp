// SPDX-License-Identifier: Apache-2.0
#include "pagoda/prefetch/context_table.h"

#include <algorithm>
#include <utility>

namespace pagoda::prefetch {
namespace {

constexpr std::size_t kFirstSlots = 64;

/// Keys are hashes, and 0 marks a free slot.
std::uint64_t stored(std::uint64_t key) noexcept {
  return key == 0 ? 1 : key;
}

}  // namespace

const ContextTable::Slot* ContextTable::Generation::find(std::uint64_t key) const noexcept {
  if (count == 0) return nullptr;
  const std::size_t mask = slots.size() - 1;
  for (std::size_t i = key & mask;; i = (i + 1) & mask) {
    if (slots[i].key == key) return &slots[i];
    if (slots[i].key == 0) return nullptr;
  }
}

ContextTable::Slot* ContextTable::Generation::find(std::uint64_t key) noexcept {
  return const_cast<Slot*>(std::as_const(*this).find(key));
}

/// The free slot where `key`, which is not there, belongs.
ContextTable::Slot& ContextTable::Generation::place(std::uint64_t key) noexcept {
  const std::size_t mask = slots.size() - 1;
  std::size_t i = key & mask;
  while (slots[i].key != 0) i = (i + 1) & mask;
  slots[i].key = key;
  ++count;
  return slots[i];
}

void ContextTable::Generation::grow() {
  std::vector<Slot> before(std::max(kFirstSlots, 2 * slots.size()));
  before.swap(slots);
  count = 0;
  for (const Slot& slot : before) {
    if (slot.key != 0) place(slot.key).followed = slot.followed;
  }
}

void ContextTable::Generation::clear() {
  std::fill(slots.begin(), slots.end(), Slot{});
  count = 0;
}

ContextTable::ContextTable(std::size_t limit) : half_(std::max<std::size_t>(1, limit / 2)) {}

const Followed* ContextTable::find(std::uint64_t key) const noexcept {
  const Slot* slot = young_.find(stored(key));
  if (slot == nullptr) slot = old_.find(stored(key));
  return slot == nullptr ? nullptr : &slot->followed;
}

Followed* ContextTable::confirm(std::uint64_t key) {
  if (Slot* slot = young_.find(stored(key))) return &slot->followed;
  const Slot* slot = old_.find(stored(key));
  if (slot == nullptr) return nullptr;
  // The old copy stays behind, shadowed, until its generation goes.
  insert(key, Followed(slot->followed));
  return &young_.find(stored(key))->followed;
}

void ContextTable::insert(std::uint64_t key, const Followed& followed) {
  if (Slot* slot = young_.find(stored(key))) {
    slot->followed = followed;
    return;
  }
  if (young_.count >= half_) {
    std::swap(young_, old_);
    young_.clear();
  }
  if (2 * (young_.count + 1) > young_.slots.size()) young_.grow();
  young_.place(stored(key)).followed = followed;
}

}  // namespace pagoda::prefetch
