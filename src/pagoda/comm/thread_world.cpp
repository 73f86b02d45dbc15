// SPDX-License-Identifier: Apache-2.0
#include "pagoda/comm/thread_world.h"

#include <map>
#include <mutex>
#include <utility>

#include "pagoda/base/ranked_mutex.h"
#include "pagoda/comm/mailboxes.h"

namespace pagoda::comm {
namespace {

/// What the ranks of one in-memory world share.
struct ThreadWorldState {
  struct Named {
    std::string name;
    std::shared_ptr<Mailboxes> mailboxes;
  };

  int ranks = 0;
  Mailboxes::Links links;
  RankedMutex<LockRank::ThreadWorld> mutex;
  std::map<std::string, std::string, std::less<>> board;  // guarded by mutex
  std::vector<Named> groups;                              // guarded by mutex, in order of making
};

class ThreadGroup final : public Group {
 public:
  ThreadGroup(int rank, int size, std::string name, std::shared_ptr<Mailboxes> mailboxes)
      : Group(rank, size, std::move(name)), mailboxes_(std::move(mailboxes)) {}
  ~ThreadGroup() override { mailboxes_->leave(rank()); }

 private:
  void do_exchange(std::span<const Transfer> transfers) override {
    if (!mailboxes_->exchange(rank(), transfers)) check_alive();
  }

  int do_recv_any(Tag tag, std::span<std::byte> data) override {
    const int source = mailboxes_->receive_any(rank(), tag, data);
    if (source < 0) check_alive();
    return source;
  }

  void do_abort() noexcept override { mailboxes_->abort(rank()); }

  const std::shared_ptr<Mailboxes> mailboxes_;
};

class ThreadWorld final : public World {
 public:
  ThreadWorld(int rank, std::shared_ptr<ThreadWorldState> state)
      : rank_(rank), state_(std::move(state)) {}

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return state_->ranks; }

  std::unique_ptr<Group> make_group(std::string name) override {
    const std::lock_guard lock(state_->mutex);
    if (made_ == state_->groups.size()) {
      state_->groups.push_back({name, std::make_shared<Mailboxes>(state_->ranks, state_->links)});
    }
    const ThreadWorldState::Named& group = state_->groups[made_++];
    PAGODA_CHECK_EQ(group.name, name, "ranks make their groups in different orders");
    return std::make_unique<ThreadGroup>(rank_, state_->ranks, std::move(name), group.mailboxes);
  }

  void put(std::string_view key, std::string_view value) override {
    const std::lock_guard lock(state_->mutex);
    state_->board.insert_or_assign(std::string(key), std::string(value));
  }

  std::optional<std::string> get(std::string_view key) override {
    const std::lock_guard lock(state_->mutex);
    const auto found = state_->board.find(key);
    return found == state_->board.end() ? std::nullopt : std::optional(found->second);
  }

 private:
  const int rank_;
  const std::shared_ptr<ThreadWorldState> state_;
  std::size_t made_ = 0;  // guarded by state_->mutex
};

}  // namespace

std::vector<std::shared_ptr<World>> make_thread_worlds(int ranks,
                                                       std::span<const LinkSpeed> links) {
  PAGODA_REQUIRE_GE(ranks, 1);
  PAGODA_REQUIRE(links.empty() || links.size() == static_cast<std::size_t>(ranks),
                 "{} links for {} ranks", links.size(), ranks);
  auto state = std::make_shared<ThreadWorldState>();
  state->ranks = ranks;
  for (const LinkSpeed& link : links) {
    state->links.push_back(std::make_shared<device::emulated::Link>(device::emulated::LinkOptions{
        .bytes_per_second = link.bytes_per_second, .latency = link.latency}));
  }
  std::vector<std::shared_ptr<World>> worlds;
  for (int r = 0; r < ranks; ++r) worlds.push_back(std::make_shared<ThreadWorld>(r, state));
  return worlds;
}

}  // namespace pagoda::comm
