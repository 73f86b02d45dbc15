// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "pagoda/comm/group.h"
#include "pagoda/pager/pager.h"

namespace pagoda::engine {

/// Bytes outside of pages that all ranks start with, too: a buffer of a module. Read and written
/// from an offset on.
struct BufferSpec {
  std::string name;
  Bytes bytes = 0;
  std::function<void(Bytes, std::span<std::byte>)> read;
  std::function<void(Bytes, std::span<const std::byte>)> write;
  std::string form = {};  ///< its type and shape: "float32 [4]"
};

/// Which values a model's pages and buffers start with: rank 0's, on every rank. Compares them by
/// checksum and sends what differs, each rank what it keeps, piece by piece through the pager's
/// staging buffer; modules' buffers through a scratch buffer.
///
/// One thread of each rank; all members but the getters are collectives of the group.
class InitialValues {
 public:
  /// `scratch`: as large on all ranks.
  InitialValues(comm::Group& group, pager::Pager& pager, std::span<std::byte> scratch)
      : group_(group), pager_(pager), scratch_(scratch), piece_(scratch.size()) {}

  /// Homes have the pages as a whole. Pages of which some rank has a part only are left out: the
  /// ranks have been through this.
  void compare(std::span<pager::Page* const> pages, std::span<BufferSpec const> buffers);
  /// Parameters and buffers that differ on some rank.
  std::size_t differing() const noexcept { return differing_; }
  /// "in 3 of 8 parameters and 1 of 2 buffers on rank 1, '0.weight' first"
  const std::string& text() const noexcept { return text_; }
  /// Pages that differ here, and will be written by send().
  std::vector<pager::Page*> differing_here() const;

  /// Rank 0's bytes go to the homes of the ranks that differ: all of them, or (`shards`) those of
  /// the shard that a home has been cut to. Rank 0's homes are still whole.
  void send(bool shards);
  void send_buffers();

 private:
  enum class State : std::uint8_t { Same, Differs, LeftOut };

  std::vector<State> gather(const std::vector<std::uint64_t>& sums, const std::vector<bool>& whole);
  void send_page(std::size_t index, bool shards);
  /// Calls `fn` for one piece of the buffer's bytes after the other: its offset, and the scratch.
  template <class Fn>
  void for_pieces(const BufferSpec& buffer, Fn&& fn);
  State state(int rank, std::size_t index) const {
    return states_[static_cast<std::size_t>(rank) * (pages_.size() + buffers_.size()) + index];
  }

  comm::Group& group_;
  pager::Pager& pager_;
  const std::span<std::byte> scratch_;
  const Bytes piece_;  // bytes that go from rank to rank, and into a checksum, at a time
  std::vector<pager::Page*> pages_;
  std::span<BufferSpec const> buffers_;
  std::vector<State> states_;  // of pages, then buffers, rank by rank
  std::size_t differing_ = 0;
  std::string text_;
};

}  // namespace pagoda::engine
