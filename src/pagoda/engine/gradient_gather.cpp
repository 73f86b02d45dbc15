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

/// The sums of squares that a rank keeps of all pages, page after page.
using Squares = std::vector<double>;

std::size_t blocks_of(const TrainedPage& page, const pager::Sharding& sharding, std::size_t rank) {
  return kernels::norm_blocks(sharding.of(page.elements(), static_cast<int>(rank)).size());
}

/// Of every rank.
std::vector<Squares> gather_squares(Pages pages, const pager::Sharding& sharding,
                                    comm::Group& group) {
  const auto ranks = static_cast<std::size_t>(group.size());
  std::vector<Squares> all(ranks);
  std::vector<std::span<std::byte>> parts(ranks);
  for (std::size_t r = 0; r < ranks; ++r) {
    std::size_t blocks = 0;
    for (const auto& page : pages) blocks += blocks_of(*page, sharding, r);
    all[r].resize(blocks);
    parts[r] = std::as_writable_bytes(std::span(all[r]));
  }
  const auto me = static_cast<std::size_t>(group.rank());
  auto at = all[me].begin();
  for (const auto& page : pages) {
    std::copy(page->squares.begin(), page->squares.end(), at);  // none: zeros
    at += static_cast<std::ptrdiff_t>(blocks_of(*page, sharding, me));
  }
  group.all_gather(parts[me], parts);
  return all;
}

}  // namespace

Bytes gradient_norm_bytes(Pages pages, int ranks) {
  std::size_t kept = 0;
  std::size_t gathered = 0;
  for (const auto& page : pages) {
    kept += kernels::norm_blocks(page->reduced.size());
    // Every rank's last block may be cut.
    gathered += kernels::norm_blocks(page->elements()) + static_cast<std::size_t>(ranks);
  }
  return (kept + (ranks == 1 ? 0 : gathered)) * sizeof(double);
}

double gradient_norm(Pages pages, const pager::Sharding& sharding, comm::Group* group) {
  double total = 0;
  if (group == nullptr) {
    for (const auto& page : pages) total += kernels::add_in_order(page->squares);
    return std::sqrt(total);
  }
  const std::vector<Squares> all = gather_squares(pages, sharding, *group);
  std::vector<std::size_t> at(all.size());
  for (const auto& page : pages) {
    double sum = 0;
    for (std::size_t r = 0; r < all.size(); ++r) {  // in the order of the elements
      const std::size_t blocks = blocks_of(*page, sharding, r);
      sum = kernels::add_in_order(std::span(all[r]).subspan(at[r], blocks), sum);
      at[r] += blocks;
    }
    total += sum;
  }
  return std::sqrt(total);
}

void gather_gradients(std::span<TrainedPage* const> pages, pager::Tiers& tiers,
                      const pager::Sharding& sharding, Bytes bucket, std::span<std::byte> buffer,
                      comm::Group& group) {
  const auto ranks = static_cast<std::size_t>(group.size());
  const auto me = static_cast<std::size_t>(group.rank());
  for (TrainedPage* page : pages) {
    const Bytes size = kernels::element_size(page->gradient_dtype);
    const std::uint64_t shard = sharding.of(page->elements(), 0).size();
    const bool in_place = tiers.in_place(page->gradient);
    const Bytes at_a_time = in_place ? bucket : std::min<Bytes>(bucket, buffer.size());
    const std::uint64_t most = std::max<std::uint64_t>(1, at_a_time / size / ranks);
    for (std::uint64_t done = 0; done < shard; done += most) {
      std::vector<std::span<std::byte>> parts(ranks);
      std::vector<Bytes> begins(ranks);
      Bytes used = 0;
      for (std::size_t r = 0; r < ranks; ++r) {
        const Range of = sharding.of(page->elements(), static_cast<int>(r));
        const std::uint64_t begin = std::min(of.end, of.begin + done);
        const Bytes bytes = (std::min(of.end, begin + most) - begin) * size;
        begins[r] = begin * size;
        parts[r] = in_place ? std::span(page->gradient.data() + begins[r], bytes)
                            : buffer.subspan(used, bytes);
        used += bytes;
      }
      if (!in_place) tiers.read(page->gradient, begins[me], parts[me]);
      group.all_gather(parts[me], parts);
      for (std::size_t r = 0; r < ranks && !in_place; ++r) {
        if (r != me) tiers.write(page->gradient, begins[r], parts[r]);
      }
    }
  }
}

}  // namespace pagoda::engine
