// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace pagoda {

/// Every lock of the library, outermost first: a thread that holds one may only take locks that
/// stand after it, and never two of one rank. docs/notes/threads.md says what each one guards.
enum class LockRank : std::uint8_t {
  // torch/
  BoundEngine,
  Enders,
  Observer,
  ListOperators,
  EngineCalls,
  Exchanges,
  PlainPasses,
  Gradients,
  ActivationStore,
  TorchStreams,
  CudaLibrary,
  PageStorages,
  StorageTable,
  ParameterTable,
  Passes,
  CustomFunctions,
  // engine/, optim/ and pager/
  RankStatus,
  EarlyUpdates,
  Reducer,
  Parking,
  Homes,
  ShardExchange,
  Updater,
  PageTable,
  StorageDeath,
  DeadPages,
  StagingPool,
  HostMemory,
  FrozenParameters,
  Failure,
  // comm/, and torch/ for Gloo
  PullService,
  WatchBoard,
  Watch,
  GroupAbort,
  Mailboxes,
  ThreadWorld,
  StoreBoard,
  StoreServers,
  Acquaintances,
  QuietTorchLog,
  GlooPost,
  GlooWorks,
  // io/
  Volume,
  FaultEngine,
  FaultPlan,
  Posix,
  Uring,
  BlockLocks,
  BouncePool,
  Extents,
  Transfer,
  ErrorLatch,
  // device/
  Device,
  Stream,
  WorkQueue,
  HostStream,
  HostEvent,
  CudaStream,
  CudaHostFunctions,
  CudaPages,
  Arena,
  OrderingChecker,
  EmulatedEvent,
  EmulatedTicket,
  Link,
  // base/, and torch/ for what torch frees anywhere
  LargeBlocks,
  Budget,
  Loop,
  ThreadPool,
  LogCapture,
  TraceRegistry,
  TraceThread,
  kCount
};

}  // namespace pagoda
