// SPDX-License-Identifier: Apache-2.0
#include "pagoda/device/block.h"

#include <utility>

#include "pagoda/base/error.h"
#include "pagoda/base/log.h"
#include "pagoda/device/arena_state.h"

namespace pagoda::device {
namespace {

/// Frees where nothing can be thrown.
void free_quietly(ArenaState& arena, const std::byte* data) noexcept {
  try {
    arena.free(data);
  } catch (const std::exception& error) {
    log::error("device", "a freed block cannot be reused",
               {{"arena", arena.options().name}, {"cause", error.what()}});
  }
}

}  // namespace

Block::Block(std::shared_ptr<ArenaState> arena, LiveBlock* live, std::byte* data) noexcept
    : arena_(std::move(arena)), live_(live), data_(data) {}

Block::Block(Block&& other) noexcept
    : arena_(std::move(other.arena_)),
      live_(std::exchange(other.live_, nullptr)),
      data_(std::exchange(other.data_, nullptr)) {}

Block& Block::operator=(Block&& other) noexcept {
  if (this != &other) {
    if (live_ != nullptr) free_quietly(*arena_, data_);
    arena_ = std::move(other.arena_);
    live_ = std::exchange(other.live_, nullptr);
    data_ = std::exchange(other.data_, nullptr);
  }
  return *this;
}

Block::~Block() {
  if (live_ != nullptr) free_quietly(*arena_, data_);
}

const std::string& Block::name() const {
  PAGODA_CHECK(live_ != nullptr, "an empty block has no name");
  return live_->name;
}

void Block::touch(Stream& stream) const {
  PAGODA_CHECK(live_ != nullptr, "an empty block was touched");
  arena_->touch(data_, stream);
}

std::byte* Block::on(Stream& stream) const {
  touch(stream);
  return data_;
}

void Block::mark_users(std::vector<Mark>& taken) const {
  PAGODA_CHECK(live_ != nullptr, "an empty block has no users");
  arena_->mark_users(data_, taken);
}

void Block::wait_for_users(Stream& stream) const {
  PAGODA_CHECK(live_ != nullptr, "an empty block has no users");
  arena_->wait_for_users(data_, &stream);
}

void Block::wait_for_users() const {
  PAGODA_CHECK(live_ != nullptr, "an empty block has no users");
  arena_->wait_for_users(data_, nullptr);
}

void Block::free() {
  PAGODA_CHECK(live_ != nullptr, "a block was freed twice (the handle is empty)");
  const std::shared_ptr<ArenaState> arena = std::move(arena_);
  live_ = nullptr;
  arena->free(std::exchange(data_, nullptr));
}

std::byte* Block::detach() noexcept {
  live_ = nullptr;
  arena_.reset();
  return std::exchange(data_, nullptr);
}

}  // namespace pagoda::device
