// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/join.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <thread>
#include <utility>

#include "pagoda/base/log.h"
#include "pagoda/base/process_mark.h"
#include "pagoda/base/ranked_mutex.h"
#include "pagoda/comm/comm_error.h"
#include "pagoda/engine/failure.h"
#include "pagoda/torch/gloo_world.h"
#include "pagoda/torch/store_board.h"

namespace pagoda::torch {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kFirstLook{1};
constexpr milliseconds kLook{50};
constexpr milliseconds kBeat{250};
// Who has put no beat for so long is to blame for a connection that broke or a deadline that
// passed.
constexpr milliseconds kSilence{2000};
// The store has at least so long to answer, also at the deadline.
constexpr milliseconds kLeastWait{500};
// In the place of a beat.
constexpr const char* kBusy = "busy";  // it does not wait for anybody
constexpr const char* kDone = "done";

constexpr const char* kGaveUp = "gave up";
constexpr const char* kKilled = "was killed or ended";

// Grows with each interrupt_joins().
std::atomic<unsigned> interrupts = 0;

std::string note_key(int rank) {
  return fmt::format("joins/{}", rank);
}

double seconds_of(std::chrono::nanoseconds time) {
  return std::chrono::duration<double>(time).count();
}

std::string silence_of(std::chrono::nanoseconds time) {
  return fmt::format("has not answered for {:.1f} s", seconds_of(time));
}

/// The processes that this one has met, by place.
class Acquaintances {
 public:
  static Acquaintances& instance() {
    static auto& all = *new Acquaintances;
    return all;
  }

  void remember(const std::string& place, std::vector<std::string> processes) {
    const std::lock_guard lock(mutex_);
    met_[place] = {process_mark(), std::move(processes)};
  }
  void forget(const std::string& place) {
    const std::lock_guard lock(mutex_);
    met_.erase(place);
  }
  /// None where a fork's parent has met them.
  std::vector<std::string> at(const std::string& place) const {
    const std::lock_guard lock(mutex_);
    const auto found = met_.find(place);
    if (found == met_.end() || found->second.by != process_mark()) return {};
    return found->second.processes;
  }

 private:
  struct Met {
    std::string by;
    std::vector<std::string> processes;
  };

  mutable RankedMutex<LockRank::Acquaintances> mutex_;
  std::map<std::string, Met> met_;  // guarded by mutex_
};

}  // namespace

void interrupt_joins() noexcept {
  ++interrupts;
}

JoinDeadline::JoinDeadline(milliseconds limit)
    : began_(now_ns()), limit_(limit), interrupts_(interrupts.load()) {}

void JoinDeadline::require_not_interrupted(std::string_view awaited) const {
  if (interrupts.load() == interrupts_) return;
  throw EngineError(fmt::format("interrupted while it waited for {}", awaited));
}

milliseconds JoinDeadline::left() const noexcept {
  const std::chrono::nanoseconds spent(now_ns() - began_);
  return limit_ - std::chrono::duration_cast<milliseconds>(spent);
}

Join::Join(comm::World& world, std::string place)
    : world_(world), place_(std::move(place)), peers_(static_cast<std::size_t>(world.size())) {
  const std::vector<std::string> known = Acquaintances::instance().at(place_);
  if (place_.empty() || known.size() != peers_.size()) return;
  for (std::size_t r = 0; r < peers_.size(); ++r) peers_[r].process = known[r];
}

void Join::forget(const std::string& place) {
  Acquaintances::instance().forget(place);
}

void Join::announce() {
  post(kBusy);
}

void Join::begin(milliseconds patience, JoinDeadline deadline) {
  patience_ = patience;
  deadline_ = deadline;
  warned_ = false;
  announce();
}

void Join::finish() {
  post(kDone);
  deadline_.reset();
  world_.limit_waits(patience_);
  if (place_.empty()) return;
  std::vector<std::string> processes;
  for (int r = 0; r < world_.size(); ++r) {
    Peer& peer = peers_[static_cast<std::size_t>(r)];
    if (peer.beat.empty()) read(r);
    processes.push_back(peer.process);
  }
  Acquaintances::instance().remember(place_, std::move(processes));
}

void Join::meet(const std::string& what) {
  const auto here = [&](int rank) { return fmt::format("{}/here/{}", what, rank); };
  put(here(world_.rank()), "");
  milliseconds pause = kFirstLook;
  for (missing_ = 0; missing_ < world_.size(); ++missing_) {
    while (!get(here(missing_)).has_value()) {
      look();
      std::this_thread::sleep_for(pause);
      pause = std::min(kLook, 2 * pause);
    }
  }
  missing_ = -1;
  require_nobody_gave_up();  // it may have come and gone
}

void Join::look() {
  require_nobody_gave_up();
  require_processes();
  look_at_clock();
  warn_of_missing();
}

void Join::look_at_clock() {
  world_.limit_waits(std::max(kLeastWait, deadline_->left()));
  deadline_->require_not_interrupted(missing_ < 0 ? std::string("the other ranks to connect")
                                                  : fmt::format("rank {} to connect", missing_));
  // One rank at a time: a look costs the store the same however many there are.
  next_ = (next_ + 1) % world_.size();
  if (next_ != world_.rank()) read(next_);
  require_answers();
  require_time();
  if (now_ns() - beaten_ >= std::chrono::nanoseconds(kBeat).count()) {
    beaten_ = now_ns();
    post(std::to_string(++beats_));
  }
}

