// SPDX-License-Identifier: Apache-2.0
#include "pagoda/optim/gradients.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "pagoda/base/error.h"
#include "pagoda/base/trace.h"
#include "pagoda/kernels/cast.h"
#include "pagoda/kernels/gradient_norm.h"

namespace pagoda::optim {
namespace {

using kernels::ConstElements;
using kernels::Dtype;
using kernels::Elements;

constexpr std::size_t kBlock = kernels::kNormBlock;
constexpr std::size_t kGrain = 64 * kBlock;  // what one thread takes at a time

struct Sum {
  std::span<const std::byte* const> ranks;  // null: zeros
  std::size_t rank_offset;                  // elements to skip in each
  Dtype dtype;
  float scale;
  std::byte* accumulator;
  Dtype accumulator_dtype;
  bool first;
};

/// accumulator ← round((first ? 0 : accumulator) + scale·Σ ranks), each operation rounded once.
void sum_block(const Sum& sum, std::size_t at, std::size_t count) {
  std::array<float, kBlock> total;
  std::array<float, kBlock> next;
  bool any = false;
  for (const std::byte* rank : sum.ranks) {
    if (rank == nullptr) continue;
    const ConstElements from = ConstElements(sum.dtype, rank).from(sum.rank_offset + at);
    if (!any) {
      kernels::cast(from, total.data(), count);
      any = true;
      continue;
    }
    kernels::cast(from, next.data(), count);
    for (std::size_t i = 0; i < count; ++i) total[i] += next[i];
  }
  if (!any) std::fill_n(total.begin(), count, 0.0F);
  if (sum.scale != 1) {
    for (std::size_t i = 0; i < count; ++i) total[i] *= sum.scale;
  }
  const Elements to = Elements(sum.accumulator_dtype, sum.accumulator).from(at);
  if (!sum.first) {
    kernels::cast(to, next.data(), count);
    for (std::size_t i = 0; i < count; ++i) total[i] = next[i] + total[i];
  }
  kernels::cast(total.data(), to, count);
}

}  // namespace

Gradients::Gradients(pager::Tiers& tiers, ThreadPool& pool, Options options)
    : tiers_(tiers), pool_(pool), options_(options) {
  PAGODA_REQUIRE_GE(options_.staging, kBlock * sizeof(float), "staging for gradients is too small");
  staging_ = tiers_.host().allocate(options_.staging, pager::tag::kStaging, "gradient sums");
}

void Gradients::add(TrainedPage& page, std::uint64_t begin, std::uint64_t count,
                    std::span<const std::byte* const> ranks, const std::vector<bool>& present) {
  PAGODA_TRACE("gradients", "add", {"page", page.page->name()}, {"elements", count});
  const Bytes size = kernels::element_size(page.gradient_dtype);
  const Bytes home_begin = (begin - page.gradient_range.begin) * size;
  if (tiers_.in_place(page.gradient)) {
    add_piece(page, begin, count, ranks, present, page.gradient.data() + home_begin);
    return;
  }
  const std::uint64_t most = options_.staging / size / kBlock * kBlock;
  std::vector<const std::byte*> shifted(ranks.begin(), ranks.end());
  for (std::uint64_t done = 0; done < count;) {
    const std::uint64_t piece = std::min(most, count - done);
    const std::span buffer(staging_.data(), piece * size);
    try {
      if (page.filled()) tiers_.read(page.gradient, home_begin + done * size, buffer);
      add_piece(page, begin + done, piece, shifted, present, buffer.data());
      tiers_.write(page.gradient, home_begin + done * size, buffer);
    } catch (Error& error) {
      error.add_context(context("page", page.page->name()));
      throw;
    }
    for (const std::byte*& rank : shifted) {
      if (rank != nullptr) rank += piece * kernels::element_size(page.dtype);
    }
    done += piece;
  }
}

void Gradients::add_piece(TrainedPage& page, std::uint64_t begin, std::uint64_t count,
                          std::span<const std::byte* const> ranks, const std::vector<bool>& present,
                          std::byte* accumulator) {
  const Bytes size = kernels::element_size(page.gradient_dtype);
  // Elements between the parameters of a page, and parameters without a gradient, count as zero.
  if (!page.filled() &&
      (page.segments.size() > 1 || page.segments[0].range.size() != page.elements()))
    std::memset(accumulator, 0, count * size);
  for (const Segment& segment : page.segments) {
    const std::uint64_t first = std::max(begin, segment.range.begin);
    const std::uint64_t last = std::min(begin + count, segment.range.end);
    if (first >= last || !present[segment.parameter]) continue;
    const Sum sum{ranks,
                  first - begin,
                  page.dtype,
                  options_.scale,
                  accumulator + (first - begin) * size,
                  page.gradient_dtype,
                  !page.parameters[segment.parameter].filled};
    pool_.parallel_for(0, last - first, kGrain, [&](std::size_t from, std::size_t to) {
      for (; from < to; from += kBlock) sum_block(sum, from, std::min(kBlock, to - from));
    });
  }
  if (!options_.squares) return;
  const std::uint64_t block = (begin - page.reduced.begin) / kBlock;
  PAGODA_CHECK_EQ((begin - page.reduced.begin) % kBlock, 0U);
  page.squares.resize(kernels::norm_blocks(page.reduced.size()));
  kernels::block_sums_of_squares(
      {page.gradient_dtype, accumulator}, count, 1,
      std::span(page.squares).subspan(block, kernels::norm_blocks(count)), pool_);
}

std::byte* Gradients::take_as_is(TrainedPage& page, const std::vector<bool>& present) noexcept {
  const bool whole = page.one_parameter() && page.gradient_range.size() == page.elements();
  const bool same = page.gradient_dtype == page.dtype && options_.scale == 1;
  if (!whole || !same || !present[0] || page.filled() || !tiers_.in_place(page.gradient)) {
    return nullptr;
  }
  return page.gradient.data();
}

void Gradients::taken(TrainedPage& page, const std::vector<bool>& present) {
  if (options_.squares) {
    page.squares.resize(kernels::norm_blocks(page.elements()));
    kernels::block_sums_of_squares({page.gradient_dtype, page.gradient.data()}, page.elements(), 1,
                                   page.squares, pool_);
  }
  added(page, present);
}

void Gradients::added(TrainedPage& page, const std::vector<bool>& present) {
  page.gathered = false;
  for (std::size_t i = 0; i < page.parameters.size(); ++i) {
    if (present[i]) page.parameters[i].filled = true;
  }
}

void Gradients::forget(TrainedPage& page, std::uint32_t parameter) {
  if (!page.parameters[parameter].filled) return;
  page.parameters[parameter].filled = false;
  page.gathered = false;
  if (!page.filled()) {
    clear(page);
    return;
  }
  // Sums of squares are taken of whole blocks, in which it counts as zero.
  if (!options_.squares) page.squares.clear();
  const Bytes size = kernels::element_size(page.gradient_dtype);
  const std::uint64_t most = options_.staging / size / kBlock * kBlock;
  for (std::uint64_t at = page.reduced.begin; at < page.reduced.end;) {
    const std::uint64_t piece = std::min(most, page.reduced.end - at);
    const Bytes home_begin = (at - page.gradient_range.begin) * size;
    const std::span buffer(staging_.data(), piece * size);
    tiers_.read(page.gradient, home_begin, buffer);
    for (const Segment& segment : page.segments) {
      const std::uint64_t first = std::max(at, segment.range.begin);
      const std::uint64_t last = std::min(at + piece, segment.range.end);
      if (segment.parameter != parameter || first >= last) continue;
      std::memset(buffer.data() + (first - at) * size, 0, (last - first) * size);
    }
    tiers_.write(page.gradient, home_begin, buffer);
    if (options_.squares) {
      kernels::block_sums_of_squares(
          {page.gradient_dtype, buffer.data()}, piece, 1,
          std::span(page.squares)
              .subspan((at - page.reduced.begin) / kBlock, kernels::norm_blocks(piece)),
          pool_);
    }
    at += piece;
  }
}

void Gradients::clear(TrainedPage& page) noexcept {
  for (TrainedParameter& parameter : page.parameters) parameter.filled = false;
  page.squares.clear();
  page.gathered = false;
}

void Gradients::measure(TrainedPage& page) {
  const Bytes size = kernels::element_size(page.gradient_dtype);
  const Bytes home_begin = (page.reduced.begin - page.gradient_range.begin) * size;
  const std::uint64_t count = page.reduced.size();
  page.squares.resize(kernels::norm_blocks(count));
  const bool in_place = tiers_.in_place(page.gradient);
  const std::uint64_t most = in_place ? count : options_.staging / size / kBlock * kBlock;
  for (std::uint64_t done = 0; done < count;) {
    const std::uint64_t piece = std::min(most, count - done);
    const std::span buffer(staging_.data(), piece * size);
    if (!in_place) tiers_.read(page.gradient, home_begin + done * size, buffer);
    const std::byte* sum = in_place ? page.gradient.data() + home_begin : buffer.data();
    kernels::block_sums_of_squares(
        {page.gradient_dtype, sum}, piece, 1,
        std::span(page.squares).subspan(done / kBlock, kernels::norm_blocks(piece)), pool_);
    done += piece;
  }
}

void Gradients::read(const TrainedPage& page, std::uint64_t begin, std::span<float> to) {
  if (!page.filled()) {  // nothing has been written, which a home on NVMe would call an error
    std::fill(to.begin(), to.end(), 0.0F);
    return;
  }
  const Bytes size = kernels::element_size(page.gradient_dtype);
  const std::uint64_t most = options_.staging / size;
  for (std::uint64_t done = 0; done < to.size();) {
    const std::uint64_t piece = std::min<std::uint64_t>(most, to.size() - done);
    tiers_.read(page.gradient, (begin + done - page.gradient_range.begin) * size,
                {staging_.data(), piece * size});
    kernels::cast({page.gradient_dtype, staging_.data()}, to.data() + done, piece);
    done += piece;
  }
  for (const Segment& segment : page.segments) {
    if (page.parameters[segment.parameter].filled) continue;
    const std::uint64_t first = std::max(begin, segment.range.begin);
    const std::uint64_t last = std::min(begin + to.size(), segment.range.end);
    if (first < last)
      std::fill(to.begin() + static_cast<std::ptrdiff_t>(first - begin),
                to.begin() + static_cast<std::ptrdiff_t>(last - begin), 0.0F);
  }
}

}  // namespace pagoda::optim
