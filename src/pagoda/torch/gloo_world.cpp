// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/gloo_world.h"

#include <atomic>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ops/from_blob.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "pagoda/base/clock.h"
#include "pagoda/base/log.h"
#include "pagoda/base/ranked_mutex.h"
#include "pagoda/comm/sigpipe.h"
#include "pagoda/comm/solo_world.h"
#include "pagoda/torch/attempt.h"
#include "pagoda/torch/backend_group.h"
#include "pagoda/torch/join.h"
#include "pagoda/torch/store_board.h"
#include "pagoda/torch/store_connections.h"

namespace pagoda::torch {
namespace {

using comm::Tag;
using comm::Transfer;
using std::chrono::milliseconds;
using WorkPtr = c10::intrusive_ptr<::c10d::Work>;

// Gloo closes all of a group's connections when one wait times out, so none does. Not the largest
// number there is: Gloo adds it to the time of day.
constexpr milliseconds kForever = std::chrono::hours(24 * 365 * 10);
// After the first loss, for transfers with others that may still succeed: if a rank dropped its
// connections at the first loss it saw, its peers could take it for the one that was lost.
constexpr milliseconds kGrace{2000};

/// The first line: torch adds a stack trace.
std::string reason_of(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, text.find('\n'));
}

/// The works that some thread is waiting for, so that abort() reaches them. All members may be
/// called from any thread. It has pointers, not references: once a work is taken out nobody else
/// keeps it alive, and with it Gloo's hold on the caller's memory.
class PendingWorks {
 public:
  /// False if it is too late.
  bool add(::c10d::Work& work) {
    const std::lock_guard lock(mutex_);
    return !aborted_ && works_.insert(&work).second;
  }

  void remove(::c10d::Work& work) {
    const std::lock_guard lock(mutex_);
    works_.erase(&work);
  }

  void abort() noexcept {
    const std::lock_guard lock(mutex_);
    aborted_ = true;
    for (::c10d::Work* work : works_) {
      try {
        work->abort();                   // sets a flag and wakes: does not block
      } catch (const std::exception&) {  // it has ended by itself
      }
    }
  }

 private:
  RankedMutex<LockRank::GlooWorks> mutex_;
  bool aborted_ = false;           // guarded by mutex_
  std::set<::c10d::Work*> works_;  // guarded by mutex_
};

/// A posted transfer. Destroying it ends Gloo's access to the memory, done or not.
class Posted {
 public:
  Posted(PendingWorks& pending, WorkPtr work, int peer)
      : pending_(&pending), work_(std::move(work)), peer_(peer), in_time_(pending.add(*work_)) {}
  Posted(Posted&&) = default;
  Posted(const Posted&) = delete;
  Posted& operator=(const Posted&) = delete;
  Posted& operator=(Posted&&) = delete;
  ~Posted() {
    if (work_) pending_->remove(*work_);
  }

  int peer() const { return peer_; }
  int source() const { return work_->sourceRank(); }
  /// False if it was aborted. Throws what Gloo throws.
  bool wait(milliseconds timeout) { return in_time_ && work_->wait(timeout); }

 private:
  PendingWorks* pending_;
  WorkPtr work_;
  int peer_;
  bool in_time_;
};

at::Tensor tensor_over(const std::byte* data, std::size_t bytes) {
  return at::from_blob(const_cast<std::byte*>(data), {static_cast<std::int64_t>(bytes)},
                       at::TensorOptions().dtype(at::kByte));
}

/// Gloo writes to sockets as if nobody ever died: the second write to a rank that closed its
/// connection would end this process by SIGPIPE. So its threads are started, and transfers posted,
/// under NoSigpipe, and the loss becomes an error that names the rank.
class GlooGroup final : public comm::Group {
 public:
  using Settings = c10::intrusive_ptr<::c10d::ProcessGroupGloo::Options>;

