// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <source_location>
#include <string>

#include "pagoda/base/error.h"

namespace pagoda::comm {

/// A call on a group that abort() has ended.
class GroupAborted : public EngineError {
 public:
  GroupAborted(const std::string& group, std::string reason,
               std::source_location where = std::source_location::current())
      : EngineError(fmt::format("communication ended: {}", reason), {context("group", group)},
                    where),
        reason_(std::move(reason)) {}

  /// What abort() was given.
  const std::string& reason() const noexcept { return reason_; }

 private:
  std::string reason_;
};

/// A peer closed its end: it was killed, its machine is gone, or it has destroyed its group.
class PeerLost : public EngineError {
 public:
  PeerLost(int rank, std::string message,
           std::source_location where = std::source_location::current())
      : EngineError(std::move(message), {context("peer", rank)}, where), rank_(rank) {}

  int rank() const noexcept { return rank_; }

 private:
  int rank_;
};

/// What a handler on another rank answered instead of bytes.
class RemoteError : public EngineError {
 public:
  RemoteError(int rank, const std::string& text,
              std::source_location where = std::source_location::current())
      : EngineError(fmt::format("rank {} could not answer: {}", rank, text), {}, where),
        rank_(rank) {}

  int rank() const noexcept { return rank_; }

 private:
  int rank_;
};

/// …where it no longer has the version that was asked for.
class VersionGone : public RemoteError {
 public:
  using RemoteError::RemoteError;
};

}  // namespace pagoda::comm
