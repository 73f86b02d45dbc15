// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "pagoda/base/bytes.h"

namespace tiny_gpt {

/// Sequences of bytes and, for each, the bytes that follow: `targets` is `inputs` one further on.
struct Batch {
  std::size_t sequences = 0;
  std::size_t length = 0;
  std::vector<std::int64_t> inputs, targets;  // sequence after sequence
};

/// Training text, in memory. Any thread may read it.
class Text {
 public:
  /// Folders of text that a Debian machine has. The headers of C++ come first: a text of one kind
  /// is learnt faster than many.
  static std::vector<std::filesystem::path> usual_places();

  /// What lies under the given files and folders, one after another in a fixed order, up to `limit`
  /// bytes. Links, binary files and those that cannot be read are passed over. Throws UserError
  /// when there is no text at all.
  static Text collect(std::span<const std::filesystem::path> places, pagoda::Bytes limit);

  /// One file, or all files under a folder. Throws UserError when there is none.
  static Text load(const std::filesystem::path& place, pagoda::Bytes limit);

  /// Throws UserError when the text is shorter than one sequence and its target.
  void require_length(std::size_t sequence) const;

  /// Random places of the text; which ones follows from the seed alone. As require_length().
  Batch batch(std::size_t sequences, std::size_t length, std::uint64_t seed) const;

  const std::string& bytes() const noexcept { return bytes_; }
  std::size_t files() const noexcept { return files_; }

 private:
  /// `limit` is that of the whole text.
  void add_place(const std::filesystem::path& place, std::size_t limit);
  void add_file(const std::filesystem::path& file, std::size_t limit);

  std::string bytes_;
  std::size_t files_ = 0;
};

/// The text with what a terminal would act on (escapes, lone bytes of UTF-8) shown as '?'.
std::string printable(const std::string& text);
/// Every line moved two columns to the right, and cut where it would pass column 79.
std::string indented(const std::string& text);

}  // namespace tiny_gpt
