// SPDX-License-Identifier: Apache-2.0
#include "pagoda/engine/gradient_gather.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "pagoda/kernels/element.h"
#include "pagoda/kernels/gradient_norm.h"

namespace pagoda::engine {
namespace {

using optim::TrainedPage;
using pager::Range;
using Pages = std::span<const std::unique_ptr<TrainedPage>>;

/// Every rank's sums of squares, page after page and in the order of the elements.
std::vector<double> gather_squares(Pages pages, const pager::Sharding& sharding,
                                   comm::Group* group) {
  std::vector<double> mine;
  for (const auto& page : pages) {
    const std::size_t blocks = kernels::norm_blocks(page->reduced.size());
    if (page->squares.empty()) {
      mine.insert(mine.end(), blocks, 0.0);
    } else {
      mine.insert(mine.end(), page->squares.begin(), page->squares.end());
    }
  }
  if (group == nullptr) return mine;
  const auto ranks = static_cast<std::size_t>(group->size());
  std::vector<std::vector<double>> all(ranks);
  std::vector<std::span<std::byte>> parts(ranks);
  for (std::size_t r = 0; r < ranks; ++r) {
    std::size_t blocks = 0;
    for (const auto& page : pages) {
      blocks += kernels::norm_blocks(sharding.of(page->elements(), static_cast<int>(r)).size());
    }
    all[r].resize(blocks);
    parts[r] = std::as_writable_bytes(std::span(all[r]));
  }
  group->all_gather(std::as_bytes(std::span(mine)), parts);
  std::vector<double> out;
  std::vector<std::size_t> at(ranks);
  for (const auto& page : pages) {
    for (std::size_t r = 0; r < ranks; ++r) {
      const std::size_t blocks =
          kernels::norm_blocks(sharding.of(page->elements(), static_cast<int>(r)).size());
      const auto begin = all[r].begin() + static_cast<std::ptrdiff_t>(at[r]);
      out.insert(out.end(), begin, begin + static_cast<std::ptrdiff_t>(blocks));
      at[r] += blocks;
    }
  }
  return out;
}

}  // namespace

double gradient_norm(Pages pages, const pager::Sharding& sharding, comm::Group* group) {
  const std::vector<double> squares = gather_squares(pages, sharding, group);
  double total = 0;
  std::size_t at = 0;
  for (const auto& page : pages) {
    const std::size_t blocks = kernels::norm_blocks(page->elements());
    total += kernels::add_in_order(std::span(squares).subspan(at, blocks));
    at += blocks;
  }
  return std::sqrt(total);
}

void gather_gradients(std::span<TrainedPage* const> pages, pager::Tiers& tiers,
                      const pager::Sharding& sharding, Bytes bucket, comm::Group& group) {
  const auto ranks = static_cast<std::size_t>(group.size());
  for (TrainedPage* page : pages) {
    const Bytes size = kernels::element_size(page->gradient_dtype);
    const Range own = page->reduced;
    const std::uint64_t shard = sharding.of(page->elements(), 0).size();
    const std::uint64_t most = std::max<std::uint64_t>(1, bucket / size / ranks);
    for (std::uint64_t done = 0; done < shard; done += most) {
      std::vector<std::vector<std::byte>> bytes(ranks);
      std::vector<std::span<std::byte>> parts(ranks);
      std::vector<Range> ranges(ranks);
      for (std::size_t r = 0; r < ranks; ++r) {
        const Range of = sharding.of(page->elements(), static_cast<int>(r));
        const std::uint64_t begin = std::min(of.end, of.begin + done);
        ranges[r] = {begin, std::min(of.end, begin + most)};
        bytes[r].resize(ranges[r].size() * size);
        parts[r] = bytes[r];
      }
      const Range mine = ranges[static_cast<std::size_t>(group.rank())];
      std::vector<std::byte>& buffer = bytes[static_cast<std::size_t>(group.rank())];
      if (!own.empty()) tiers.read(page->gradient, mine.begin * size, buffer);
      group.all_gather(buffer, parts);
      for (std::size_t r = 0; r < ranks; ++r) {
        if (static_cast<int>(r) == group.rank()) continue;
        tiers.write(page->gradient, ranges[r].begin * size, bytes[r]);
      }
    }
  }
}

}  // namespace pagoda::engine