void Join::find_lost_rank() {
  const Stopwatch watch;
  while (watch.elapsed_ns() < 2 * std::chrono::nanoseconds(kSilence).count()) {
    look();
    for (int r = 0; r < world_.size(); ++r) {
      if (is_silent(r, kSilence)) throw_lost(r, kKilled);
    }
    std::this_thread::sleep_for(kLook);
  }
  throw EngineError(
      "the ranks could not connect with each other, though all are there: check that each reaches "
      "the others' machines (GLOO_SOCKET_IFNAME names the interfaces to use)");
}

void Join::give_up(std::string_view story) {
  world_.put(kGaveUp, story);
}

bool Join::is_known(int rank) {
  return world_.get(note_key(rank)).has_value();
}

void Join::put(const std::string& key, std::string_view value) {
  try {
    world_.put(key, value);
  } catch (const StoreLost& lost) {
    throw_lost_store(lost);
  }
}

std::optional<std::string> Join::get(const std::string& key) {
  try {
    return world_.get(key);
  } catch (const StoreLost& lost) {
    throw_lost_store(lost);
  }
}

/// Of the rank that has it, where one does.
void Join::throw_lost_store(const StoreLost& lost) const {
  if (world_.board_rank() < 0) throw lost;
  throw_lost(world_.board_rank(), lost.silence() ? silence_of(*lost.silence()) : kKilled);
}

void Join::throw_lost(int rank, std::string_view how) const {
  throw comm::PeerLost(
      rank, fmt::format("rank {}{} {} while rank {} was joining the other ranks. See what it "
                        "printed last, and start all ranks again",
                        rank, rank == world_.board_rank() ? ", which has the store," : "", how,
                        world_.rank()));
}

void Join::post(std::string_view beat) {
  put(note_key(world_.rank()), fmt::format("{}\n{}", process_mark(), beat));
}

/// What a rank has put last.
void Join::read(int rank) {
  const auto note = get(note_key(rank));
  if (!note) return;
  const std::size_t end = note->find('\n');
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  peer.process = note->substr(0, end);
  std::string beat = note->substr(end + 1);
  if (beat == peer.beat) return;
  peer.beat = std::move(beat);
  peer.changed = now_ns();
}

/// Whether a rank that joins, too, has put the same for so long.
bool Join::is_silent(int rank, std::chrono::nanoseconds limit) {
  const Peer& peer = peers_[static_cast<std::size_t>(rank)];
  const auto unchanged = [&] {
    return !peer.beat.empty() && peer.beat != kDone && now_ns() - peer.changed >= limit.count();
  };
  if (rank == world_.rank() || !unchanged()) return false;
  read(rank);  // it may be this rank that has not looked
  return unchanged();
}

void Join::require_nobody_gave_up() {
  if (const auto story = get(kGaveUp)) throw engine::RankFailed(*story);
}

void Join::require_processes() {
  for (int r = 0; r < world_.size(); ++r) {
    const Peer& peer = peers_[static_cast<std::size_t>(r)];
    if (r == world_.rank() || !process_has_ended(peer.process)) continue;
    read(r);  // another process may be that rank now
    if (!process_has_ended(peer.process)) continue;
    require_nobody_gave_up();  // it may have said why
    throw_lost(r, kKilled);
  }
}

/// A rank on another machine, whose process cannot be seen.
void Join::require_answers() {
  const bool over = deadline_->passed();
  const auto limit = over ? std::min(kSilence, deadline_->limit() / 2) : patience_;
  for (int r = 0; r < world_.size(); ++r) {
    const Peer& peer = peers_[static_cast<std::size_t>(r)];
    // Its engine takes its time; at the deadline the rank that has not come is to blame.
    if (peer.beat == kBusy && (!over || missing_ >= 0)) continue;
    if (is_silent(r, limit)) {
      throw_lost(r, silence_of(std::chrono::nanoseconds(now_ns() - peer.changed)));
    }
  }
}

void Join::require_time() {
  if (!deadline_->passed()) return;
  const double limit = seconds_of(deadline_->limit());
  if (missing_ < 0) {
    throw EngineError(fmt::format(
        "the ranks have not connected within {} s, though all are there: check that each reaches "
        "the others' machines (GLOO_SOCKET_IFNAME names the interfaces to use), or raise "
        "join_timeout",
        limit));
  }
  throw EngineError(
      fmt::format("rank {} has not come to connect with the others for {} s: start all ranks, or "
                  "raise join_timeout if one needs longer to start",
                  missing_, limit));
}

void Join::warn_of_missing() {
  const std::chrono::nanoseconds waited(now_ns() - deadline_->began());
  if (warned_ || missing_ < 0 || waited <= patience_) return;
  warned_ = true;
  log::warn("comm", "waiting for a rank that has not started yet",
            {{"rank", missing_},
             {"waited_s", seconds_of(patience_)},
             {"join_timeout", seconds_of(deadline_->limit())}});
}

}  // namespace pagoda::torch
