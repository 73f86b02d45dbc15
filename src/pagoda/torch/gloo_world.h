// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include <c10/util/intrusive_ptr.h>

#include "pagoda/comm/world.h"

namespace c10d {
class ProcessGroup;
class Store;
}  // namespace c10d

namespace pagoda::torch {

struct GlooOptions {
  /// An address or host name of this machine on which the others reach it. Empty: the interfaces
  /// that GLOO_SOCKET_IFNAME names, else the one the machine's host name leads to.
  std::string address;
  /// How long a rank waits for the others to come: to the store, and to the groups of an engine,
  /// which says it anew (Config::join_timeout). What happens on a group later has no time-out:
  /// comm::Watch ends what hangs.
  std::chrono::milliseconds join_timeout{300'000};
  /// The world is made for one engine, whose join begins here, and not with the engine.
  bool joins_at_once = false;
  /// A board (the store) that has not answered for this long is lost.
  std::chrono::milliseconds board_timeout{60'000};
  /// How long the rank that holds the store waits, when its world ends, for the others' to end:
  /// their watches would take a store that vanishes for a failure.
  std::chrono::milliseconds linger{3'000};
};

/// The world that torchrun (or whoever sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT) started
/// this process in; alone if none of them is set. Groups are Gloo's, over TCP. A variable that is
/// missing or makes no sense is a UserError that names it. Every rank makes its worlds in the same
/// order.
std::shared_ptr<comm::World> world_from_env(const GlooOptions& options = {});

/// The same over any store that all ranks share and that nothing else writes to; ranks may be
/// threads of one process.
std::shared_ptr<comm::World> world_from_store(c10::intrusive_ptr<::c10d::Store> store, int rank,
                                              int size, const GlooOptions& options = {});

/// Ends the waits of this process for other ranks that have not come to connect yet: they throw.
/// What Ctrl-C does. Any thread.
void interrupt_joins() noexcept;

/// The ranks of a process group that the user has made (torch.distributed's default one, or one of
/// new_group()'s). It tells who they are and where they meet; what is sent goes over groups of our
/// own, so that the user's collectives never mix with ours.
///
/// `gradients`: another group of the same ranks, made for us alone (new_group(backend="nccl")),
/// over whose CUDA backend the first engine of this world exchanges gradients; null: over Gloo, as
/// all else.
std::shared_ptr<comm::World> world_from_group(const ::c10d::ProcessGroup& group,
                                              ::c10d::ProcessGroup* gradients = nullptr,
                                              const GlooOptions& options = {});

}  // namespace pagoda::torch
