// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

namespace pagoda::cli {

/// The middle of `values`, which are not empty: what a bench reports of its rounds.
double median(std::vector<double> values);

/// One measurement beside the physical or best-known limit that was measured in the same run.
struct BenchRow {
  std::string name;
  double value = 0;
  std::string unit;
  double limit = 0;
  std::string limit_name;

  /// value ÷ limit: near 1 is near the limit. 0 where there is no limit to compare with.
  double ratio() const noexcept { return limit > 0 ? value / limit : 0; }
};

/// What a bench prints: a table for people, or the same as one JSON object.
class BenchReport {
 public:
  explicit BenchReport(std::string title) : title_(std::move(title)) {}

  void add(BenchRow row) { rows_.push_back(std::move(row)); }
  /// A sentence under the table: what was run on what, and anything that limits the figures.
  void note(std::string sentence) { notes_.push_back(std::move(sentence)); }

  const std::vector<BenchRow>& rows() const noexcept { return rows_; }

  /// Title, aligned columns, notes.
  std::string table() const;
  /// {"rows":[{"name":…,"value":…,"unit":…,"limit":…,"limit_name":…,"ratio":…}]}, one line. A row
  /// without a limit has null for limit and ratio.
  std::string json() const;

 private:
  std::string title_;
  std::vector<BenchRow> rows_;
  std::vector<std::string> notes_;
};

}  // namespace pagoda::cli
