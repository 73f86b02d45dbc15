// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/gloo_world.h"

#include <atomic>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <map>
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
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "pagoda/base/clock.h"
#include "pagoda/base/log.h"
#include "pagoda/base/ranked_mutex.h"
#include "pagoda/comm/sigpipe.h"
#include "pagoda/comm/solo_world.h"
#include "pagoda/engine/failure.h"
#include "pagoda/torch/backend_group.h"
#include "pagoda/torch/store_board.h"

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

// Grows with each interrupt_joins().
std::atomic<unsigned> interrupts = 0;

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
  GlooGroup(const c10::intrusive_ptr<::c10d::Store>& store, int rank, int size, std::string name,
            const GlooOptions& options)
      : Group(rank, size, std::move(name)) {
    const comm::NoSigpipe for_its_threads;
    auto gloo = options.address.empty()
                    ? ::c10d::ProcessGroupGloo::Options::create_default(options.join_timeout)
                    : ::c10d::ProcessGroupGloo::Options::create(options.join_timeout);
    if (!options.address.empty()) {
      gloo->devices.push_back(::c10d::ProcessGroupGloo::createDeviceForHostname(options.address));
    }
    gloo->threads = static_cast<int>(gloo->devices.size());  // for Gloo's collectives: not used
    process_group_ = c10::make_intrusive<::c10d::ProcessGroupGloo>(store, rank, size, gloo);
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
      throw EngineError(fmt::format("receiving from any rank failed: {}", reason_of(error)));
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
    return comm::PeerLost(peer, fmt::format("rank {} closed its connection, or lost it ({})", peer,
                                            reason_of(error)));
  }

  c10::intrusive_ptr<::c10d::ProcessGroupGloo> process_group_;
  RankedMutex<LockRank::GlooPost>
      post_mutex_;  // the process group counts what is posted, without a lock
  PendingWorks pending_;
};

