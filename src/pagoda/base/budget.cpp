// SPDX-License-Identifier: Apache-2.0
#include "pagoda/base/budget.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <utility>

#include <fmt/format.h>

#include "pagoda/base/ranked_mutex.h"

namespace pagoda {
namespace detail {

struct BudgetState {
  using Lock = RankedLock<LockRank::Budget>;

  BudgetState(std::string budget_name, Bytes budget_limit)
      : name(std::move(budget_name)), limit(budget_limit) {}

  const std::string name;
  const Bytes limit;
  RankedMutex<LockRank::Budget> mutex;
  Bytes used = 0;  // guarded by mutex, as is all below
  Bytes peak = 0;
  // Tags are never erased: their peaks are asked for at the end, and reservations point here.
  std::map<std::string, BudgetHolder, std::less<>> tags;

  bool fits(const Lock&, Bytes more) const { return more <= limit - used; }

  BudgetHolder* holder(const Lock&, std::string_view tag) {
    auto it = tags.find(tag);
    if (it == tags.end()) it = tags.emplace(tag, BudgetHolder{std::string(tag), 0, 0}).first;
    return &it->second;
  }

  void add(const Lock&, BudgetHolder& holder, Bytes more) noexcept {
    holder.bytes += more;
    holder.peak = std::max(holder.peak, holder.bytes);
    used += more;
    peak = std::max(peak, used);
  }

  void remove(const Lock&, BudgetHolder& holder, Bytes fewer) noexcept {
    holder.bytes -= fewer;
    used -= fewer;
  }

  std::vector<BudgetHolder> holders(const Lock&) const {
    std::vector<BudgetHolder> result;
    for (const auto& [tag, holder] : tags) result.push_back(holder);
    std::ranges::stable_sort(result, std::ranges::greater{}, &BudgetHolder::bytes);
    return result;
  }

  [[noreturn]] void throw_exceeded(const Lock& lock, Bytes requested, std::string_view tag) const {
    std::string held;
    for (const BudgetHolder& holder : holders(lock)) {
      if (holder.bytes == 0) continue;
      held +=
          fmt::format("{}{} {}", held.empty() ? "" : ", ", holder.tag, format_bytes(holder.bytes));
    }
    const Bytes most = std::numeric_limits<Bytes>::max();
    const Bytes enough = requested > most - used ? most : used + requested;
    throw BudgetExceeded(
        fmt::format("{} = {} has {} left, and {} are needed for {}: raise {} to at least {} (held "
                    "by {})",
                    name, format_bytes(limit), format_bytes(limit - used),
                    format_bytes_up(requested), tag, name, format_bytes_up(enough),
                    held.empty() ? "nobody" : held),
        name, limit, requested, limit - used);
  }
};

}  // namespace detail

using detail::BudgetState;

Reservation::Reservation(std::shared_ptr<BudgetState> state, BudgetHolder* holder,
                         Bytes bytes) noexcept
    : state_(std::move(state)), holder_(holder), bytes_(bytes) {}

Reservation::Reservation(Reservation&& other) noexcept
    : state_(std::move(other.state_)),
      holder_(std::exchange(other.holder_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)) {}

Reservation& Reservation::operator=(Reservation&& other) noexcept {
  if (this != &other) {
    release();
    state_ = std::move(other.state_);
    holder_ = std::exchange(other.holder_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

Reservation::~Reservation() {
  release();
}

std::string_view Reservation::tag() const noexcept {
  return holder_ ? std::string_view(holder_->tag) : std::string_view();
}

void Reservation::resize(Bytes bytes) {
  if (bytes == bytes_) return;
  PAGODA_CHECK(state_ != nullptr, "a reservation without a budget cannot grow");
  const BudgetState::Lock lock(state_->mutex);
  if (bytes > bytes_) {
    const Bytes more = bytes - bytes_;
    if (!state_->fits(lock, more)) state_->throw_exceeded(lock, more, holder_->tag);
    state_->add(lock, *holder_, more);
  } else {
    state_->remove(lock, *holder_, bytes_ - bytes);
  }
  bytes_ = bytes;
}

Reservation Reservation::split(Bytes bytes) {
  PAGODA_CHECK_LE(bytes, bytes_, "cannot split more off a reservation than it holds");
  bytes_ -= bytes;
  return Reservation(state_, holder_, bytes);
}

void Reservation::release() noexcept {
  if (state_) {
    const BudgetState::Lock lock(state_->mutex);
    state_->remove(lock, *holder_, bytes_);
  }
  bytes_ = 0;
  holder_ = nullptr;
  state_.reset();
}

Budget::Budget(std::string name, Bytes limit)
    : state_(std::make_shared<BudgetState>(std::move(name), limit)) {}

Reservation Budget::reserve(Bytes bytes, std::string_view tag) {
  const BudgetState::Lock lock(state_->mutex);
  if (!state_->fits(lock, bytes)) state_->throw_exceeded(lock, bytes, tag);
  BudgetHolder* holder = state_->holder(lock, tag);
  state_->add(lock, *holder, bytes);
  return Reservation(state_, holder, bytes);
}

std::optional<Reservation> Budget::try_reserve(Bytes bytes, std::string_view tag) {
  const BudgetState::Lock lock(state_->mutex);
  if (!state_->fits(lock, bytes)) return std::nullopt;
  BudgetHolder* holder = state_->holder(lock, tag);
  state_->add(lock, *holder, bytes);
  return Reservation(state_, holder, bytes);
}

const std::string& Budget::name() const noexcept {
  return state_->name;
}

Bytes Budget::limit() const noexcept {
  return state_->limit;
}

Bytes Budget::used() const {
  const BudgetState::Lock lock(state_->mutex);
  return state_->used;
}

Bytes Budget::available() const {
  const BudgetState::Lock lock(state_->mutex);
  return state_->limit - state_->used;
}

Bytes Budget::peak() const {
  const BudgetState::Lock lock(state_->mutex);
  return state_->peak;
}

Bytes Budget::peak(std::string_view tag) const {
  const BudgetState::Lock lock(state_->mutex);
  const auto it = state_->tags.find(tag);
  return it == state_->tags.end() ? 0 : it->second.peak;
}

std::vector<BudgetHolder> Budget::holders() const {
  const BudgetState::Lock lock(state_->mutex);
  return state_->holders(lock);
}

}  // namespace pagoda
