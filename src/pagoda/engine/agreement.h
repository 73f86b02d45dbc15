// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "pagoda/comm/group.h"
#include "pagoda/optim/optimizer.h"

namespace pagoda::engine {

/// Thrown by all_or_none() on every rank: what this rank shall throw when it has undone its part.
struct NoneDid {
  std::exception_ptr error;
};

/// Does `work` on every rank, or, as far as the callers are concerned, on none. Where it throws on
/// one rank, all throw NoneDid: with its exception on that rank, with a UserError that has that
/// rank's number on the others. An EngineError other than OutOfMemory is thrown at once: it ends
/// the engine, and the others hear of that. `group` null: one rank. A collective of the group.
void all_or_none(comm::Group* group, const std::function<void()>& work);

/// Settings that must be equal on all ranks, in an order that is the same everywhere. A plain
/// value.
class Settings {
 public:
  void add(std::string name, std::string value);
  /// UserError on all ranks, with the first setting that differs and its values, unless all ranks
  /// have the same. A collective of the group.
  void require_equal(comm::Group& group) const;

 private:
  std::uint64_t hash() const;
  std::string text() const;

  std::vector<std::pair<std::string, std::string>> lines_;
};

/// A rule with its constants, as messages show it: "adamw(lr=0.001, beta1=0.9, …)".
std::string text_of(const Optimizer& optimizer);
/// A number that tells rules and constants apart.
std::uint64_t hash_of(const std::vector<Optimizer>& rules);

}  // namespace pagoda::engine