  /// Which interfaces it uses, as `address` says (GlooOptions), and how long it waits for others.
  static Settings settings(const std::string& address, milliseconds timeout) {
    const comm::NoSigpipe for_its_threads;
    try {
      auto gloo = address.empty() ? ::c10d::ProcessGroupGloo::Options::create_default(timeout)
                                  : ::c10d::ProcessGroupGloo::Options::create(timeout);
      if (!address.empty()) {
        gloo->devices.push_back(::c10d::ProcessGroupGloo::createDeviceForHostname(address));
      }
      gloo->threads = static_cast<int>(gloo->devices.size());  // for Gloo's collectives: not used
      return gloo;
    } catch (const std::exception& error) {
      throw EngineError(fmt::format("Gloo has no network interface to use: {}", reason_of(error)));
    }
  }

  GlooGroup(const c10::intrusive_ptr<::c10d::Store>& store, int rank, int size, std::string name,
            const Settings& settings)
      : Group(rank, size, std::move(name)) {
    const comm::NoSigpipe for_its_threads;
    process_group_ = c10::make_intrusive<::c10d::ProcessGroupGloo>(store, rank, size, settings);
  }

 private:
  void do_exchange(std::span<const Transfer> transfers) override {
    std::vector<Posted> posted;
    posted.reserve(transfers.size());
    std::optional<comm::PeerLost> lost;
    {
      const comm::NoSigpipe while_posting;
      for (const Transfer& transfer : transfers) {
        try {
          posted.emplace_back(pending_, post(transfer), transfer.peer);
        } catch (const std::exception& error) {
          if (!lost.has_value()) lost = loss(transfer.peer, error);  // the others get their part
        }
      }
    }
    const Nanos begin = now_ns();
    for (Posted& one : posted) {
      try {
        milliseconds timeout = kForever;
        if (lost.has_value()) {
          const std::chrono::nanoseconds spent(now_ns() - begin);
          timeout =
              std::max(milliseconds(1), kGrace - std::chrono::duration_cast<milliseconds>(spent));
        }
        if (!one.wait(timeout)) check_alive();
      } catch (const comm::GroupAborted&) {
        throw;
      } catch (const std::exception& error) {
        if (!lost.has_value()) lost = loss(one.peer(), error);
      }
    }
    if (lost.has_value()) throw *lost;
  }

  int do_recv_any(Tag tag, std::span<std::byte> data) override {
    try {
      Posted posted(pending_, post_any(tag, data), -1);
      if (!posted.wait(kForever)) check_alive();
      return posted.source();
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      log::debug("comm", "receiving from any rank failed", {{"cause", reason_of(error)}});
      throw EngineError("a rank was killed or ended, or its connection was lost");
    }
  }

  void do_abort() noexcept override { pending_.abort(); }

  WorkPtr post(const Transfer& transfer) {
    const auto tag = static_cast<int>(transfer.tag);
    const std::byte* data = transfer.sends() ? transfer.out.data() : transfer.in.data();
    std::vector<at::Tensor> tensors{tensor_over(data, transfer.bytes())};
    const std::lock_guard lock(post_mutex_);
    return transfer.sends() ? process_group_->send(tensors, transfer.peer, tag)
                            : process_group_->recv(tensors, transfer.peer, tag);
  }

  WorkPtr post_any(Tag tag, std::span<std::byte> data) {
    std::vector<at::Tensor> tensors{tensor_over(data.data(), data.size())};
    const comm::NoSigpipe while_posting;
    const std::lock_guard lock(post_mutex_);
    return process_group_->recvAnysource(tensors, static_cast<int>(tag));
  }

  comm::PeerLost loss(int peer, const std::exception& error) const {
    log::debug("comm", "a transfer failed", {{"rank", peer}, {"cause", reason_of(error)}});
    return comm::PeerLost(
        peer, fmt::format("rank {} was killed or ended, or its connection was lost", peer));
  }

  c10::intrusive_ptr<::c10d::ProcessGroupGloo> process_group_;
  RankedMutex<LockRank::GlooPost>
      post_mutex_;  // the process group counts what is posted, without a lock
  PendingWorks pending_;
};

class GlooWorld final : public comm::World {
 public:
  /// `holder`: the rank whose process has the store, or -1; `place`: as Join's; `began`: the join
  /// that this world is made in.
  GlooWorld(StoreConnections store, int rank, int size, int holder, std::string place,
            GlooOptions options, const JoinDeadline& began)
      : store_(std::move(store.groups)),
        board_(c10::make_intrusive<::c10d::PrefixStore>("board", std::move(store.board)),
               std::min(options.board_timeout, options.join_timeout)),
        rank_(rank),
        size_(size),
        holder_(holder),
        options_(std::move(options)),
        gone_(static_cast<std::size_t>(size)),
        join_(*this, std::move(place)) {
    if (options_.joins_at_once) began_ = began;
    join_.announce();
  }

