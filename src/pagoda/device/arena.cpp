// SPDX-License-Identifier: Apache-2.0
#include "pagoda/device/arena.h"

#include "pagoda/base/log.h"
#include "pagoda/device/arena_state.h"

namespace pagoda::device {

Arena::Arena(std::shared_ptr<Device> device, Reservation reservation, ArenaOptions options)
    : Arena(std::move(device), MemoryKind::Device, std::move(reservation), std::move(options)) {}

Arena::Arena(std::shared_ptr<Device> device, MemoryKind kind, Reservation reservation,
             ArenaOptions options)
    : state_(std::make_shared<ArenaState>(std::move(device), kind, std::move(reservation),
                                          std::move(options))) {}

Arena::~Arena() {
  const std::vector<LeakedBlock> leaked = state_->live();
  if (leaked.empty()) return;
  if (state_->options().on_leak) {
    state_->options().on_leak(leaked);
    return;
  }
  for (const LeakedBlock& block : leaked) {
    log::error("device", "a block outlives its arena",
               {{"arena", name()}, {"block", block.name}, {"bytes", block.size}});
  }
}

std::optional<Block> Arena::take(Bytes bytes, Stream* stream, std::string_view name) {
  LiveBlock* live = state_->take(bytes, stream, name);
  if (live == nullptr) return std::nullopt;
  Block block(state_, live, state_->data() + live->offset);
  state_->announce(*live, stream);
  return block;
}

std::optional<Block> Arena::try_allocate(Bytes bytes, Stream& stream, std::string_view name) {
  return take(bytes, &stream, name);
}

std::optional<Block> Arena::try_allocate(Bytes bytes, std::string_view name) {
  return take(bytes, nullptr, name);
}

namespace {

Block or_full(std::optional<Block> block, Bytes bytes, std::string_view block_name,
              const Arena& arena) {
  if (block) return std::move(*block);
  const ArenaStats stats = arena.stats();
  throw ArenaFull(
      fmt::format(
          "arena '{}' has no room for {} bytes ({}){}: {} of {} are free, the largest piece "
          "is {} ({:.0f} % fragmented), {} blocks are in use",
          arena.name(), bytes, format_bytes(bytes),
          block_name.empty() ? "" : fmt::format(" for '{}'", block_name), format_bytes(stats.free),
          format_bytes(stats.capacity), format_bytes(stats.largest_free),
          100 * stats.fragmentation(), stats.blocks),
      bytes, stats);
}

}  // namespace

Block Arena::allocate(Bytes bytes, Stream& stream, std::string_view name) {
  return or_full(take(bytes, &stream, name), bytes, name, *this);
}

Block Arena::allocate(Bytes bytes, std::string_view name) {
  return or_full(take(bytes, nullptr, name), bytes, name, *this);
}

void Arena::free(Block&& block) {
  PAGODA_CHECK(static_cast<bool>(block),
               "arena '{}': a block was freed twice (the handle is empty)", name());
  PAGODA_CHECK(block.arena_ == state_, "block '{}' belongs to arena '{}', not to '{}'",
               block.name(), block.arena_->options().name, name());
  block.free();
}

void Arena::free(const std::byte* data) {
  state_->free(data);
}

void Arena::touch(const std::byte* data, Stream& stream) {
  state_->touch(data, stream);
}

ArenaStats Arena::stats() const {
  return state_->stats();
}

const std::string& Arena::name() const noexcept {
  return state_->options().name;
}

MemoryKind Arena::kind() const noexcept {
  return state_->kind();
}

std::byte* Arena::data() const noexcept {
  return state_->data();
}

bool Arena::contains(const void* data) const noexcept {
  const auto* at = static_cast<const std::byte*>(data);
  return at >= state_->data() && at < state_->data() + state_->capacity();
}

std::vector<LeakedBlock> Arena::live() const {
  return state_->live();
}

}  // namespace pagoda::device
