// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/store_connections.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <utility>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "pagoda/base/clock.h"
#include "pagoda/base/log.h"
#include "pagoda/base/ranked_mutex.h"
#include "pagoda/torch/attempt.h"

namespace pagoda::torch {
namespace {

using std::chrono::milliseconds;
using StorePtr = c10::intrusive_ptr<::c10d::Store>;

/// The process that serves the store does so from its first world to its end: a rank that is ahead
/// may have come to the next world's already, and would lose it with the one before.
void keep_server(const c10::intrusive_ptr<::c10d::TCPStore>& server) {
  static auto& mutex = *new RankedMutex<LockRank::StoreServers>;
  static auto& servers = *new std::map<std::uint16_t, c10::intrusive_ptr<::c10d::TCPStore>>;
  const std::lock_guard lock(mutex);
  servers.emplace(server->getPort(), server);  // later ones of this port are the same server's
}

StorePtr connect(const StoreAddress& address, const JoinDeadline& deadline) {
  ::c10d::TCPStoreOptions options;
  options.port = address.port;
  options.isServer = address.serves;
  options.waitWorkers = false;  // the first group waits for everyone
  options.multiTenant = true;   // the process's own torch.distributed may have this store too
  options.timeout = std::max(milliseconds(1), deadline.left());
  auto store = c10::make_intrusive<::c10d::TCPStore>(address.host, options);
  if (address.serves) keep_server(store);
  return store;
}

constexpr const char* kNoStore =
    "the store of the process group cannot be reached: the process that has it was killed or ended";

/// When a wait for the store is told of: part of a short deadline.
constexpr std::chrono::nanoseconds kPatience = std::chrono::seconds(10);

/// Waits for `call` until the deadline, and says `late` then or where it throws. A long wait is one
/// for the store `at` an address, if that is given.
template <class Result>
Result ask_before(const JoinDeadline& deadline, std::function<Result()> call,
                  const std::string& late, const std::string& at = {}) {
  const Stopwatch watch;
  const std::chrono::nanoseconds patience =
      std::min<std::chrono::nanoseconds>(kPatience, deadline.limit() / 4);
  bool warned = at.empty();
  try {
    return attempt<Result>(std::move(call), [&] {
      deadline.require_not_interrupted("the store at which the ranks meet");
      if (deadline.passed()) throw EngineError(late);
      if (warned || watch.elapsed_ns() < patience.count()) return;
      warned = true;
      log::warn(
          "comm", "waiting for the store at which the ranks meet",
          {{"at", at}, {"join_timeout", std::chrono::duration<double>(deadline.limit()).count()}});
    });
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    log::debug("comm", "no connection to the store", {{"cause", error.what()}});
    throw EngineError(late);
  }
}

}  // namespace

StoreConnections StoreConnections::under(const std::string& prefix) const {
  return {c10::make_intrusive<::c10d::PrefixStore>(prefix, groups),
          c10::make_intrusive<::c10d::PrefixStore>(prefix, board)};
}

StoreConnections connect_again(const StorePtr& store, const JoinDeadline& deadline) {
  return ask_before<StoreConnections>(
      deadline,
      [store] {
        return StoreConnections{store->clone(), store->clone()};
      },
      kNoStore);
}

std::int64_t count_up(const StoreConnections& store, const std::string& key,
                      const JoinDeadline& deadline) {
  return ask_before<std::int64_t>(
      deadline, [groups = store.groups, key] { return groups->add(key, 1); }, kNoStore);
}

StoreConnections connect_to_store(const StoreAddress& address, const JoinDeadline& deadline) {
  const std::string at =
      fmt::format("{}:{} (MASTER_ADDR, MASTER_PORT)", address.host, address.port);
  return ask_before<StoreConnections>(
      deadline,
      [address, deadline] {
        auto store = connect(address, deadline);
        auto board = store->clone();
        return StoreConnections{std::move(store), std::move(board)};
      },
      address.serves
          ? fmt::format("rank 0 cannot serve the store of the ranks at {}: the port is in use, or "
                        "the address is not this machine's",
                        at)
          : fmt::format("no store at {} within {} s: the process that has it, rank 0's where "
                        "torchrun has started none, has not started, or was killed or ended. Start "
                        "all ranks, or raise join_timeout if one needs longer to start",
                        at, std::chrono::duration<double>(deadline.limit()).count()),
      at);
}

}  // namespace pagoda::torch
