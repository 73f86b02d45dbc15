// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include <c10/util/intrusive_ptr.h>

#include "pagoda/torch/join.h"

namespace c10d {
class Store;
}

namespace pagoda::torch {

/// One rank's two connections to the store at which ranks meet: one that waits for a rendezvous
/// serves nobody else meanwhile. A plain value.
struct StoreConnections {
  c10::intrusive_ptr<::c10d::Store> groups;
  c10::intrusive_ptr<::c10d::Store> board;

  /// Of all keys.
  StoreConnections under(const std::string& prefix) const;
};

/// To a store that somebody else has made. Before the deadline, or EngineError.
StoreConnections connect_again(const c10::intrusive_ptr<::c10d::Store>& store,
                               const JoinDeadline& deadline);
/// How often it has been called for that key of a store. Before the deadline, or EngineError.
std::int64_t count_up(const StoreConnections& store, const std::string& key,
                      const JoinDeadline& deadline);

struct StoreAddress {
  std::string host;
  std::uint16_t port = 0;
  bool serves = false;  ///< this process has the store; it does so to its end
};

/// To the store at that address, once it is there. Before the deadline, or EngineError.
StoreConnections connect_to_store(const StoreAddress& address, const JoinDeadline& deadline);

}  // namespace pagoda::torch
