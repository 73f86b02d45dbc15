// SPDX-License-Identifier: Apache-2.0
#include "pagoda/prefetch/predictor.h"

#include <algorithm>
#include <bit>

namespace pagoda::prefetch {
namespace {

constexpr std::uint64_t kBase = 0x9E3779B97F4A7C15;  // odd, so that powers of it never vanish
constexpr std::uint8_t kSamples = 8;                 // a mean gap follows the last few
constexpr double kPaceKept = 1 - 1.0 / 64;           // the pace is that of about so many touches
constexpr double kPacePrior = 16;                    // touches as expected, before the first

constexpr std::uint64_t power(std::uint64_t base, std::size_t exponent) {
  std::uint64_t result = 1;
  for (; exponent != 0; exponent >>= 1, base *= base) {
    if ((exponent & 1) != 0) result *= base;
  }
  return result;
}

constexpr auto kPowers = [] {
  std::array<std::uint64_t, Predictor::kLengths.size()> powers{};
  for (std::size_t i = 0; i < powers.size(); ++i) powers[i] = power(kBase, Predictor::kLengths[i]);
  return powers;
}();

/// Spreads every bit over all others (the finaliser of SplitMix64).
constexpr std::uint64_t mix(std::uint64_t x) noexcept {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

/// Whether a context of this order exists at a position: the first touches have no long ones.
bool reaches(std::uint64_t position, std::size_t order) noexcept {
  return order < Predictor::kLengths.size() && Predictor::kLengths[order] <= position;
}

void add_gap(Followed& followed, Nanos gap) noexcept {
  if (followed.samples < kSamples) ++followed.samples;
  // One pause of the program must not look like a slow operator for the next ten passes.
  const float most = 4 * followed.gap + 1e6F;
  followed.gap += (std::min(static_cast<float>(gap), most) - followed.gap) /
                  static_cast<float>(followed.samples);
}

}  // namespace

Predictor::Predictor(const Options& options) : rebuild_(options.rebuild), queue_(options.horizon) {
  // Half for the shortest, of which there are as many as symbols: whatever noise the others hold,
  // they lead back to a known phase.
  const std::size_t half = options.max_contexts / 2;
  tables_.emplace_back(half);
  while (tables_.size() < kLengths.size()) tables_.emplace_back(half / (kLengths.size() - 1));
  prefixes_.resize(std::bit_ceil(options.horizon + kLengths.back() + 1));
}

void Predictor::touch(Touch touch, Nanos now) {
  if (current_ == touch) return;
  Page& touched = page(touch.page);
  const Nanos gap = std::max<Nanos>(0, now - current_at_ - stalled_);
  if (current_) learn(touch, gap);
  current_ = touch;
  current_at_ = now;
  stalled_ = 0;
  touched.last = ++position_;

  if (queue_.size() != 0 && queue_.at(0).touch == touch) {
    ++stats_.hits;
    keep_pace(static_cast<double>(queue_.at(0).in), static_cast<double>(gap));
    queue_.pop();
    extend(kCatchUp);
    return;
  }
  ++(queue_.size() != 0 ? stats_.misses : stats_.unknown);
  queue_.clear();
  prefix(position_) = prefix(position_ - 1) * kBase + symbol(touch);
  extend(rebuild_);
  const double first = queue_.size() == 0 ? 0 : static_cast<double>(queue_.at(0).in);
  recent_expected_ = recent_measured_ = kPacePrior * first;
  pace_ = 1;
}

void Predictor::forget(PageId id) {
  if (id >= pages_.size()) return;
  pages_[id] = {0, pages_[id].life + 1};
  if (current_ && current_->page == id) current_.reset();
  if (const auto use = queue_.next_use(id)) queue_.truncate(*use - 1);
}

std::optional<std::uint64_t> Predictor::last_use(PageId id) const noexcept {
  if (id >= pages_.size() || pages_[id].last == 0) return std::nullopt;
  return position_ - pages_[id].last;
}

Predictor::Stats Predictor::stats() const {
  Stats stats = stats_;
  for (const ContextTable& table : tables_) stats.contexts += table.size();
  return stats;
}

Predictor::Page& Predictor::page(PageId id) {
  if (id >= pages_.size()) {
    pages_.resize(std::max<std::size_t>(id + std::size_t{1}, 2 * pages_.size()));
  }
  return pages_[id];
}

bool Predictor::alive(const Followed& followed) const noexcept {
  return pages_[followed.next.page].life == followed.life;
}

std::uint64_t Predictor::symbol(Touch touch) const noexcept {
  const std::uint64_t name = (std::uint64_t{touch.page} << 8) | touch.mode;
  return mix(name + (std::uint64_t{pages_[touch.page].life} << 40));
}

/// The hash of the last kLengths[order] touches up to a position, from two prefixes.
std::uint64_t Predictor::key(std::uint64_t position, std::size_t order) const noexcept {
  return mix(prefix(position) - prefix(position - kLengths[order]) * kPowers[order]);
}

/// `next` followed the current touch after `gap`. The context that predicted it (or something else)
/// gains or loses strength. Longer ones are made only where it was wrong once, and then all of
/// them, so that one more pass tells the places apart; but when it was well established they are
/// only tentative until they came true once, so that one odd pass is not expected again.
void Predictor::learn(Touch next, Nanos gap) {
  const std::uint32_t life = pages_[next.page].life;
  const auto fresh = [&](std::uint8_t strength, bool ambiguous) {
    return Followed{next, strength, 1, ambiguous, static_cast<float>(gap), life};
  };
  // The known contexts, shortest first. Only the last can be unambiguous.
  std::array<Followed*, kLengths.size()> known;
  std::size_t orders = 0;
  std::size_t used = kLengths.size();
  while (reaches(position_, orders)) {
    Followed* found = tables_[orders].confirm(key(position_, orders));
    if (found == nullptr) break;
    if (found->strength != 0 && alive(*found)) used = orders;
    known[orders++] = found;
    if (!found->ambiguous) break;
  }
  if (used == kLengths.size()) {  // nothing that holds
    for (std::size_t order = 0; order < orders; ++order) *known[order] = fresh(1, true);
    if (orders == 0) tables_[0].insert(key(position_, 0), fresh(1, false));
    return;
  }

  Followed& predicted = *known[used];
  const bool right = predicted.next == next;
  const bool odd = !right && predicted.strength == kSure && !predicted.ambiguous;
  const std::uint8_t tentative = odd ? 0 : 1;
  if (right) {
    if (predicted.strength < kSure) ++predicted.strength;
    add_gap(predicted, gap);
    if (!predicted.ambiguous) return;
  } else {
    // The frequent successor outlives a few others; the recent one is in the longer contexts.
    if (predicted.strength > 1) {
      --predicted.strength;
    } else {
      predicted = fresh(1, true);
    }
    predicted.ambiguous = true;
  }
  for (std::size_t order = used + 1; order < orders; ++order) {
    const bool again = known[order]->next == next && alive(*known[order]);
    *known[order] = fresh(again ? 1 : tentative, true);
  }
  for (; reaches(position_, orders); ++orders) {
    tables_[orders].insert(key(position_, orders), fresh(tentative, true));
  }
}

/// What follows the touch at a position, by the longest context that is known.
const Followed* Predictor::follows(std::uint64_t position) const noexcept {
  const Followed* best = nullptr;
  for (std::size_t order = 0; reaches(position, order); ++order) {
    const Followed* found = tables_[order].find(key(position, order));
    if (found == nullptr) break;
    if (found->strength != 0 && alive(*found)) best = found;
    if (!found->ambiguous) break;
  }
  return best;
}

void Predictor::extend(std::size_t count) {
  for (; count != 0 && !queue_.full(); --count) {
    const std::uint64_t position = position_ + queue_.size();
    const Followed* next = follows(position);
    if (next == nullptr) return;
    prefix(position + 1) = prefix(position) * kBase + symbol(next->next);
    queue_.push(next->next, next->strength, static_cast<Nanos>(next->gap));
  }
}

void Predictor::keep_pace(double expected, double measured) noexcept {
  recent_expected_ = recent_expected_ * kPaceKept + expected;
  // A pause says nothing about the operators to come.
  recent_measured_ = recent_measured_ * kPaceKept + std::min(measured, 4 * expected);
  if (recent_expected_ > 0) pace_ = recent_measured_ / recent_expected_;
}

}  // namespace pagoda::prefetch
