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

/// The ranges of all ranks' shards that are gathered at a time: of no more elements than `most`.
std::vector<std::vector<Range>> pieces(const TrainedPage& page, const pager::Sharding& sharding,
                                       std::size_t ranks, std::uint64_t most) {
  const std::uint64_t each = std::max<std::uint64_t>(1, most / ranks);
  const std::uint64_t shard = sharding.of(page.elements(), 0).size();  // none has more
  std::vector<std::vector<Range>> out;
  for (std::uint64_t done = 0; done < shard; done += each) {
    std::vector<Range>& ranges = out.emplace_back(ranks);
    for (std::size_t r = 0; r < ranks; ++r) {
      const Range of = sharding.of(page.elements(), static_cast<int>(r));
      const std::uint64_t begin = std::min(of.end, of.begin + done);
      ranges[r] = {begin, std::min(of.end, begin + each)};
    }
  }
  return out;
}

}  // namespace

void GradientGather::measure(Pages pages) {
  for (const auto& page : pages) {
    if (!page->filled() || !page->squares.empty() || page->reduced.empty()) continue;
    gradients_.measure(*page);
  }
}

double GradientGather::norm(Pages pages, comm::Group* group) const {
  const pager::Sharding& sharding = pager_.sharding();
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

void GradientGather::gather(std::span<TrainedPage* const> pages, comm::Group& group) {
  pager::Tiers& tiers = pager_.tiers();
  const pager::Sharding& sharding = pager_.sharding();
  const std::span<std::byte> buffer = scratch();
  const auto ranks = static_cast<std::size_t>(group.size());
  const auto me = static_cast<std::size_t>(group.rank());
  for (TrainedPage* page : pages) {
    const Bytes size = kernels::element_size(page->gradient_dtype);
    const bool in_place = tiers.in_place(page->gradient);
    for (const std::vector<Range>& ranges : pieces(*page, sharding, ranks, buffer.size() / size)) {
      std::vector<std::span<std::byte>> parts(ranks);
      Bytes used = 0;
      for (std::size_t r = 0; r < ranks; ++r) {
        const Bytes bytes = ranges[r].size() * size;
        parts[r] = in_place ? std::span(page->gradient.data() + ranges[r].begin * size, bytes)
                            : buffer.subspan(used, bytes);
        used += bytes;
      }
      const bool has_part = !ranges[me].empty();
      if (!in_place && has_part) tiers.read(page->gradient, ranges[me].begin * size, parts[me]);
      group.all_gather(parts[me], parts);
      for (std::size_t r = 0; !in_place && r < ranks; ++r) {
        if (r == me || ranges[r].empty()) continue;
        tiers.write(page->gradient, ranges[r].begin * size, parts[r]);
      }
    }
  }
}

void GradientGather::read(const TrainedPage& page, std::span<float> to, comm::Group* of) {
  if (of == nullptr) {
    gradients_.read(page, 0, to);
    return;
  }
  comm::Group& group = *of;
  const pager::Sharding& sharding = pager_.sharding();
  const auto ranks = static_cast<std::size_t>(group.size());
  const auto me = static_cast<std::size_t>(group.rank());
  std::vector<float> unseen(to.empty() ? std::min(page.elements(), piece_ / sizeof(float)) : 0);
  for (const std::vector<Range>& ranges : pieces(page, sharding, ranks, piece_ / sizeof(float))) {
    std::vector<std::span<float>> parts(ranks);
    for (std::size_t r = 0, used = 0; r < ranks; used += ranges[r++].size()) {
      parts[r] = to.empty() ? std::span(unseen).subspan(used, ranges[r].size())
                            : to.subspan(ranges[r].begin, ranges[r].size());
    }
    if (!ranges[me].empty()) gradients_.read(page, ranges[me].begin, parts[me]);
    std::vector<std::span<std::byte>> bytes;
    for (const std::span<float> part : parts) bytes.push_back(std::as_writable_bytes(part));
    group.all_gather(bytes[me], bytes);
  }
}

}  // namespace pagoda::engine
