// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace covering {

/// One thing that varies between the cases of a test, with the values it takes.
struct Dimension {
  std::string name;
  std::vector<std::string> values;
};

/// A value for each dimension, or for some of them while a case is being made. Refers to the
/// dimensions it was made of, which outlive it. Any thread may read one.
class Combination {
 public:
  static constexpr std::size_t kUnset = static_cast<std::size_t>(-1);

  explicit Combination(const std::vector<Dimension>& dimensions)
      : dimensions_(&dimensions), indices_(dimensions.size(), kUnset) {}

  /// Whether the dimension has this value; false while it has none. Throws EngineError for a name
  /// or a value that does not exist: a constraint with a typing error must not pass in silence.
  bool is(std::string_view dimension, std::string_view value) const;
  /// The dimension's value; empty while it has none.
  std::string_view operator[](std::string_view dimension) const;

  std::size_t index(std::size_t dimension) const { return indices_[dimension]; }
  void set(std::size_t dimension, std::size_t value) { indices_[dimension] = value; }

  /// "kind=gpt, ranks=2", for the name of a case.
  std::string text() const;

 private:
  std::size_t find(std::string_view dimension) const;

  const std::vector<Dimension>* dimensions_;
  std::vector<std::size_t> indices_;
};

/// Says whether a combination may be. It is asked about unfinished ones too, and may refuse those
/// only if no way to finish them is allowed: conditions written with is() do that by themselves.
using Allowed = std::function<bool(const Combination&)>;

/// Few combinations in which every allowed pair of values of two dimensions appears: a pair is
/// allowed when some whole combination with it is. Greedy and deterministic: the same arguments
/// give the same list. `dimensions` outlives the result.
std::vector<Combination> pairwise(const std::vector<Dimension>& dimensions,
                                  const Allowed& allowed = {});

}  // namespace covering
