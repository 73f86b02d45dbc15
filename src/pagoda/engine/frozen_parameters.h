// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "pagoda/base/error.h"
#include "pagoda/base/ranked_mutex.h"
#include "pagoda/comm/group.h"
#include "pagoda/optim/trained_page.h"

namespace pagoda::engine {

/// step() is refused on all ranks. Nothing has changed: the engine can go on.
class StepRefused : public UserError {
 public:
  using UserError::UserError;
};

/// What was thawed cannot be trained, on any rank.
class ThawRefused : public StepRefused {
 public:
  using StepRefused::StepRefused;
};

/// A parameter that is given to the optimizer and frozen when its model is attached.
struct FrozenSpec {
  std::size_t page = 0;       // which of the TrainedSpecs it is part of
  std::uint32_t in_page = 0;  // …and which of that page's parameters it is
  std::string name;
  std::string obstacle;  // why it cannot be trained: then it is part of none; empty: it can
};

/// Some of the parameters that were frozen at attach, as ranks exchange it: one bit each.
class FrozenSet {
 public:
  FrozenSet() = default;
  explicit FrozenSet(std::size_t size) : words_((size + 63) / 64) {}

  void insert(std::size_t i) {
    if (i / 64 >= words_.size()) words_.resize(i / 64 + 1);
    words_[i / 64] |= std::uint64_t{1} << (i % 64);
  }
  void erase(std::size_t i) {
    if (contains(i)) words_[i / 64] -= std::uint64_t{1} << (i % 64);
  }
  bool contains(std::size_t i) const {
    return i / 64 < words_.size() && (words_[i / 64] >> (i % 64) & std::uint64_t{1}) != 0;
  }
  bool empty() const;
  void merge(const FrozenSet& other);
  friend bool operator==(const FrozenSet&, const FrozenSet&) = default;
  std::span<std::uint64_t> words() { return words_; }

 private:
  std::vector<std::uint64_t> words_;
};

/// The parameters that were frozen when their model was attached, until they are trained:
/// docs/notes/thaw.md tells their states. Ranks have the same ones in the same order.
///
/// set_thawed() and thawed() may be called from any thread; admit() and news() by the gradients'
/// thread, or by step() while that one is idle; the rest by step() and attach() only.
class FrozenParameters {
 public:
  enum class State : std::uint8_t {
    Frozen,   ///< its gradients are dropped [nothing]
    Joining,  ///< thawed since the last step, and all ranks know it [gradient and state]
    Trained,  ///< the ranks have agreed: like any other from now on [the same]
  };
  struct Parameter {
    optim::TrainedPage* page = nullptr;  // null: it cannot be trained
    std::uint32_t in_page = 0;
    std::string name;
    std::string obstacle;
    State state = State::Frozen;
  };

  struct Options {
    /// Gives pages their gradients and states, and their gradients room on their way, or throws.
    std::function<void(std::span<optim::TrainedPage* const>)> take_homes;
    /// Takes them away again: on some rank there was no room.
    std::function<void(std::span<optim::TrainedPage* const>)> drop_homes;
    /// All ranks have room: it is trained from now on.
    std::function<void(optim::TrainedPage&)> joined;
  };
  /// Who asks for room: what step() has told to be refused is not tried again by that step().
  enum class Asking : std::uint8_t { Round, Step };

  explicit FrozenParameters(Options options) : options_(std::move(options)) {}

  /// `pages`: those of which no parameter is trained, which are kept here until one is.
  void reset(std::vector<Parameter> parameters,
             std::vector<std::unique_ptr<optim::TrainedPage>> pages);
  bool none() const noexcept { return parameters_.empty(); }
  std::size_t size() const noexcept { return parameters_.size(); }
  const Parameter& operator[](std::size_t i) const { return parameters_[i]; }
  /// A page that is kept here, or null.
  optim::TrainedPage* find(const pager::Page& page) const noexcept;

  /// Those that require a gradient now, of all that are not Trained. Told before the gradients of a
  /// micro-batch come and before step().
  void set_thawed(const FrozenSet& now);
  /// What set_thawed() said last; empty and without bits where nobody is thawed.
  FrozenSet thawed() const;
  /// Whether step() has to agree on anything.
  bool news() const;

  /// A collective, where there are several ranks: what any of them has thawed joins on all of them,
  /// if all have room. Returns the pages that have homes now and had none before. `group` null: one
  /// rank.
  std::vector<optim::TrainedPage*> admit(const FrozenSet& thawed, Asking asking,
                                         comm::Group* group);
  /// Pages kept here that have homes now, in the order of their numbers.
  std::vector<std::unique_ptr<optim::TrainedPage>> take_joined();
  /// A page whose only trained parameters did not become so.
  void put_back(std::unique_ptr<optim::TrainedPage> page);

  /// What the ranks have thawed since the last step.
  struct Opinions {
    std::vector<std::size_t> differing;  // on some ranks, and not on others
    std::string error;                   // …and what to say of it
  };
  /// A collective. `neutral`: what this rank has not thawed, it has no opinion of.
  Opinions compare(comm::Group* group, bool neutral) const;
  /// These are Frozen again, as if nobody had thawed them.
  void withdraw(std::span<const std::size_t> differing);
  /// The step is taken: all that are Joining are Trained. Returns them.
  std::vector<std::size_t> finish_step();
  /// Why some could not join; empty: all could, or it has been told.
  const std::string& refusal() const noexcept { return refusal_; }
  /// The same, and it has been told now.
  std::string take_refusal();
  /// The gradients so far are dropped, and what was refused with them.
  void forget_refusal();

  /// The first five, and how many others.
  std::string names(std::span<const std::size_t> which) const;

 private:
  std::vector<std::size_t> refuse_obstructed(std::vector<std::size_t> wanted);
  void refuse(std::span<const std::size_t> which, const std::string& why);

  const Options options_;
  std::vector<Parameter> parameters_;
  std::vector<std::unique_ptr<optim::TrainedPage>> pages_;  // without homes, or just given some
  std::vector<bool> refused_;                               // since the last step
  bool told_ = false;                                       // …and step() has said so
  std::string refusal_;                                     // what it will say

  mutable RankedMutex<LockRank::FrozenParameters> mutex_;
  FrozenSet now_;    // guarded by mutex_
  FrozenSet heard_;  // guarded by mutex_: thawed at some time since the last step
};

}  // namespace pagoda::engine
