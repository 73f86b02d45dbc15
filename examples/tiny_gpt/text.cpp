// SPDX-License-Identifier: Apache-2.0
#include "text.h"

#include <algorithm>
#include <fstream>
#include <random>

#include <fmt/ranges.h>

#include "pagoda/base/error.h"

namespace tiny_gpt {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kFileLimit = std::size_t{256} << 10;  // no file dominates

bool is_link(const fs::path& path) {
  std::error_code ignored;
  return fs::is_symlink(fs::symlink_status(path, ignored));
}

/// Every plain file under a folder, sorted; an unreadable folder is empty.
std::vector<fs::path> files_under(const fs::path& folder) {
  std::vector<fs::path> out;
  std::error_code error;
  fs::recursive_directory_iterator at(folder, fs::directory_options::skip_permission_denied, error);
  for (const fs::recursive_directory_iterator end; !error && at != end; at.increment(error)) {
    std::error_code ignored;
    if (!is_link(at->path()) && at->is_regular_file(ignored)) out.push_back(at->path());
  }
  std::sort(out.begin(), out.end());
  return out;
}

/// A zero byte is the one sure sign of something else.
bool is_text(const std::string& bytes) {
  return !bytes.empty() && bytes.find('\0') == std::string::npos;
}

}  // namespace

std::vector<fs::path> Text::usual_places() {
  return {"/usr/include/c++", "/usr/include", "/usr/share/common-licenses", "/usr/share/doc"};
}

Text Text::collect(std::span<const fs::path> places, pagoda::Bytes limit) {
  Text out;
  for (const fs::path& place : places) out.add_place(place, limit);
  if (out.bytes_.empty()) {
    std::vector<std::string> names;
    for (const fs::path& place : places) names.push_back(place.string());
    throw pagoda::UserError(fmt::format(
        "there is no text under {}; name a file or a folder with --text", fmt::join(names, ", ")));
  }
  return out;
}

Text Text::load(const fs::path& place, pagoda::Bytes limit) {
  std::error_code error;
  if (!fs::exists(place, error)) {
    throw pagoda::UserError(fmt::format("there is no file or folder '{}'", place.string()));
  }
  return collect(std::span(&place, 1), limit);
}

void Text::add_place(const fs::path& place, std::size_t limit) {
  std::error_code error;
  if (!fs::is_directory(place, error)) return add_file(place, limit - bytes_.size());
  for (const fs::path& file : files_under(place)) {
    add_file(file, std::min(kFileLimit, limit - bytes_.size()));
  }
}

void Text::add_file(const fs::path& file, std::size_t limit) {
  std::ifstream in(file, std::ios::binary);
  std::error_code error;
  const std::uintmax_t size = fs::file_size(file, error);
  if (!in || error) return;
  std::string bytes(std::min<std::uintmax_t>(limit, size), '\0');
  in.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  bytes.resize(static_cast<std::size_t>(std::max<std::streamsize>(in.gcount(), 0)));
  if (!is_text(bytes)) return;
  bytes_ += bytes;
  ++files_;
}

void Text::require_length(std::size_t sequence) const {
  if (bytes_.size() > sequence) return;
  throw pagoda::UserError(fmt::format("the text has {}: too short for a sequence of {}",
                                      pagoda::format_bytes(bytes_.size()), sequence));
}

Batch Text::batch(std::size_t sequences, std::size_t length, std::uint64_t seed) const {
  require_length(length);
  Batch out{sequences, length, {}, {}};
  out.inputs.reserve(sequences * length);
  out.targets.reserve(sequences * length);
  std::mt19937_64 random(seed);
  const auto at = [this](std::size_t i) {
    return static_cast<std::int64_t>(static_cast<unsigned char>(bytes_[i]));
  };
  for (std::size_t s = 0; s < sequences; ++s) {
    const std::size_t start = random() % (bytes_.size() - length);
    for (std::size_t i = 0; i < length; ++i) {
      out.inputs.push_back(at(start + i));
      out.targets.push_back(at(start + i + 1));
    }
  }
  return out;
}

std::string printable(const std::string& text) {
  std::string out;
  for (const char c : text) {
    const bool plain = (c >= ' ' && c <= '~') || c == '\n' || c == '\t';
    out += plain ? c : '?';
  }
  return out;
}

std::string indented(const std::string& text) {
  std::string out;
  for (std::size_t begin = 0; begin < text.size();) {
    constexpr std::size_t kLetters = 77;
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    const std::size_t cut = std::min(end, begin + kLetters);
    if (cut > begin) out += "  " + text.substr(begin, cut - begin);
    out += '\n';
    begin = cut + (cut == end ? 1 : 0);
  }
  return out;
}

}  // namespace tiny_gpt
