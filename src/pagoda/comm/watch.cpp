// SPDX-License-Identifier: Apache-2.0
#include "pagoda/comm/watch.h"

#include <exception>
#include <utility>

#include "pagoda/base/log.h"
#include "pagoda/base/start_thread.h"
#include "pagoda/base/trace.h"

namespace pagoda::comm {
namespace {

// The first letter of what a rank puts on the board.
constexpr char kBeat = 'b';
constexpr char kLeft = 'l';
constexpr char kFailed = 'f';
// Between a beat and its note.
constexpr char kNote = '\n';

std::string key_of(std::string_view watch, int rank) {
  return fmt::format("{}/{}", watch, rank);
}

std::string seconds_text(std::chrono::milliseconds time) {
  return fmt::format("{} s", static_cast<double>(time.count()) / 1000);
}

}  // namespace

Watch::Watch(World& world, Options options, OnFailure on_failure)
    : world_(world), options_(std::move(options)), on_failure_(std::move(on_failure)) {
  PAGODA_REQUIRE_GT(options_.interval.count(), 0);
  PAGODA_REQUIRE_GT(options_.timeout.count(), options_.interval.count(),
                    "a watch's time-out is several intervals long");
  PAGODA_REQUIRE(on_failure_ != nullptr);
  for (int r = 0; r < world.size(); ++r) {
    if (r == world.rank()) continue;
    Peer peer;
    peer.rank = r;
    peer.changed = peer.noted = now_ns();
    peers_.push_back(std::move(peer));
  }
  if (!peers_.empty()) thread_ = start_thread([this] { run(); });
}

Watch::~Watch() {
  fail("it ended without a word");
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Watch::fail(std::string_view reason) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (silent_) return;
  }
  post_end(kFailed + std::string(reason));
}

void Watch::fail(World& world, std::string_view name, std::string_view reason) noexcept {
  try {
    world.put(key_of(name, world.rank()), kFailed + std::string(reason));
  } catch (const std::exception& error) {  // the others find out by the time-out
    log::debug("comm", "the other ranks could not be told", {{"error", error.what()}});
  }
}

void Watch::leave() noexcept {
  {
    const std::lock_guard lock(mutex_);
    silent_ = true;
  }
  post_end(std::string(1, kLeft));
}

void Watch::run() {
  trace::name_thread("watch");
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    lock.unlock();
    try {
      std::string beat = kBeat + std::to_string(++beats_);
      if (options_.note) beat += kNote + options_.note();
      post(beat);
      look();
      if (options_.on_notes) report_notes();
    } catch (const std::exception& error) {
      const int holder = world_.board_rank();
      report(holder, holder < 0
                         ? std::string(error.what())
                         : fmt::format("rank {}, which has the store, was killed or ended, or does "
                                       "not answer: {}",
                                       holder, error.what()));
    }
    lock.lock();
    wake_.wait_for(lock, options_.interval, [this] { return stopping_; });
  }
}

void Watch::look() {
  for (Peer& peer : peers_) {
    if (peer.left) continue;
    std::optional<std::string> value = world_.get(key_of(options_.name, peer.rank));
    if (value.has_value() && *value != peer.last) {
      peer.last = std::move(*value);
      peer.changed = now_ns();
      peer.left = peer.last.front() == kLeft;
      const std::size_t note = peer.last.find(kNote);
      if (peer.last.front() == kBeat && note != std::string::npos &&
          peer.last.substr(note + 1) != peer.note) {
        peer.note = peer.last.substr(note + 1);
        peer.noted = peer.changed;
      }
      if (peer.last.front() == kFailed) {
        report(peer.rank, fmt::format("rank {} failed: {}", peer.rank, peer.last.substr(1)));
      }
    } else if (std::chrono::nanoseconds(now_ns() - peer.changed) > options_.timeout) {
      report(peer.rank,
             fmt::format("rank {} has not answered for {} (killed, or its machine is gone)",
                         peer.rank, seconds_text(options_.timeout)));
    }
  }
}

void Watch::report_notes() {
  std::vector<PeerNote> notes;
  for (const Peer& peer : peers_) {
    notes.push_back({peer.rank, peer.note, now_ns() - peer.noted, peer.left});
  }
  options_.on_notes(notes);
}

void Watch::report(int rank, std::string reason) {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(silent_, true)) return;
  }
  log::info("comm", "a rank failed", {{"rank", rank}, {"reason", reason}});
  try {
    on_failure_(rank, std::move(reason));
  } catch (const std::exception& error) {
    log::error("comm", "the report of a failed rank failed", {{"error", error.what()}});
  }
}

void Watch::post(const std::string& value) {
  const std::lock_guard lock(board_mutex_);
  if (!ended_) world_.put(key_of(options_.name, world_.rank()), value);
}

void Watch::post_end(std::string value) noexcept {
  const std::lock_guard lock(board_mutex_);
  if (std::exchange(ended_, true)) return;
  try {
    world_.put(key_of(options_.name, world_.rank()), value);
  } catch (const std::exception& error) {  // the others find out by the time-out
    log::debug("comm", "the other ranks could not be told", {{"error", error.what()}});
  }
}

}  // namespace pagoda::comm
