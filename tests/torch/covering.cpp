// SPDX-License-Identifier: Apache-2.0
#include "torch/covering.h"

#include <algorithm>
#include <numeric>
#include <optional>

#include "pagoda/base/error.h"

namespace covering {
namespace {

struct Pair {
  std::size_t dimension_a, value_a, dimension_b, value_b;
};

/// Which pairs still have to appear.
class OpenPairs {
 public:
  explicit OpenPairs(const std::vector<Dimension>& dimensions) {
    std::size_t values = 0;
    for (const Dimension& dimension : dimensions) {
      first_.push_back(values);
      values += dimension.values.size();
    }
    width_ = values;
    open_.assign(values * values, false);
    for (std::size_t a = 0; a < dimensions.size(); ++a) {
      for (std::size_t b = a + 1; b < dimensions.size(); ++b) {
        for (std::size_t x = 0; x < dimensions[a].values.size(); ++x) {
          for (std::size_t y = 0; y < dimensions[b].values.size(); ++y) set({a, x, b, y}, true);
        }
      }
    }
  }

  bool is_open(std::size_t a, std::size_t x, std::size_t b, std::size_t y) const {
    return open_[(first_[a] + x) * width_ + first_[b] + y];
  }

  void set(const Pair& p, bool open) {
    const std::size_t i = first_[p.dimension_a] + p.value_a, j = first_[p.dimension_b] + p.value_b;
    open_[i * width_ + j] = open_[j * width_ + i] = open;
  }

  /// How many open pairs this value would add to a combination.
  std::size_t gain(const Combination& with, std::size_t dimension, std::size_t value) const {
    std::size_t sum = 0;
    for (std::size_t other = 0; other < first_.size(); ++other) {
      if (other == dimension || with.index(other) == Combination::kUnset) continue;
      if (is_open(dimension, value, other, with.index(other))) ++sum;
    }
    return sum;
  }

  /// The first open pair, in the order of the dimensions.
  std::optional<Pair> first(const std::vector<Dimension>& dimensions) const {
    for (std::size_t a = 0; a < dimensions.size(); ++a) {
      for (std::size_t x = 0; x < dimensions[a].values.size(); ++x) {
        for (std::size_t b = a + 1; b < dimensions.size(); ++b) {
          for (std::size_t y = 0; y < dimensions[b].values.size(); ++y) {
            if (is_open(a, x, b, y)) return Pair{a, x, b, y};
          }
        }
      }
    }
    return std::nullopt;
  }

 private:
  std::vector<std::size_t> first_;  // of a dimension: the number of its first value
  std::size_t width_ = 0;
  std::vector<bool> open_;  // symmetric, by the numbers of two values
};

/// Sets the dimensions from `next` on, the best value first; false where nothing is allowed.
bool complete(Combination& combination, std::size_t next, const std::vector<Dimension>& dimensions,
              const OpenPairs& open, const Allowed& allowed, std::size_t turn) {
  while (next < dimensions.size() && combination.index(next) != Combination::kUnset) ++next;
  if (next == dimensions.size()) return true;
  const std::size_t count = dimensions[next].values.size();
  std::vector<std::size_t> order(count);
  // Equal gains: values take turns, so that none fills every case.
  for (std::size_t i = 0; i < count; ++i) order[i] = (i + turn) % count;
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return open.gain(combination, next, a) > open.gain(combination, next, b);
  });
  for (const std::size_t value : order) {
    combination.set(next, value);
    if ((!allowed || allowed(combination)) &&
        complete(combination, next + 1, dimensions, open, allowed, turn)) {
      return true;
    }
    combination.set(next, Combination::kUnset);
  }
  return false;
}

}  // namespace

std::size_t Combination::find(std::string_view dimension) const {
  for (std::size_t i = 0; i < dimensions_->size(); ++i) {
    if ((*dimensions_)[i].name == dimension) return i;
  }
  throw pagoda::EngineError(fmt::format("there is no dimension '{}'", dimension));
}

bool Combination::is(std::string_view dimension, std::string_view value) const {
  const std::size_t i = find(dimension);
  const std::vector<std::string>& values = (*dimensions_)[i].values;
  const auto found = std::find(values.begin(), values.end(), value);
  PAGODA_CHECK(found != values.end(), "dimension '{}' has no value '{}'", dimension, value);
  return indices_[i] == static_cast<std::size_t>(found - values.begin());
}

std::string_view Combination::operator[](std::string_view dimension) const {
  const std::size_t i = find(dimension);
  return indices_[i] == kUnset ? std::string_view() : (*dimensions_)[i].values[indices_[i]];
}

std::string Combination::text() const {
  std::string out;
  for (std::size_t i = 0; i < indices_.size(); ++i) {
    if (indices_[i] == kUnset) continue;
    out += fmt::format("{}{}={}", out.empty() ? "" : ", ", (*dimensions_)[i].name,
                       (*dimensions_)[i].values[indices_[i]]);
  }
  return out;
}

std::vector<Combination> pairwise(const std::vector<Dimension>& dimensions,
                                  const Allowed& allowed) {
  PAGODA_CHECK_GE(dimensions.size(), 2U, "pairs need two dimensions");
  OpenPairs open(dimensions);
  std::vector<Combination> out;
  while (const std::optional<Pair> pair = open.first(dimensions)) {
    Combination combination(dimensions);
    combination.set(pair->dimension_a, pair->value_a);
    combination.set(pair->dimension_b, pair->value_b);
    open.set(*pair, false);  // covered now, or never
    if (allowed && !allowed(combination)) continue;
    if (!complete(combination, 0, dimensions, open, allowed, out.size())) continue;
    for (std::size_t a = 0; a < dimensions.size(); ++a) {
      for (std::size_t b = a + 1; b < dimensions.size(); ++b) {
        open.set({a, combination.index(a), b, combination.index(b)}, false);
      }
    }
    out.push_back(std::move(combination));
  }
  return out;
}

}  // namespace covering