  ~GlooWorld() override {
    if (holder_ < 0) return;
    try {
      put(left_key(rank_), "");
      if (rank_ == holder_) linger();
    } catch (const std::exception& error) {  // the holder is gone already
      log::debug("comm", "a world ended without its board", {{"error", reason_of(error)}});
    }
  }

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }
  int board_rank() const noexcept override { return holder_; }

  std::unique_ptr<comm::Group> make_group(std::string name) override {
    if (name == "gradients" && for_gradients_.defined()) {
      return make_backend_group(std::move(for_gradients_), name,
                                c10::Device(c10::kCUDA, current_gpu()));
    }
    const std::string prefix = fmt::format("group/{}/{}", groups_made_++, name);
    const bool alone = !join_.begun();  // no engine's
    if (alone) begin_join(options_.join_timeout, options_.join_timeout);
    join_.meet(prefix);
    auto group = connect(prefix, name);
    if (alone) join_.finish();
    return group;
  }

  /// The next group of that name goes over this backend.
  void use_for_gradients(c10::intrusive_ptr<::c10d::Backend> backend) {
    for_gradients_ = std::move(backend);
  }

  void give_up(std::string_view story) noexcept override {
    try {
      join_.give_up(story);
    } catch (const std::exception& error) {  // the others find out by their time-out
      log::debug("comm", "the other ranks could not be told", {{"error", reason_of(error)}});
    }
  }

  void begin_join(milliseconds patience, milliseconds limit) override {
    join_.begin(patience, std::exchange(began_, std::nullopt).value_or(JoinDeadline(limit)));
  }
  void finish_join(const std::function<void()>& call,
                   const std::function<void(const std::string&)>& end) override {
    attempt<int>(
        [&] {
          call();
          return 0;
        },
        [&] { join_.look_at_clock(); }, [&](const std::exception& error) { end(error.what()); });
    join_.finish();
  }
  void limit_waits(milliseconds limit) override {
    board_.set_patience(std::min(limit, options_.board_timeout));
  }
  void lost(int rank) noexcept override { gone_[static_cast<std::size_t>(rank)].store(true); }

  void put(std::string_view key, std::string_view value) override { board_.put(key, value); }

  std::optional<std::string> get(std::string_view key) override { return board_.get(key); }

 private:
  static c10::DeviceIndex current_gpu() {
    return c10::impl::VirtualGuardImpl(c10::kCUDA).getDevice().index();
  }
  static std::string left_key(int rank) { return fmt::format("left/{}", rank); }

  /// Neither Gloo's own rendezvous nor the look-up of a host name can be ended.
  std::unique_ptr<comm::Group> connect(const std::string& prefix, const std::string& name) {
    const milliseconds left = std::max(milliseconds(1), join_.deadline().left());
    auto store = c10::make_intrusive<::c10d::PrefixStore>(prefix, store_);
    try {
      return attempt<std::unique_ptr<comm::Group>>(
          [store, name, rank = rank_, size = size_, address = options_.address, left] {
            return std::make_unique<GlooGroup>(store, rank, size, name,
                                               GlooGroup::settings(address, left));
          },
          [&] { join_.look(); });
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      log::debug("comm", "a group could not be connected",
                 {{"group", name}, {"cause", reason_of(error)}});
      join_.find_lost_rank();
    }
  }

  void linger() {
    const Nanos end = now_ns() + std::chrono::nanoseconds(options_.linger).count();
    for (int r = 0; r < size_; ++r) {
      const auto& gone = gone_[static_cast<std::size_t>(r)];
      if (!join_.is_known(r)) continue;  // it has never come
      while (!gone.load() && !get(left_key(r)).has_value() && now_ns() < end) {
        std::this_thread::sleep_for(milliseconds(5));
      }
    }
  }

