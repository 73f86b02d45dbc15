// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "pagoda/base/bytes.h"
#include "pagoda/base/error.h"

namespace pagoda {

/// Thrown when a budget has less left than was asked for. The message lists the holders.
class BudgetExceeded : public UserError {
 public:
  BudgetExceeded(std::string message, std::string budget, Bytes limit, Bytes requested,
                 Bytes available)
      : UserError(std::move(message)),
        budget_(std::move(budget)),
        limit_(limit),
        requested_(requested),
        available_(available) {}

  /// Its name: the configuration's key.
  const std::string& budget() const noexcept { return budget_; }
  Bytes limit() const noexcept { return limit_; }
  Bytes requested() const noexcept { return requested_; }
  Bytes available() const noexcept { return available_; }

 private:
  std::string budget_;
  Bytes limit_;
  Bytes requested_;
  Bytes available_;
};

/// What a budget holds under one tag.
struct BudgetHolder {
  std::string tag;
  Bytes bytes = 0;
  Bytes peak = 0;
};

namespace detail {
struct BudgetState;
}

/// Bytes taken from a Budget for one purpose. Move-only; gives them back when it goes.
///
/// A Reservation is a value of one owner and is not itself thread-safe; different reservations of
/// one budget may be used from different threads. It may outlive its Budget.
class Reservation {
 public:
  /// Holds nothing.
  Reservation() = default;
  Reservation(Reservation&& other) noexcept;
  Reservation& operator=(Reservation&& other) noexcept;
  ~Reservation();

  Bytes bytes() const noexcept { return bytes_; }
  /// What the bytes are for; empty for a reservation that holds nothing.
  std::string_view tag() const noexcept;

  /// Grows or shrinks in place; growing past the budget throws and changes nothing.
  void resize(Bytes bytes);
  /// Splits `bytes` off into a reservation of the same tag. The budget's total does not change.
  Reservation split(Bytes bytes);
  /// Gives everything back now.
  void release() noexcept;

 private:
  friend class Budget;
  Reservation(std::shared_ptr<detail::BudgetState> state, BudgetHolder* holder,
              Bytes bytes) noexcept;

  std::shared_ptr<detail::BudgetState> state_;
  BudgetHolder* holder_ = nullptr;  // lives in *state_
  Bytes bytes_ = 0;
};

/// A named, hard limit in bytes: device memory, host memory, swap space.
///
/// Whatever lies in a tier is covered by a Reservation of its budget, so the sum can neither be
/// exceeded nor forgotten. All members may be called from any thread.
class Budget {
 public:
  /// `name` as messages should say it: the configuration's key, for example "host_budget".
  Budget(std::string name, Bytes limit);

  /// Takes `bytes` for `tag` or throws BudgetExceeded, naming the holders, largest first.
  [[nodiscard]] Reservation reserve(Bytes bytes, std::string_view tag);
  /// The same, or nothing when it does not fit.
  [[nodiscard]] std::optional<Reservation> try_reserve(Bytes bytes, std::string_view tag);

  const std::string& name() const noexcept;
  Bytes limit() const noexcept;
  Bytes used() const;
  Bytes available() const;
  /// The most that was ever reserved at once.
  Bytes peak() const;
  /// The most that was ever reserved at once under `tag`; 0 for a tag never seen.
  Bytes peak(std::string_view tag) const;
  /// Every tag ever seen, the largest current holder first.
  std::vector<BudgetHolder> holders() const;

 private:
  std::shared_ptr<detail::BudgetState> state_;
};

}  // namespace pagoda
