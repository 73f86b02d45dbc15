// SPDX-License-Identifier: Apache-2.0
#include "pagoda/engine/frozen_parameters.h"

#include <algorithm>
#include <exception>

#include "pagoda/base/trace.h"
#include "pagoda/engine/agreement.h"

namespace pagoda::engine {
namespace {

using optim::TrainedPage;

std::string reason_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& known) {
    return known.message();
  } catch (const std::exception& other) {
    return other.what();
  }
}

/// "rank 3", or "ranks 0, 1, 2 and 5 others".
std::string rank_names(const FrozenSet& ranks, int size) {
  constexpr int kMost = 5;
  std::string out;
  int count = 0;
  for (int rank = 0; rank < size; ++rank) {
    if (!ranks.contains(static_cast<std::size_t>(rank))) continue;
    if (count++ < kMost) out += fmt::format("{}{}", out.empty() ? "" : ", ", rank);
  }
  if (count > kMost) out += fmt::format(" and {} others", count - kMost);
  return fmt::format("rank{} {}", count == 1 ? "" : "s", out);
}

}  // namespace

bool FrozenSet::empty() const {
  return std::all_of(words_.begin(), words_.end(), [](std::uint64_t word) { return word == 0; });
}

void FrozenSet::merge(const FrozenSet& other) {
  if (words_.size() < other.words_.size()) words_.resize(other.words_.size());
  for (std::size_t i = 0; i < other.words_.size(); ++i) words_[i] |= other.words_[i];
}

void FrozenParameters::reset(std::vector<Parameter> parameters,
                             std::vector<std::unique_ptr<TrainedPage>> pages) {
  parameters_ = std::move(parameters);
  pages_ = std::move(pages);
  refused_.assign(parameters_.size(), false);
  refusal_.clear();
  told_ = false;
  const std::lock_guard lock(mutex_);
  now_ = heard_ = FrozenSet(parameters_.size());
}

TrainedPage* FrozenParameters::find(const pager::Page& page) const noexcept {
  const auto found = std::find_if(pages_.begin(), pages_.end(),
                                  [&](const auto& kept) { return kept->page == &page; });
  return found == pages_.end() ? nullptr : found->get();
}

void FrozenParameters::set_thawed(const FrozenSet& now) {
  const std::lock_guard lock(mutex_);
  now_ = FrozenSet(parameters_.size());
  now_.merge(now);
  heard_.merge(now);
}

FrozenSet FrozenParameters::thawed() const {
  const std::lock_guard lock(mutex_);
  return now_.empty() ? FrozenSet{} : now_;
}

bool FrozenParameters::news() const {
  const std::lock_guard lock(mutex_);
  return !heard_.empty() || !now_.empty() || !refusal_.empty();
}

std::vector<TrainedPage*> FrozenParameters::admit(const FrozenSet& thawed, Asking asking,
                                                  comm::Group* group) {
  FrozenSet wanted(parameters_.size());
  wanted.merge(thawed);
  if (group != nullptr) group->all_reduce_or(wanted.words());
  if (asking == Asking::Round && told_) forget_refusal();
  std::vector<std::size_t> fresh;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (wanted.contains(i) && parameters_[i].state == State::Frozen && !refused_[i]) {
      fresh.push_back(i);
    }
  }
  fresh = refuse_obstructed(std::move(fresh));
  if (fresh.empty()) return {};
  PAGODA_TRACE("engine", "thaw", {"parameters", fresh.size()});

  std::vector<TrainedPage*> pages;
  for (const std::size_t i : fresh) {
    TrainedPage* page = parameters_[i].page;
    if (!page->gradient && std::find(pages.begin(), pages.end(), page) == pages.end()) {
      pages.push_back(page);
    }
  }
  std::sort(pages.begin(), pages.end(), [](auto* a, auto* b) { return a->number < b->number; });
  try {
    all_or_none(group, [&] { options_.take_homes(pages); });
  } catch (const NoneDid& stopped) {
    options_.drop_homes(pages);
    refuse(fresh, reason_of(stopped.error));
    return {};
  }
  for (const std::size_t i : fresh) {
    Parameter& parameter = parameters_[i];
    parameter.state = State::Joining;
    parameter.page->joining = true;
    parameter.page->parameters[parameter.in_page].frozen = false;
  }
  for (TrainedPage* page : pages) options_.joined(*page);
  return pages;
}

/// Those that cannot be trained, whatever room there is, are left out; returns the others.
std::vector<std::size_t> FrozenParameters::refuse_obstructed(std::vector<std::size_t> wanted) {
  std::vector<std::size_t> out;
  for (const std::size_t i : wanted) {
    if (parameters_[i].obstacle.empty()) {
      out.push_back(i);
    } else {
      refuse({&i, 1}, parameters_[i].obstacle);
    }
  }
  return out;
}

