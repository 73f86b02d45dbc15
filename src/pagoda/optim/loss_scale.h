// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>

namespace pagoda::optim {

/// What the loss is multiplied by so that fp16 gradients neither vanish nor overflow. A value; the
/// owner guards it.
class LossScale {
 public:
  /// Within these it and its inverse, which kernels multiply by, are normal numbers of fp32.
  static constexpr double kSmallest = 0x1p-126;
  static constexpr double kLargest = 0x1p126;

  struct Options {
    double initial = 1;
    /// False: it stays as it is, and steps with infinite gradients are skipped all the same.
    bool dynamic = false;
    double growth = 2;
    double backoff = 0.5;
    double smallest = 1;
    /// Good steps in a row before it grows.
    std::uint64_t window = 2000;
  };

  LossScale() = default;
  explicit LossScale(const Options& options) : options_(options), scale_(options.initial) {}

  double scale() const noexcept { return scale_; }
  std::uint64_t skipped() const noexcept { return skipped_; }
  /// Since the last step that was not.
  std::uint64_t skipped_in_a_row() const noexcept { return in_a_row_; }
  /// Whether another step that is skipped makes it smaller.
  bool can_fall() const noexcept {
    return options_.dynamic && scale_ * options_.backoff >= options_.smallest;
  }

  /// A step is over: its gradients were finite, or it is skipped.
  void step(bool finite) noexcept {
    if (!finite) {
      ++skipped_;
      ++in_a_row_;
      good_ = 0;
      if (can_fall()) scale_ = scale_ * options_.backoff;
      return;
    }
    in_a_row_ = 0;
    if (++good_ < options_.window || !options_.dynamic) return;
    good_ = 0;
    if (scale_ * options_.growth <= kLargest) scale_ = scale_ * options_.growth;
  }

 private:
  Options options_;
  std::atomic<double> scale_ = 1;  // others may look while a step is taken, also at
  std::atomic<std::uint64_t> skipped_ = 0;
  std::uint64_t good_ = 0;
  std::uint64_t in_a_row_ = 0;
};

}  // namespace pagoda::optim
