// SPDX-License-Identifier: Apache-2.0
#include "pagoda/engine/user_writes.h"

#include <algorithm>

#include "pagoda/base/error.h"
#include "pagoda/engine/agreement.h"
#include "pagoda/engine/failure.h"
#include "pagoda/io/checksum.h"

namespace pagoda::engine {
namespace {

/// Everyone's numbers, by rank.
std::vector<std::vector<std::uint64_t>> gather_words(comm::Group& group,
                                                     const std::vector<std::uint64_t>& mine) {
  std::vector<std::vector<std::uint64_t>> out(static_cast<std::size_t>(group.size()),
                                              std::vector<std::uint64_t>(mine.size()));
  std::vector<std::span<std::byte>> parts;
  for (auto& one : out) parts.push_back(std::as_writable_bytes(std::span(one)));
  group.all_gather(std::as_bytes(std::span(mine)), parts);
  return out;
}

bool is_set(const std::vector<std::uint64_t>& bits, std::size_t i) {
  return (bits[i / 64] >> (i % 64) & 1U) != 0;
}

std::string ranks_text(const std::vector<std::size_t>& ranks) {
  constexpr std::size_t kMost = 5;
  const auto end = ranks.begin() + static_cast<std::ptrdiff_t>(std::min(ranks.size(), kMost));
  return fmt::format("{} {}{}", ranks.size() == 1 ? "rank" : "ranks",
                     fmt::join(ranks.begin(), end, ", "), end == ranks.end() ? "" : ", …");
}

}  // namespace

UserWrites::UserWrites(pager::Pager& pager, std::span<pager::Page* const> pages)
    : pager_(pager), pages_(pages), bits_((pages.size() + 63) / 64) {
  const std::vector<bool> wrote = pager.written_by_user(pages);
  for (std::size_t i = 0; i < wrote.size(); ++i) {
    if (wrote[i]) bits_[i / 64] |= std::uint64_t{1} << (i % 64);
  }
}

std::uint64_t UserWrites::hash() const noexcept {
  return io::checksum(std::as_bytes(std::span(bits_)));
}

bool UserWrites::any() const noexcept {
  return std::any_of(bits_.begin(), bits_.end(), [](std::uint64_t word) { return word != 0; });
}

void UserWrites::require_same(comm::Group& group, std::string_view call) const {
  const auto all = gather_words(group, bits_);
  std::vector<std::size_t> written;  // on some ranks, or on all
  for (std::size_t i = 0; i < pages_.size(); ++i) {
    if (std::any_of(all.begin(), all.end(), [&](const auto& bits) { return is_set(bits, i); })) {
      written.push_back(i);
    }
  }
  // Every rank's own view: what it has written, or what all had after the last step.
  std::vector<std::uint64_t> sums;
  sums.reserve(written.size());
  try {
    all_or_none(&group, [&] {  // a page that was evicted needs room on the device
      for (const std::size_t i : written) sums.push_back(pager_.checksum(*pages_[i]));
    });
  } catch (const NoneDid& stopped) {
    throw StepRefused(fmt::format(
        "{} compares what was written in place on the ranks since the last step(), and cannot: {}",
        call, message_of(stopped.error)));
  }
  const auto seen = gather_words(group, sums);
  for (std::size_t at = 0; at < written.size(); ++at) {
    std::vector<std::size_t> others;  // with values that rank 0 does not have
    std::vector<std::size_t> wrote;
    std::vector<std::size_t> did_not;
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      if (seen[rank][at] != seen[0][at]) others.push_back(rank);
      (is_set(all[rank], written[at]) ? wrote : did_not).push_back(rank);
    }
    if (others.empty()) continue;
    const std::string& name = pages_[written[at]]->name();
    if (did_not.empty()) {
      throw WritesDiffer(fmt::format(
          "parameter '{}' was written in place on all ranks since the last step(), with other "
          "values on {} than on rank 0: make the same write on every rank and call {} again",
          name, ranks_text(others), call));
    }
    throw WritesDiffer(fmt::format(
        "parameter '{}' was written in place on {} since the last step(), and not on {}: make the "
        "same write on every rank, or undo it, and call {} again",
        name, ranks_text(wrote), ranks_text(did_not), call));
  }
}

}  // namespace pagoda::engine