void FrozenParameters::refuse(std::span<const std::size_t> which, const std::string& why) {
  for (const std::size_t i : which) refused_[i] = true;
  refusal_ += fmt::format("{}{} {} thawed and cannot be trained: {}", refusal_.empty() ? "" : "; ",
                          names(which), which.size() == 1 ? "was" : "were", why);
}

std::vector<std::unique_ptr<TrainedPage>> FrozenParameters::take_joined() {
  std::vector<std::unique_ptr<TrainedPage>> out;
  for (auto& page : pages_) {
    if (page->gradient) out.push_back(std::move(page));
  }
  std::erase(pages_, nullptr);
  return out;
}

void FrozenParameters::put_back(std::unique_ptr<TrainedPage> page) {
  pages_.push_back(std::move(page));
}

FrozenParameters::Opinions FrozenParameters::compare(comm::Group* group, bool neutral) const {
  Opinions out;
  FrozenSet mine(parameters_.size());
  {
    const std::lock_guard lock(mutex_);
    mine.merge(heard_);
  }
  if (group == nullptr) return out;
  FrozenSet thawed = mine;
  FrozenSet frozen(parameters_.size());
  for (std::size_t i = 0; i < parameters_.size() && !neutral; ++i) {
    if (!mine.contains(i)) frozen.insert(i);
  }
  group->all_reduce_or(thawed.words());
  group->all_reduce_or(frozen.words());
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].state != State::Trained && thawed.contains(i) && frozen.contains(i)) {
      out.differing.push_back(i);
    }
  }
  if (out.differing.empty()) return out;
  const auto size = static_cast<std::size_t>(group->size());
  FrozenSet yes(size);
  FrozenSet no(size);
  const std::size_t first = out.differing.front();
  if (mine.contains(first) || !neutral) {
    (mine.contains(first) ? yes : no).insert(static_cast<std::size_t>(group->rank()));
  }
  group->all_reduce_or(yes.words());
  group->all_reduce_or(no.words());
  out.error = fmt::format(
      "{} {} thawed on some ranks only ('{}' on {}, not on {}): call requires_grad_() alike on all "
      "ranks between the same steps. Nothing was updated, and the gradients of what only some "
      "ranks have thawed are dropped",
      names(out.differing), out.differing.size() == 1 ? "was" : "were", parameters_[first].name,
      rank_names(yes, group->size()), rank_names(no, group->size()));
  return out;
}

void FrozenParameters::withdraw(std::span<const std::size_t> differing) {
  for (const std::size_t i : differing) {
    Parameter& parameter = parameters_[i];
    if (parameter.state == State::Joining) {
      parameter.page->parameters[parameter.in_page].frozen = true;
      parameter.state = State::Frozen;
      parameter.page->joining = false;
    }
    const std::lock_guard lock(mutex_);
    heard_.erase(i);
  }
  for (Parameter& parameter : parameters_) {  // others of the same pages
    if (parameter.state == State::Joining) parameter.page->joining = true;
  }
}

std::vector<std::size_t> FrozenParameters::finish_step() {
  std::vector<std::size_t> out;
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].state != State::Joining) continue;
    parameters_[i].state = State::Trained;
    parameters_[i].page->joining = false;
    now_.erase(i);
    out.push_back(i);
  }
  heard_ = FrozenSet(parameters_.size());
  refused_.assign(parameters_.size(), false);
  told_ = false;
  return out;
}

std::string FrozenParameters::take_refusal() {
  if (refusal_.empty()) return {};
  told_ = true;
  return std::exchange(refusal_, {}) +
         ". Their gradients of this step are dropped and nothing else has changed: step() again "
         "goes on without them, and they must be frozen before the next backward()";
}

void FrozenParameters::forget_refusal() {
  refused_.assign(parameters_.size(), false);
  refusal_.clear();
  told_ = false;
}

std::string FrozenParameters::names(std::span<const std::size_t> which) const {
  constexpr std::size_t kMost = 5;
  std::string out;
  for (std::size_t i = 0; i < std::min(kMost, which.size()); ++i) {
    out += fmt::format("{}'{}'", i == 0 ? "" : ", ", parameters_[which[i]].name);
  }
  if (which.size() > kMost) out += fmt::format(" and {} others", which.size() - kMost);
  return fmt::format("parameter{} {}", which.size() == 1 ? "" : "s", out);
}

}  // namespace pagoda::engine