class GlooWorld final : public comm::World {
 public:
  /// `holder`: the rank whose process has the store, or -1.
  GlooWorld(c10::intrusive_ptr<::c10d::Store> store, int rank, int size, int holder,
            GlooOptions options)
      : store_(std::move(store)),
        // A connection of its own: one that waits for a rendezvous serves nobody else meanwhile.
        board_(c10::make_intrusive<::c10d::PrefixStore>("board", store_->clone()),
               options.board_timeout),
        rank_(rank),
        size_(size),
        holder_(holder),
        options_(std::move(options)),
        gone_(static_cast<std::size_t>(size)) {}

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
    wait_for_all(prefix);
    try {
      return std::make_unique<GlooGroup>(c10::make_intrusive<::c10d::PrefixStore>(prefix, store_),
                                         rank_, size_, name, options_);
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      throw EngineError(fmt::format("the ranks could not be connected: {}", reason_of(error)),
                        {context("group", name), context("rank", rank_), context("size", size_)});
    }
  }

  /// The next group of that name goes over this backend.
  void use_for_gradients(c10::intrusive_ptr<::c10d::Backend> backend) {
    for_gradients_ = std::move(backend);
  }

  void give_up(std::string_view why) noexcept override {
    try {
      put(gave_up_key(rank_), why);
    } catch (const std::exception& error) {  // the others find out by their time-out
      log::debug("comm", "the other ranks could not be told", {{"error", reason_of(error)}});
    }
  }

  void limit_joins(milliseconds patience, milliseconds limit) override {
    patience_ = patience;
    options_.join_timeout = limit;
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
  static double seconds_of(milliseconds time) { return static_cast<double>(time.count()) / 1000; }
  static std::string left_key(int rank) { return fmt::format("left/{}", rank); }
  static std::string gave_up_key(int rank) { return fmt::format("gave up/{}", rank); }

  /// Returns when all ranks are about to connect. Gloo's own rendezvous cannot be ended.
  void wait_for_all(const std::string& group) {
    constexpr milliseconds kFirstLook{1};
    constexpr milliseconds kLook{50};
    const auto here = [&](int rank) { return fmt::format("{}/here/{}", group, rank); };
    put(here(rank_), "");
    const Nanos began = now_ns();
    const Nanos end = began + std::chrono::nanoseconds(options_.join_timeout).count();
    const unsigned interrupts_before = interrupts.load();
    bool told = false;
    milliseconds pause = kFirstLook;
    for (int r = 0; r < size_; ++r) {
      while (!get(here(r)).has_value()) {
        require_no_giving_up(r);
        if (interrupts.load() != interrupts_before) {
          throw EngineError(fmt::format("interrupted while it waited for rank {} to connect", r));
        }
        if (now_ns() > end) {
          throw EngineError(fmt::format(
              "rank {} has not come to connect with the others for {} s: start all ranks, or raise "
              "join_timeout if one needs longer to start",
              r, seconds_of(options_.join_timeout)));
        }
        if (!told && now_ns() - began > std::chrono::nanoseconds(patience_).count()) {
          told = true;
          log::warn("comm", "waiting for a rank that has not started yet",
                    {{"rank", r},
                     {"waited_s", seconds_of(patience_)},
                     {"join_timeout", seconds_of(options_.join_timeout)}});
        }
        std::this_thread::sleep_for(pause);
        pause = std::min(kLook, 2 * pause);
      }
    }
    for (int r = 0; r < size_; ++r) require_no_giving_up(r);  // it may have come and gone
  }

  void require_no_giving_up(int rank) {
    if (const auto why = get(gave_up_key(rank))) {
      throw engine::RankFailed(fmt::format("rank {} failed: {}", rank, *why));
    }
  }

  void linger() {
    const Nanos end = now_ns() + std::chrono::nanoseconds(options_.linger).count();
    for (int r = 0; r < size_; ++r) {
      const auto& gone = gone_[static_cast<std::size_t>(r)];
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
  milliseconds patience_{60'000};
  std::vector<std::atomic<bool>> gone_;  // ranks whose processes are
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

/// The process that serves the store does so from its first world to its end: a rank that is ahead
/// may have come to the next world's already, and would lose it with the one before.
void keep_server(const c10::intrusive_ptr<::c10d::TCPStore>& server) {
  static auto& mutex = *new RankedMutex<LockRank::StoreBoard>;
  static auto& servers = *new std::map<std::uint16_t, c10::intrusive_ptr<::c10d::TCPStore>>;
  const std::lock_guard lock(mutex);
  servers.emplace(server->getPort(), server);  // later ones of this port are the same server's
}

}  // namespace

void interrupt_joins() noexcept {
  ++interrupts;
}

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
  ::c10d::TCPStoreOptions store_options;
  store_options.port = static_cast<std::uint16_t>(port);
  store_options.isServer = !agent_holds && rank == 0;
  store_options.waitWorkers = false;  // the first group waits for everyone
  store_options.multiTenant = true;   // the process's own torch.distributed may have this store too
  store_options.timeout = options.join_timeout;
  // The number of worlds this process has made, and of the attempt where torchrun restarts ranks
  // over one store: their keys must not meet.
  static std::atomic<int> worlds = 0;
  const char* restarts = std::getenv("TORCHELASTIC_RESTART_COUNT");
  const std::string prefix =
      fmt::format("pagoda/{}/{}", restarts != nullptr ? restarts : "0", worlds.fetch_add(1));
  try {
    auto tcp = c10::make_intrusive<::c10d::TCPStore>(address, store_options);
    if (store_options.isServer) keep_server(tcp);
    auto store = c10::make_intrusive<::c10d::PrefixStore>(prefix, std::move(tcp));
    return std::make_shared<GlooWorld>(std::move(store), rank, size, agent_holds ? -1 : 0, options);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw EngineError(
        fmt::format("no store at {}:{} (MASTER_ADDR, MASTER_PORT), for which "
                    "join_timeout lets rank {} wait {} s: {}",
                    address, port, rank, static_cast<double>(options.join_timeout.count()) / 1000,
                    reason_of(error)),
        {context("rank", rank), context("size", size)});
  }
}

std::shared_ptr<comm::World> world_from_store(c10::intrusive_ptr<::c10d::Store> store, int rank,
                                              int size, const GlooOptions& options) {
  PAGODA_REQUIRE(store.defined());
  PAGODA_REQUIRE(rank >= 0 && rank < size, "rank {} of {}", rank, size);
  return std::make_shared<GlooWorld>(std::move(store), rank, size, -1, options);
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
  const std::int64_t number =
      store->add(fmt::format("pagoda/worlds of rank {}", group.getRank()), 1);
  auto world = std::make_shared<GlooWorld>(
      c10::make_intrusive<::c10d::PrefixStore>(fmt::format("pagoda/world {}", number), store),
      group.getRank(), group.getSize(), -1, options);
  if (gradients != nullptr) world->use_for_gradients(gradients->getBackend(c10::kCUDA));
  return world;
}

}  // namespace pagoda::torch
