// SPDX-License-Identifier: Apache-2.0
#include "pagoda/engine/rank_status.h"

#include <algorithm>
#include <fstream>
#include <utility>

#include <fmt/format.h>
#include <pthread.h>
#include <unistd.h>

namespace pagoda::engine {
namespace {

/// A thread that has so little of a core sleeps, polls or waits.
constexpr double kComputes = 0.2;

char place_in(const std::string& note) {
  return note.empty() ? 'o' : note.front();
}

/// What follows the count.
std::string where_in(const std::string& note) {
  const std::size_t space = note.find(' ');
  return space == std::string::npos ? "not there yet" : note.substr(space + 1);
}

bool is_idle(const comm::PeerNote& peer, Nanos timeout) {
  return !peer.left && place_in(peer.note) == 'o' && peer.unchanged >= timeout;
}

/// For how long the thread was ready to run while others had the cores; 0 where the kernel does not
/// say.
Nanos queued(pid_t thread) {
  std::ifstream file(fmt::format("/proc/self/task/{}/schedstat", thread));
  Nanos ran = 0;
  Nanos waited = 0;
  return file >> ran >> waited ? waited : 0;
}

double in_seconds(Nanos time) {
  return static_cast<double>(time) / 1e9;
}

}  // namespace

RankStatus::RankStatus() {
  here();
}

void RankStatus::here() {
  clockid_t clock{};
  const bool known = ::pthread_getcpuclockid(::pthread_self(), &clock) == 0;
  const std::lock_guard lock(mutex_);
  clock_ = known ? std::optional(clock) : std::nullopt;
  thread_ = ::gettid();
}

void RankStatus::enter(std::string where) {
  here();
  const std::lock_guard lock(mutex_);
  place_ = Place::Inside;
  where_ = std::move(where);
}

void RankStatus::ends(std::string where) {
  const std::lock_guard lock(mutex_);
  place_ = Place::Ended;
  where_ = std::move(where);
}

void RankStatus::leave() {
  const std::lock_guard lock(mutex_);
  if (place_ == Place::Inside) place_ = Place::Outside;
}

std::optional<std::string> RankStatus::in_call() const {
  const std::lock_guard lock(mutex_);
  return place_ == Place::Outside ? std::nullopt : std::optional(where_);
}

std::string RankStatus::text() const {
  if (auto call = in_call()) return *call;
  const std::uint64_t taken = steps();
  if (taken == 0) return "outside of the engine, before the first step()";
  return fmt::format("outside of the engine, after step() {}", taken);
}

/// Whether the thread that trains has used a core since the last note, or waited for one.
bool RankStatus::thread_computes() {
  std::optional<clockid_t> clock;
  pid_t thread = 0;
  {
    const std::lock_guard lock(mutex_);
    clock = clock_;
    thread = thread_;
  }
  const Nanos now = now_ns();
  const Nanos passed = now - std::exchange(looked_, now);
  timespec time{};
  if (!clock || ::clock_gettime(*clock, &time) != 0) return false;  // the thread has ended
  const Nanos cpu = static_cast<Nanos>(time.tv_sec) * 1'000'000'000 + time.tv_nsec + queued(thread);
  const Nanos used = cpu - std::exchange(cpu_, cpu);
  return in_seconds(used) >= kComputes * in_seconds(passed);
}

std::string RankStatus::note(const Activity& activity) {
  const std::uint64_t count = activity();
  const bool computes = thread_computes();
  if (computes || count != counted_) ++active_;
  counted_ = count;
  char place = 'o';
  {
    const std::lock_guard lock(mutex_);
    place = static_cast<char>(place_);
  }
  return fmt::format("{}{} {}", place, active_, text());
}

std::optional<std::string> RankStatus::idle_peer(std::span<const comm::PeerNote> peers,
                                                 const std::string& here, int rank, Nanos waited,
                                                 Nanos timeout) {
  if (waited < timeout) return std::nullopt;
  const auto idle = std::find_if(peers.begin(), peers.end(), [&](const comm::PeerNote& peer) {
    return is_idle(peer, timeout);
  });
  if (idle == peers.end()) return std::nullopt;
  return fmt::format(
      "rank {} is {} and has waited {:.0f} s for rank {}, which is alive and {}, and has neither "
      "called the engine nor used a parameter for {:.0f} s. Every rank makes the same calls of the "
      "engine; raise timeout if one of them does something else for so long",
      rank, here, in_seconds(waited), idle->rank, where_in(idle->note),
      in_seconds(idle->unchanged));
}

RankStatus::Others RankStatus::others(std::span<const comm::PeerNote> peers, Nanos timeout) {
  const auto idle = [&](const comm::PeerNote& peer) { return is_idle(peer, timeout); };
  const auto busy = [&](const comm::PeerNote& peer) {
    return !peer.left && place_in(peer.note) != 'e' && !idle(peer);
  };
  if (std::any_of(peers.begin(), peers.end(), busy)) return Others::Busy;
  const auto left = [](const comm::PeerNote& peer) { return peer.left; };
  if (std::any_of(peers.begin(), peers.end(), left)) return Others::Gone;
  return std::any_of(peers.begin(), peers.end(), idle) ? Others::Idle : Others::Closing;
}

}  // namespace pagoda::engine