  const c10::intrusive_ptr<::c10d::Store> store_;
  StoreBoard board_;
  const int rank_;
  const int size_;
  const int holder_;
  GlooOptions options_;
  std::vector<std::atomic<bool>> gone_;  // ranks whose processes are
  Join join_;
  std::optional<JoinDeadline> began_;  // of the first join, if it began before its engine
  std::size_t groups_made_ = 0;
  c10::intrusive_ptr<::c10d::Backend> for_gradients_;
};

std::string required_text(const char* name) {
  const char* text = std::getenv(name);
  PAGODA_REQUIRE(text != nullptr && *text != '\0',
                 "the environment has some of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, but "
                 "not {}: set all of them (torchrun does), or none",
                 name);
  return text;
}

int required_number(const char* name, int least, int most) {
  const std::string text = required_text(name);
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  PAGODA_REQUIRE(
      error == std::errc() && end == text.data() + text.size() && value >= least && value <= most,
      "{} must be an integer from {} to {}, not '{}'", name, least, most, text);
  return value;
}

}  // namespace

std::shared_ptr<comm::World> world_from_env(const GlooOptions& options) {
  bool any = false;
  for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    any |= std::getenv(name) != nullptr;
  }
  if (!any) return comm::make_solo_world();
  const int size = required_number("WORLD_SIZE", 1, 1 << 20);
  const int rank = required_number("RANK", 0, size - 1);
  const std::string address = required_text("MASTER_ADDR");
  const int port = required_number("MASTER_PORT", 1, 65535);
  if (size == 1) return comm::make_solo_world();

  // torchrun's agent may hold the store itself; then every rank is a client of it.
  const char* agent = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
  const bool agent_holds = agent != nullptr && std::string_view(agent) == "True";
  // The number of worlds this process has made, and of the attempt where torchrun restarts ranks
  // over one store: their keys must not meet.
  static std::atomic<int> worlds = 0;
  const char* restarts = std::getenv("TORCHELASTIC_RESTART_COUNT");
  const std::string attempt_number = restarts != nullptr ? restarts : "0";
  const JoinDeadline deadline(options.join_timeout);
  const StoreConnections store = connect_to_store(
      {address, static_cast<std::uint16_t>(port), !agent_holds && rank == 0}, deadline);
  return std::make_shared<GlooWorld>(
      store.under(fmt::format("pagoda/{}/{}", attempt_number, worlds.fetch_add(1))), rank, size,
      agent_holds ? -1 : 0, fmt::format("{}:{} {}", address, port, attempt_number), options,
      deadline);
}

std::shared_ptr<comm::World> world_from_store(c10::intrusive_ptr<::c10d::Store> store, int rank,
                                              int size, const GlooOptions& options) {
  PAGODA_REQUIRE(store.defined());
  PAGODA_REQUIRE(rank >= 0 && rank < size, "rank {} of {}", rank, size);
  const JoinDeadline deadline(options.join_timeout);
  return std::make_shared<GlooWorld>(connect_again(store, deadline), rank, size, -1, "", options,
                                     deadline);
}

std::shared_ptr<comm::World> world_from_group(const ::c10d::ProcessGroup& group,
                                              ::c10d::ProcessGroup* gradients,
                                              const GlooOptions& options) {
  PAGODA_REQUIRE(gradients == nullptr || (gradients->getSize() == group.getSize() &&
                                          gradients->getRank() == group.getRank()),
                 "the process group for gradients has other ranks than the engine's");
  if (group.getSize() == 1) return comm::make_solo_world();
  // Worlds of one group are numbered on its store: every rank makes them in the same order.
  auto store = group.getStore();
  PAGODA_REQUIRE(store.defined(), "the process group has no store through which its ranks meet");
  const JoinDeadline deadline(options.join_timeout);
  const StoreConnections connections = connect_again(store, deadline);
  const std::int64_t number =
      count_up(connections, fmt::format("pagoda/worlds of rank {}", group.getRank()), deadline);
  const std::string place = fmt::format("process group over {}", fmt::ptr(store.get()));
  if (number == 1) Join::forget(place);  // another store was there
  auto world =
      std::make_shared<GlooWorld>(connections.under(fmt::format("pagoda/world {}", number)),
                                  group.getRank(), group.getSize(), -1, place, options, deadline);
  if (gradients != nullptr) world->use_for_gradients(gradients->getBackend(c10::kCUDA));
  return world;
}

}  // namespace pagoda::torch
