// SPDX-License-Identifier: Apache-2.0
#include "pagoda/optim/update_chunk.h"

#include <algorithm>
#include <cstring>

#include "pagoda/base/error.h"
#include "pagoda/kernels/cast.h"
#include "pagoda/kernels/rounding_counter.h"

namespace pagoda::optim {
namespace {

using kernels::ConstElements;
using kernels::Elements;
using pager::Tier;

// Elements of a state on disk that follow their parameters at a time.
constexpr std::uint64_t kFollowed = 16U << 10;

/// Different parameters round with different noise.
std::uint64_t rounding_seed(std::uint64_t seed, std::uint32_t parameter) {
  return kernels::mix64(kernels::mix64(seed) ^ parameter);
}

/// On this thread and the pool's.
void copy(std::span<const std::byte> from, std::byte* to, ThreadPool& pool) {
  constexpr std::size_t kPiece = 1U << 18;  // bytes
  pool.parallel_for(0, from.size(), kPiece, [&](std::size_t begin, std::size_t end) {
    std::memcpy(to + begin, from.data() + begin, end - begin);
  });
}

}  // namespace

UpdateChunk::Array UpdateChunk::place(const pager::Home& home, Bytes offset, Bytes bytes,
                                      std::byte*& free) const {
  if (tiers_.in_place(home)) {
    return {&home, offset, {const_cast<std::byte*>(home.data()) + offset, bytes}, false};
  }
  std::byte* memory = free;
  free += align_up(bytes, StateLayout::kAlignment);
  return {&home, offset, {memory, bytes}, true};
}

Bytes UpdateChunk::read(const Array& array) {
  if (!array.in_buffer || array.memory.empty()) return 0;
  if (array.home->tier() != Tier::Nvme) {
    tiers_.read(*array.home, array.offset, array.memory);
    return 0;
  }
  transfers_.push_back(tiers_.swap()->read(array.home->extent(), array.offset, array.memory));
  return array.memory.size();
}

/// Where it is part of the master, or is not written in full.
bool UpdateChunk::reads_parameter() const noexcept {
  return layout_->master != StateLayout::Master::Whole || page_->state_blank ||
         !page_->one_parameter();
}

Bytes UpdateChunk::begin(const TrainedPage& page, const StateLayout& layout, std::uint64_t chunk,
                         const Written& written) {
  page_ = &page;
  layout_ = &layout;
  elements_ = chunk_elements(page, layout, chunk);
  const std::uint64_t count = elements_.size();
  const Bytes grad_size = kernels::element_size(page.gradient_dtype);
  const Bytes size = page.page->element_size;
  std::byte* free = buffer_.data();
  state_ = place(page.state, layout.begin(chunk), layout.offsets(count).end, free);
  written_ = written.state_to_spare
                 ? const_cast<std::byte*>(page.spare.data()) + layout.begin(chunk)
                 : nullptr;
  gradient_ = place(page.gradient, (elements_.begin - page.gradient_range.begin) * grad_size,
                    count * grad_size, free);
  parameter_ = {};
  updated_ = {};
  if (written.parameters == nullptr) tiers_.wait_for_users(page.home());
  if (written.parameters == nullptr || reads_parameter()) {
    parameter_ =
        place(page.home(), (elements_.begin - page.home_range().begin) * size, count * size, free);
  }
  if (written.parameters == nullptr) {
    updated_ = parameter_;
  } else if (written.parameters == &page.gradient) {  // over what is read, element by element
    updated_ = gradient_;
  } else {
    updated_ = place(*written.parameters, (elements_.begin - page.updated.begin) * size,
                     count * size, free);
  }
  Bytes from_disk = page.state_blank ? 0 : read(state_);
  from_disk += read(gradient_);
  if (reads_parameter()) from_disk += read(parameter_);
  return from_disk;
}

void UpdateChunk::wait() {
  for (io::Transfer& transfer : transfers_) transfer.wait();
  transfers_.clear();
}

bool UpdateChunk::arrived() const noexcept {
  return std::all_of(transfers_.begin(), transfers_.end(),
                     [](const io::Transfer& transfer) { return transfer.done(); });
}

void UpdateChunk::abandon() noexcept {
  for (io::Transfer& transfer : transfers_) {
    try {
      transfer.wait();
    } catch (...) {
    }
  }
  transfers_.clear();
}

void UpdateChunk::fill_blank(ThreadPool& pool) {
  if (state_.memory.empty()) return;  // SGD has none
  std::memset(state_.memory.data(), 0, state_.memory.size());
  if (layout_->master == StateLayout::Master::Whole) {
    kernels::cast({page_->dtype, parameter_.memory.data()},
                  reinterpret_cast<float*>(state_.memory.data()), elements_.size(), pool);
  }
}

void UpdateChunk::apply(std::span<const pager::Range> wanted, const StepScalars& step,
                        std::uint64_t seed, ThreadPool& pool) {
  const StateLayout::Offsets at = layout_->offsets(elements_.size());
  std::byte* state = state_.memory.data();
  const auto moment = [&](std::byte* states, bool exists, Bytes offset) {
    return Elements{layout_->moments, exists && states != nullptr ? states + offset : nullptr};
  };
  const Elements momentum = moment(state, layout_->momentum, at.momentum);
  const Elements variance = moment(state, layout_->variance, at.variance);
  std::vector<kernels::OptimizerShard> shards;
  for (const Segment& segment : page_->segments) {
    const TrainedParameter& parameter = page_->parameters[segment.parameter];
    if (!parameter.used) continue;
    shards.clear();
    for (const pager::Range& range : wanted) {
      const std::uint64_t from = std::max(range.begin, segment.range.begin);
      const std::uint64_t to = std::min(range.end, segment.range.end);
      if (from >= to) continue;
      const std::size_t skip = from - elements_.begin;
      kernels::OptimizerShard& shard = shards.emplace_back();
      shard.first_index = segment.first_index + (from - segment.range.begin);
      shard.count = to - from;
      shard.grad = ConstElements{page_->gradient_dtype, gradient_.memory.data()}.from(skip);
      const Elements values = Elements{page_->dtype, parameter_.memory.data()}.from(skip);
      const Elements updated = Elements{page_->dtype, updated_.memory.data()}.from(skip);
      const bool elsewhere = updated.data != values.data;
      switch (layout_->master) {
        case StateLayout::Master::Parameter:
          shard.master = static_cast<float*>(values.data);
          if (elsewhere) shard.to.master = static_cast<float*>(updated.data);
          break;
        case StateLayout::Master::Whole:
          shard.master = reinterpret_cast<float*>(state) + skip;
          if (written_ != nullptr) shard.to.master = reinterpret_cast<float*>(written_) + skip;
          shard.param = updated;
          break;
        case StateLayout::Master::Split:
          shard.rest = reinterpret_cast<std::int16_t*>(state) + skip;
          if (written_ != nullptr) shard.to.rest = reinterpret_cast<std::int16_t*>(written_) + skip;
          shard.param = values;
          if (elsewhere) shard.to.param = updated;
          break;
      }
      shard.momentum = momentum.from(skip);
      shard.variance = variance.from(skip);
      shard.to.momentum = moment(written_, layout_->momentum, at.momentum).from(skip);
      shard.to.variance = moment(written_, layout_->variance, at.variance).from(skip);
    }
    const kernels::Step now{parameter.updates + 1, step.grad_scale,
                            rounding_seed(seed, parameter.index)};
    optim::apply(step.optimizers[parameter.group], now, shards, pool);
  }
}

Bytes UpdateChunk::write() {
  Bytes to_disk = 0;
  for (const Array* array : {&state_, &updated_}) {
    if (!array->in_buffer || array->memory.empty()) continue;
    if (array->home->tier() == Tier::Nvme) {
      transfers_.push_back(
          tiers_.swap()->write(array->home->extent(), array->offset, array->memory));
      to_disk += array->memory.size();
    } else {
      tiers_.write(*array->home, array->offset, array->memory);
    }
  }
  return to_disk;
}

void copy_parameters(pager::Tiers& tiers, TrainedPage& page, const pager::Home& from,
                     ThreadPool& pool) {
  const Bytes size = page.page->element_size;
  const Bytes offset = (page.updated.begin - page.home_range().begin) * size;
  const std::span values(from.data(), page.updated.size() * size);
  if (tiers.in_place(page.home())) {
    tiers.wait_for_users(page.home());
    copy(values, page.home().data() + offset, pool);
  } else {
    tiers.write(page.home(), offset, values);
  }
}

void follow_parameters(pager::Tiers& tiers, TrainedPage& page, const StateLayout& layout,
                       std::uint64_t begin, std::uint64_t count, const std::byte* before,
                       const std::byte* after) {
  if (page.state_blank || layout.master == StateLayout::Master::Parameter) return;
  PAGODA_CHECK_EQ(page.page->element_size, 2U);
  const auto* was = reinterpret_cast<const std::uint16_t*>(before);
  const auto* is = reinterpret_cast<const std::uint16_t*>(after);
  const bool in_place = tiers.in_place(page.state);
  const Bytes moment = kernels::element_size(layout.moments);
  const Bytes master = layout.master == StateLayout::Master::Whole ? 4 : 2;
  const bool ties = layout.master == StateLayout::Master::Split;
  // What lies elsewhere passes through two small buffers: all of a chunk may be much.
  std::vector<std::byte> masters(in_place ? 0 : kFollowed * master);
  std::vector<std::byte> variances(in_place || !ties ? 0 : kFollowed * moment);
  for (std::uint64_t done = 0; done < count;) {
    const std::uint64_t at = begin + done - page.updated.begin;
    const std::uint64_t index = at / layout.chunk;
    const std::uint64_t skip = at % layout.chunk;
    const std::uint64_t in_chunk = layout.count(page.updated.size(), index);
    const std::uint64_t piece =
        std::min({count - done, in_chunk - skip, in_place ? count : kFollowed});
    if (std::memcmp(was + done, is + done, piece * 2) != 0) {
      const Bytes chunk = layout.begin(index);
      const Bytes master_at = chunk + skip * master;
      const Bytes variance_at = chunk + layout.offsets(in_chunk).variance + skip * moment;
      const auto bytes = [&](std::vector<std::byte>& buffer, Bytes offset, Bytes size) {
        std::byte* data = in_place ? page.state.data() + offset : buffer.data();
        const std::span<std::byte> out(data, piece * size);
        if (!in_place) tiers.read(page.state, offset, out);
        return out;
      };
      const std::span<std::byte> to = bytes(masters, master_at, master);
      const std::span<std::byte> signs =
          ties ? bytes(variances, variance_at, moment) : std::span<std::byte>();
      for (std::uint64_t i = 0; i < piece; ++i) {
        if (was[done + i] == is[done + i]) continue;
        const std::uint16_t bits = is[done + i];
        if (!ties) {
          kernels::cast(ConstElements{page.dtype, &bits}, reinterpret_cast<float*>(to.data()) + i,
                        1);
        } else {
          reinterpret_cast<std::int16_t*>(to.data())[i] = 0;
          // The tie's bit is the sign of the second moment: a rest of zero is no tie.
          signs[(i + 1) * moment - 1] &= std::byte{0x7F};
        }
      }
      if (!in_place) {
        tiers.write(page.state, master_at, to);
        if (ties) tiers.write(page.state, variance_at, signs);
      }
    }
    done += piece;
  }
}

}  // namespace pagoda::optim
