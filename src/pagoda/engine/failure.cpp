// SPDX-License-Identifier: Apache-2.0
#include "pagoda/engine/failure.h"

#include <thread>
#include <utility>

#include "pagoda/base/clock.h"
#include "pagoda/comm/comm_error.h"

namespace pagoda::engine {
namespace {

// The first letter of what a rank that failed puts on the board.
constexpr char kOwn = 'o';    // its own error: others add whose it is
constexpr char kHeard = 'h';  // the whole story already

/// Whether the message says which ranks it is about. A lost connection does: the rank that noticed
/// it is not the one that failed.
bool names_the_rank(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const RankFailed&) {
    return true;
  } catch (const Diverged&) {
    return true;
  } catch (const comm::PeerLost&) {
    return true;
  } catch (const comm::GroupAborted&) {
    return true;
  } catch (...) {
    return false;
  }
}

}  // namespace

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "unknown error";
  }
}

std::string story_of(const std::exception_ptr& error, int rank) {
  std::string why = message_of(error);
  return names_the_rank(error) ? why : fmt::format("rank {} failed: {}", rank, why);
}

Failure::Failure(comm::World& world, std::string engine)
    : world_(world), engine_(std::move(engine)) {}

std::string Failure::key(std::string_view what, int rank) const {
  return fmt::format("{} {} {}", engine_, what, rank);
}

void Failure::check() const {
  if (!failed()) [[likely]]
    return;
  const std::lock_guard lock(mutex_);
  std::rethrow_exception(error_);
}

bool Failure::is_own() const {
  const std::lock_guard lock(mutex_);
  if (error_ == nullptr) return false;
  try {
    std::rethrow_exception(error_);
  } catch (const RankFailed&) {
    return false;
  } catch (...) {
    return true;
  }
}

void Failure::fail(std::exception_ptr error, log::Level level) noexcept {
  if (failed()) return;
  const bool alone = world_.size() == 1;
  if (!alone) error = root_cause(std::move(error));
  {
    const std::lock_guard lock(mutex_);
    if (error_ != nullptr || closed_) return;
    ++notifying_;
    if (ending_) level = log::Level::Debug;  // pending updates are dropped, on every rank
    error_ = error;
    why_ = message_of(error);
    failed_.store(true, std::memory_order_release);
    changed_.notify_all();
  }
  log::write(level, "engine", "stopped by an error", {{"cause", why_}});
  if (!alone) {
    try {
      world_.put(key("failed", world_.rank()), (names_the_rank(error) ? kHeard : kOwn) + why_);
    } catch (const std::exception&) {  // the board is gone, and the others know it
    }
  }
  for (const Listener& listener : listeners_) listener(error, why_);  // none is added any more
  const std::lock_guard lock(mutex_);
  --notifying_;
  changed_.notify_all();
}

void Failure::fail_and_throw() {
  fail(std::current_exception(), log::Level::Info);  // whoever called raises it
  check();
  throw;
}

void Failure::listen(Listener listener) {
  std::exception_ptr error;
  {
    const std::lock_guard lock(mutex_);
    if (error_ == nullptr) {
      listeners_.push_back(std::move(listener));
      return;
    }
    if (closed_) return;
    ++notifying_;
    error = error_;
  }
  listener(error, why_);
  const std::lock_guard lock(mutex_);
  --notifying_;
  changed_.notify_all();
}

void Failure::ending() {
  const std::lock_guard lock(mutex_);
  ending_ = true;
  changed_.notify_all();
}

void Failure::close() noexcept {
  std::unique_lock lock(mutex_);
  closed_ = true;
  changed_.wait(lock, [&] { return notifying_ == 0; });
}

bool Failure::wait(std::chrono::duration<double> limit) const {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, limit, [&] { return error_ != nullptr || ending_; });
}

/// What to say of a failure: where communication with another rank failed, that rank may know more.
/// A rank says why before it closes anything.
std::exception_ptr Failure::root_cause(std::exception_ptr error) noexcept {
  int peer = -1;
  bool refused = false;
  try {
    std::rethrow_exception(error);
  } catch (const comm::PeerLost& gone) {
    peer = gone.rank();
    lost(peer);
  } catch (const comm::RemoteError& refusal) {  // by a rank that has failed, or for its own reason
    peer = refusal.rank();
    refused = true;
  } catch (const comm::GroupAborted&) {  // why is known to somebody else
  } catch (...) {
    return error;
  }
  try {
    std::vector<int> ranks;
    if (peer >= 0) ranks.push_back(peer);
    for (int rank = 0; !refused && rank < world_.size(); ++rank) {
      if (rank != world_.rank() && rank != peer) ranks.push_back(rank);
    }
    // What the lost rank says of itself; then what another has met; then what one has heard.
    const auto failure_of = [&](int rank, bool hearsay) -> std::exception_ptr {
      const auto why = world_.get(key("failed", rank));
      if (why.has_value() && !why->empty() && (why->front() == kHeard) != hearsay) return nullptr;
      const auto fate = fate_of(rank);
      return fate ? std::make_exception_ptr(RankFailed(*fate)) : nullptr;
    };
    if (peer >= 0) {
      if (auto cause = failure_of(peer, false)) return cause;
    }
    for (const int rank : ranks) {
      const auto why = world_.get(key("failed", rank));
      if (why.has_value() && !why->empty() && why->front() == kOwn) return failure_of(rank, false);
    }
    for (const int rank : ranks) {
      if (auto cause = failure_of(rank, true)) return cause;
    }
  } catch (const std::exception&) {  // the board is gone, too
  }
  return error;
}

void Failure::lost(int rank) noexcept {
  try {
    if (rank < 0 || fate_of(rank)) return;
    int none = -1;
    lost_.compare_exchange_strong(none, rank);
    world_.lost(rank);
  } catch (const std::exception&) {  // the board is gone: nobody waits for anybody
  }
}

void Failure::post_end(std::string_view where) {
  world_.put(key("ended", world_.rank()), where);
}

std::optional<std::string> Failure::fate_of(int rank) const {
  if (const auto why = world_.get(key("failed", rank)); why.has_value() && !why->empty()) {
    return why->front() == kHeard ? why->substr(1)
                                  : fmt::format("rank {} failed: {}", rank, why->substr(1));
  }
  if (const auto where = world_.get(key("ended", rank))) {
    return fmt::format("rank {} has ended its engine {}", rank, *where);
  }
  return std::nullopt;
}

std::string Failure::describe(int rank, std::string known) const noexcept {
  try {
    if (const auto fate = rank < 0 ? std::nullopt : fate_of(rank)) return *fate;
  } catch (const std::exception&) {  // the board is gone
  }
  return known;
}

void Failure::wait_until_heard(std::chrono::duration<double> limit) const noexcept {
  constexpr auto kLook = std::chrono::milliseconds(10);
  const Stopwatch watch;
  try {
    for (int rank = 0; rank < world_.size(); ++rank) {
      if (rank == world_.rank() || rank == lost_.load()) continue;
      while (watch.seconds() < limit.count() && !fate_of(rank)) std::this_thread::sleep_for(kLook);
    }
  } catch (const std::exception& error) {  // the board is gone: so are the others
    log::debug("engine", "did not wait for the other ranks", {{"cause", error.what()}});
  }
}

}  // namespace pagoda::engine
