// SPDX-License-Identifier: Apache-2.0
#include "pagoda/engine/host_buffers.h"

#include <algorithm>
#include <functional>
#include <utility>

#include <fmt/format.h>

#include "pagoda/base/error.h"
#include "pagoda/engine/reducer.h"
#include "pagoda/engine/shard_exchange.h"
#include "pagoda/io/swap_options.h"
#include "pagoda/optim/update_chunk.h"
#include "pagoda/optim/updater.h"
#include "pagoda/pager/pager.h"
#include "pagoda/plan/buffer_size.h"

namespace pagoda::engine {
namespace {

constexpr plan::BufferRange kStaging{64_KiB, 4_MiB};
constexpr plan::BufferRange kUpdateChunk{64_KiB, 4_MiB};

Bytes staging_buffers(const Config& config, device::DeviceKind kind, int ranks) {
  Bytes out = pager::Pager::staging_buffers(kind, config.fetch_threads) + 1;  // for gradients
  if (ranks > 1 && ShardExchange::needs_buffers(kind, !config.nvme.empty())) {
    out += ShardExchange::staging_buffers(config.zero == 1 || config.zero == 2);
  }
  return out;
}

/// "staging = 4 MiB"
std::string of_size(const char* key, Bytes size, bool derived) {
  return fmt::format("{} = {}{}", key, format_bytes(size), derived ? ", derived" : "");
}

}  // namespace

HostBuffers::HostBuffers(const Config& config, device::DeviceKind kind, int ranks)
    : staging_(config.staging),
      update_chunk_(config.update_chunk),
      activation_reserve_(config.activation_reserve),
      parking_(Reducer::parking_bytes(kind, ranks)),
      staging_buffers_(staging_buffers(config, kind, ranks)),
      least_updates_(std::min(config.update_buffers, optim::Updater::kLeastBuffers)),
      most_updates_(config.update_buffers),
      updates_in_place_(kind != device::DeviceKind::Cuda && config.nvme.empty()) {
  const io::SwapOptions swap;
  if (!config.nvme.empty()) swap_ = swap.bounce_buffers * swap.io_bytes;
}

Bytes HostBuffers::staging(Bytes host_budget) const noexcept {
  return staging_ != 0 ? staging_ : plan::buffer_size(host_budget, staging_buffers_, kStaging);
}

Bytes HostBuffers::update_chunk(Bytes host_budget) const noexcept {
  if (update_chunk_ != 0) return update_chunk_;
  return plan::buffer_size(host_budget, least_updates_ * optim::UpdateChunk::kArrays, kUpdateChunk);
}

std::uint64_t HostBuffers::update_elements(Bytes host_budget) const noexcept {
  return align_up(update_chunk(host_budget) / sizeof(float), pager::Sharding::kBlock);
}

Bytes HostBuffers::update_buffer_bytes(Bytes host_budget) const noexcept {
  return optim::UpdateChunk::buffer_bytes(update_elements(host_budget));
}

unsigned HostBuffers::update_buffers(Bytes host_budget) const noexcept {
  // At most an eighth of the budget, and never the reason that another buffer does not fit.
  const Bytes each = update_buffer_bytes(host_budget);
  const Bytes spare = host_budget - std::min(host_budget, needed(host_budget));
  const Bytes room = std::min(host_budget / 8 / each, least_updates_ + spare / each);
  return static_cast<unsigned>(std::clamp<Bytes>(room, least_updates_, most_updates_));
}

std::vector<HostNeed> HostBuffers::needs(Bytes host_budget) const {
  std::vector<HostNeed> out;
  const auto add = [&](std::string purpose, Bytes bytes) {
    if (bytes > 0) out.push_back({std::move(purpose), bytes});
  };
  add(fmt::format("{} buffers of {}", staging_buffers_,
                  of_size("staging", staging(host_budget), staging_ == 0)),
      staging_buffers_ * staging(host_budget));
  add("gradients that wait on disk", parking_);
  if (!updates_in_place_) {
    const Bytes each = update_buffer_bytes(host_budget);
    add(fmt::format("{} update buffers of {} ({}, five arrays)", least_updates_, format_bytes(each),
                    of_size("update_chunk", update_chunk(host_budget), update_chunk_ == 0)),
        least_updates_ * each);
  }
  add("buffers of the swap files", swap_);
  add("activation_reserve", activation_reserve_);
  return out;
}

Bytes HostBuffers::needed(Bytes host_budget) const noexcept {
  return staging_buffers_ * staging(host_budget) + parking_ + swap_ + activation_reserve_ +
         (updates_in_place_ ? 0 : least_updates_ * update_buffer_bytes(host_budget));
}

Bytes HostBuffers::bytes(Bytes host_budget) const noexcept {
  if (updates_in_place_) return needed(host_budget);
  return needed(host_budget) +
         (update_buffers(host_budget) - least_updates_) * update_buffer_bytes(host_budget);
}

Bytes HostBuffers::least() const noexcept {
  // What they need rises with the budget: the first that has room for it.
  Bytes out = 0;
  while (out < needed(out)) out = parse_bytes(format_bytes_up(needed(out)));
  return out;
}

Bytes HostBuffers::least_budget(Bytes host_budget, Bytes more) const noexcept {
  const Bytes beside = host_budget - std::min(host_budget, bytes(host_budget)) + more;
  Bytes out = host_budget + more;
  while (out < beside + bytes(out)) out = beside + bytes(out);
  return out;
}

void check_host_budget(const Config& config, device::DeviceKind kind, int ranks) {
  if (config.host_budget == 0) return;
  const HostBuffers buffers(config, kind, ranks);
  std::vector<HostNeed> needs = buffers.needs(config.host_budget);
  std::ranges::stable_sort(needs, std::ranges::greater{}, &HostNeed::bytes);
  Bytes sum = 0;
  std::string list;
  for (const HostNeed& need : needs) {
    sum += need.bytes;
    list += fmt::format("{}{} for {}", list.empty() ? "" : ", ", format_bytes(need.bytes),
                        need.purpose);
  }
  if (sum <= config.host_budget) return;
  throw UserError(
      fmt::format("host_budget = {} is less than the engine's own buffers take: raise host_budget "
                  "to at least {}, and more for what a model has there ({})",
                  config.get("host_budget"), format_bytes(buffers.least()), list));
}

}  // namespace pagoda::engine
