// SPDX-License-Identifier: Apache-2.0
#include "pagoda/base/ranked_mutex.h"

#ifdef PAGODA_CHECK_LOCKS

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>

#include "pagoda/base/error.h"

// Everything here is noexcept: a check that fails ends the process, with what it says. An exception
// could be taken for an error of the engine, which handles those.
namespace pagoda::held_locks {
namespace {

constexpr std::array kNames = {"BoundEngine",
                               "Enders",
                               "Observer",
                               "ListOperators",
                               "EngineCalls",
                               "Exchanges",
                               "PlainPasses",
                               "Gradients",
                               "ActivationStore",
                               "TorchStreams",
                               "CudaLibrary",
                               "PageStorages",
                               "StorageTable",
                               "ParameterTable",
                               "Passes",
                               "CustomFunctions",
                               "RankStatus",
                               "EarlyUpdates",
                               "Reducer",
                               "Parking",
                               "Homes",
                               "ShardExchange",
                               "Updater",
                               "PageTable",
                               "StorageDeath",
                               "DeadPages",
                               "StagingPool",
                               "HostMemory",
                               "FrozenParameters",
                               "Failure",
                               "PullService",
                               "WatchBoard",
                               "Watch",
                               "GroupAbort",
                               "Mailboxes",
                               "ThreadWorld",
                               "StoreBoard",
                               "StoreServers",
                               "Acquaintances",
                               "QuietTorchLog",
                               "GlooPost",
                               "GlooWorks",
                               "Volume",
                               "FaultEngine",
                               "FaultPlan",
                               "Posix",
                               "Uring",
                               "BlockLocks",
                               "BouncePool",
                               "Extents",
                               "Transfer",
                               "ErrorLatch",
                               "Device",
                               "Stream",
                               "WorkQueue",
                               "HostStream",
                               "HostEvent",
                               "CudaStream",
                               "CudaHostFunctions",
                               "CudaPages",
                               "Arena",
                               "OrderingChecker",
                               "EmulatedEvent",
                               "EmulatedTicket",
                               "Link",
                               "LargeBlocks",
                               "Budget",
                               "Loop",
                               "ThreadPool",
                               "LogCapture",
                               "TraceRegistry",
                               "TraceThread"};
static_assert(kNames.size() == static_cast<std::size_t>(LockRank::kCount));

const char* name(LockRank rank) noexcept {
  return kNames[static_cast<std::size_t>(rank)];
}

/// Those that say "one at a time" of something slow. Whoever is waited for needs none of them.
bool held_while_waiting(LockRank rank) noexcept {
  return rank == LockRank::Exchanges || rank == LockRank::Homes || rank == LockRank::Parking ||
         rank == LockRank::WatchBoard;
}

struct HeldLock {
  LockRank rank;
  const void* mutex;
};

// Trivial, so that locks may be taken while a thread's other objects go.
thread_local std::array<HeldLock, 32> stack;
thread_local std::size_t depth = 0;

std::span<HeldLock> held() noexcept {
  return {stack.data(), depth};
}

}  // namespace

void require_order(LockRank rank, const void* mutex, bool recursive) noexcept {
  const auto same = [mutex](const HeldLock& other) { return other.mutex == mutex; };
  if (recursive && std::ranges::any_of(held(), same)) return;
  for (const HeldLock& other : held()) {
    PAGODA_CHECK(
        other.rank < rank,
        "lock '{}' is taken while '{}' is held, and base/lock_rank.h has them in the other "
        "order",
        name(rank), name(other.rank));
  }
}

void push(LockRank rank, const void* mutex) noexcept {
  PAGODA_CHECK(depth < stack.size(), "{} locks are held at '{}'", depth, name(rank));
  stack[depth++] = {rank, mutex};
}

void pop(const void* mutex) noexcept {
  for (std::size_t i = depth; i-- > 0;) {
    if (stack[i].mutex != mutex) continue;
    std::copy(&stack[i + 1], &stack[depth], &stack[i]);
    --depth;
    return;
  }
  PAGODA_CHECK(false, "a lock is given back by a thread that does not hold it");
}

void require_may_wait(const void* but) noexcept {
  for (const HeldLock& other : held()) {
    PAGODA_CHECK(other.mutex == but || held_while_waiting(other.rank),
                 "a thread waits while it holds lock '{}', which others may need meanwhile",
                 name(other.rank));
  }
}

}  // namespace pagoda::held_locks

#endif
