// SPDX-License-Identifier: Apache-2.0
// How a round of gradients is cut into messages, and the buffers that these need.
#include <algorithm>
#include <numeric>
#include <utility>

#include "pagoda/engine/reducer.h"

namespace pagoda::engine {

using optim::TrainedPage;

Bytes Reducer::flag_bytes(const TrainedPage& page) {
  return align_up((page.parameters.size() + 1 + 7) / 8, kAlignment);
}

void Reducer::use_plan(Plan plan, const Lock& /*lock*/) {
  buckets_ = std::move(plan.buckets);
  Buffers next = std::exchange(next_buffers_, {});
  if (plan.message <= buffers_.message) return;
  buffers_ = {};
  buffers_ = next.message >= plan.message ? std::move(next) : take_buffers(plan.message);
}

Reducer::Plan Reducer::plan_with(std::span<TrainedPage* const> pages) const {
  std::vector<TrainedPage*> all;
  {
    const Lock lock(mutex_);
    all = order_;
  }
  all.insert(all.end(), pages.begin(), pages.end());
  return make_plan(all);
}

void Reducer::make_room_for(std::span<TrainedPage* const> pages) {
  const Bytes message = plan_with(pages).message;
  const Lock lock(mutex_);
  next_buffers_ = {};
  if (message > buffers_.message) next_buffers_ = take_buffers(message);
}

/// Cuts the round into buckets: whole shards of small pages together, large ones in pieces.
Reducer::Plan Reducer::make_plan(std::span<TrainedPage* const> order) const {
  Plan plan;
  std::vector<Item> bucket;
  std::vector<Bytes> sizes;  // of all items
  Bytes filled = 0;
  Bytes flags = 0;
  for (TrainedPage* page : order) {
    const std::uint64_t shard = pager_.sharding().of(page->elements(), 0).size();
    const Bytes size = page->page->element_size;
    flags = std::max(flags, flag_bytes(*page));
    const std::uint64_t most = std::max<std::uint64_t>(
        pager::Sharding::kBlock, options_.bucket / (size * static_cast<Bytes>(ranks_)) /
                                     pager::Sharding::kBlock * pager::Sharding::kBlock);
    std::uint64_t done = 0;
    do {
      const std::uint64_t count = std::min(most, shard - done);
      const Bytes bytes = count * size * static_cast<Bytes>(ranks_);
      if (filled + bytes > options_.bucket && !bucket.empty()) {
        plan.buckets.push_back(std::exchange(bucket, {}));
        filled = 0;
      }
      bucket.push_back({page, done, count, done + count == shard});
      sizes.push_back(bytes);
      filled += bytes;
      done += count;
    } while (done < shard);
  }
  if (!bucket.empty()) plan.buckets.push_back(std::move(bucket));
  // One rank alone needs no messages; a GPU's gradients still need a place to arrive at.
  const bool staged = ranks_ > 1 || !pager_.tiers().device_is_host();
  if (!staged || sizes.empty()) return plan;
  // Whatever the order, a bucket is no larger than this: the buffers are taken once, at attach.
  std::sort(sizes.begin(), sizes.end());
  const Bytes data = std::max(options_.bucket, sizes.back());
  Bytes items = 0;
  Bytes sum = 0;
  for (const Bytes bytes : sizes) {
    sum += bytes;
    ++items;
    if (sum > options_.bucket) break;
  }
  const Bytes all = std::accumulate(sizes.begin(), sizes.end(), Bytes{0});
  // At least a block of elements: run_alone() takes whole blocks at a time.
  plan.message = std::max<Bytes>(
      pager::Sharding::kBlock * sizeof(float),
      std::min(data, all) + items * static_cast<Bytes>(ranks_) * (flags + kAlignment));
  return plan;
}

/// What buffers of that many bytes take: one for each way.
Bytes Reducer::buffers_for(Bytes message) const {
  return (ranks_ > 1 ? 2 : 1) * message;
}

Bytes Reducer::host_bytes(std::span<TrainedPage* const> order) const {
  const Bytes wanted = buffers_for(make_plan(order).message);
  const Bytes taken = buffers_for(buffers_.message);
  return wanted - std::min(wanted, taken);
}

Bytes Reducer::host_bytes_with(std::span<TrainedPage* const> pages) const {
  const Bytes message = plan_with(pages).message;  // beside those of now, which are in use
  return message > buffers_.message ? buffers_for(message) : 0;
}

Reducer::Buffers Reducer::take_buffers(Bytes message) {
  pager::HostMemory& host = pager_.tiers().host();
  Buffers out;
  out.outgoing = host.allocate(message, pager::tag::kStaging, "gradients out");
  if (ranks_ > 1) out.incoming = host.allocate(message, pager::tag::kStaging, "gradients in");
  out.message = message;
  return out;
}

}  // namespace pagoda::engine
