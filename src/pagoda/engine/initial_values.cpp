// SPDX-License-Identifier: Apache-2.0
#include "pagoda/engine/initial_values.h"

#include <algorithm>
#include <array>
#include <utility>

#include "pagoda/base/error.h"
#include "pagoda/base/log.h"
#include "pagoda/base/trace.h"
#include "pagoda/io/checksum.h"

namespace pagoda::engine {
namespace {

using pager::Page;
using pager::Range;

constexpr comm::Tag kPieceTag = 1;

std::uint64_t add_checksum(std::uint64_t sum, std::span<const std::byte> bytes) {
  return sum * 0x9E3779B97F4A7C15U + io::checksum(bytes);
}

Range whole(const Page& page) {
  return {0, page.elements};
}

}  // namespace

template <class Fn>
void InitialValues::for_pieces(const BufferSpec& buffer, Fn&& fn) {
  for (Bytes at = 0; at < buffer.bytes; at += piece_) {
    fn(at, scratch_.first(std::min(piece_, buffer.bytes - at)));
  }
}

void InitialValues::compare(std::span<Page* const> pages, std::span<BufferSpec const> buffers) {
  PAGODA_TRACE("engine", "compare initial values");
  pages_.assign(pages.begin(), pages.end());
  buffers_ = buffers;
  std::vector<std::uint64_t> sums;
  std::vector<bool> here;
  for (Page* page : pages_) {
    std::uint64_t sum = 0;
    here.push_back(pager::Pager::home_range(*page).size() == page->elements);
    if (here.back()) {
      pager_.read_home(*page, whole(*page), piece_,
                       [&](auto bytes) { sum = add_checksum(sum, bytes); });
    }
    sums.push_back(sum);
  }
  for (const BufferSpec& buffer : buffers_) {
    std::uint64_t sum = 0;
    for_pieces(buffer, [&](Bytes at, std::span<std::byte> bytes) {
      buffer.read(at, bytes);
      sum = add_checksum(sum, bytes);
    });
    sums.push_back(sum);
    here.push_back(true);
  }
  states_ = gather(sums, here);

  const std::size_t all = sums.size();
  std::string first;
  for (int rank = 0; rank < group_.size(); ++rank) {
    std::size_t parameters = 0;
    std::size_t others = 0;
    for (std::size_t i = 0; i < all; ++i) {
      if (state(rank, i) != State::Differs) continue;
      ++(i < pages_.size() ? parameters : others);
      if (first.empty())
        first = i < pages_.size() ? pages_[i]->name() : buffers_[i - pages_.size()].name;
    }
    if (parameters + others == 0 || !text_.empty()) continue;
    text_ = fmt::format(
        "in {} of {} parameters{} on rank {}, '{}' first", parameters, pages_.size(),
        others == 0 ? "" : fmt::format(" and {} of {} buffers", others, buffers_.size()), rank,
        first);
  }
  for (std::size_t i = 0; i < all; ++i) {
    for (int rank = 0; rank < group_.size(); ++rank) {
      if (state(rank, i) != State::Differs) continue;
      ++differing_;
      break;
    }
  }
}

/// What every rank finds when it compares with rank 0.
std::vector<InitialValues::State> InitialValues::gather(const std::vector<std::uint64_t>& sums,
                                                        const std::vector<bool>& here) {
  const std::size_t count = sums.size();
  std::vector<std::uint64_t> first = sums;
  group_.broadcast(std::as_writable_bytes(std::span(first)), 0);
  std::vector<State> mine(count, State::Same);
  for (std::size_t i = 0; i < count; ++i) {
    if (sums[i] != first[i]) mine[i] = State::Differs;
    if (!here[i]) mine[i] = State::LeftOut;
  }
  std::vector<State> all(count * static_cast<std::size_t>(group_.size()));
  std::vector<std::span<std::byte>> parts;
  for (int rank = 0; rank < group_.size(); ++rank) {
    parts.push_back(std::as_writable_bytes(
        std::span(all).subspan(static_cast<std::size_t>(rank) * count, count)));
  }
  group_.all_gather(std::as_bytes(std::span(mine)), parts);
  for (std::size_t i = 0; i < count; ++i) {
    bool out = false;
    for (std::size_t at = i; at < all.size(); at += count) out = out || all[at] == State::LeftOut;
    for (std::size_t at = i; out && at < all.size(); at += count) all[at] = State::LeftOut;
  }
  return all;
}

std::vector<Page*> InitialValues::differing_here() const {
  std::vector<Page*> out;
  for (std::size_t i = 0; i < pages_.size(); ++i) {
    if (state(group_.rank(), i) == State::Differs) out.push_back(pages_[i]);
  }
  return out;
}

void InitialValues::send(bool shards) {
  for (std::size_t i = 0; i < pages_.size(); ++i) send_page(i, shards);
}

void InitialValues::send_page(std::size_t index, bool shards) {
  Page& page = *pages_[index];
  std::vector<int> to;
  for (int rank = 1; rank < group_.size(); ++rank) {
    if (state(rank, index) == State::Differs) to.push_back(rank);
  }
  if (group_.rank() != 0) {
    if (state(group_.rank(), index) != State::Differs) return;
    PAGODA_TRACE("engine", "receive initial values", {"page", page.name()});
    pager_.write_home(page, piece_,
                      [&](std::span<std::byte> bytes) { group_.recv(0, kPieceTag, bytes); });
    return;
  }
  if (to.empty()) return;
  PAGODA_TRACE("engine", "send initial values", {"page", page.name()});
  const auto send_range = [&](Range range, std::span<const int> ranks) {
    pager_.read_home(page, range, piece_, [&](std::span<const std::byte> bytes) {
      std::vector<comm::Transfer> transfers;
      for (const int rank : ranks) transfers.push_back(comm::send_to(rank, kPieceTag, bytes));
      group_.exchange(transfers);
    });
  };
  if (!shards) return send_range(whole(page), to);
  for (const int rank : to) send_range(pager_.sharding().of(page.elements, rank), {&rank, 1});
}

void InitialValues::send_buffers() {
  for (std::size_t i = 0; i < buffers_.size(); ++i) {
    bool differs = false;
    for (int rank = 0; rank < group_.size(); ++rank) {
      differs = differs || state(rank, pages_.size() + i) == State::Differs;
    }
    if (!differs) continue;
    const bool writes = state(group_.rank(), pages_.size() + i) == State::Differs;
    for_pieces(buffers_[i], [&](Bytes at, std::span<std::byte> bytes) {
      if (group_.rank() == 0) buffers_[i].read(at, bytes);
      group_.broadcast(bytes, 0);
      if (writes) buffers_[i].write(at, bytes);
    });
  }
}

}  // namespace pagoda::engine
