// SPDX-License-Identifier: Apache-2.0
#include "pagoda/engine/host_need.h"

#include <algorithm>

#include <fmt/format.h>

#include "pagoda/base/error.h"
#include "pagoda/engine/reducer.h"
#include "pagoda/engine/shard_exchange.h"
#include "pagoda/io/swap_options.h"
#include "pagoda/optim/update_chunk.h"
#include "pagoda/optim/updater.h"
#include "pagoda/pager/pager.h"

namespace pagoda::engine {
namespace {

Bytes update_buffer_bytes(const Config& config) {
  return optim::UpdateChunk::buffer_bytes(
      align_up(config.update_chunk / sizeof(float), pager::Sharding::kBlock));
}

unsigned least_update_buffers(const Config& config) {
  return std::min(config.update_buffers, optim::Updater::kLeastBuffers);
}

/// Whether every state lies where the host may update it.
bool updates_in_place(const Config& config, device::DeviceKind kind) {
  return kind != device::DeviceKind::Cuda && config.nvme.empty();
}

}  // namespace

std::vector<HostNeed> host_needs(const Config& config, device::DeviceKind kind, int ranks) {
  std::vector<HostNeed> out;
  const auto add = [&](std::string purpose, Bytes bytes) {
    if (bytes > 0) out.push_back({std::move(purpose), bytes});
  };
  Bytes buffers = pager::Pager::staging_buffers(kind, config.fetch_threads) + 1;  // for gradients
  if (ranks > 1 && ShardExchange::needs_buffers(kind, !config.nvme.empty())) {
    buffers += ShardExchange::staging_buffers(config.zero == 1 || config.zero == 2);
  }
  add(fmt::format("{} buffers of staging = {}", buffers, format_bytes(config.staging)),
      buffers * config.staging);
  add("gradients that wait on disk", Reducer::parking_bytes(kind, ranks));
  if (!updates_in_place(config, kind)) {
    const Bytes chunk = update_buffer_bytes(config);
    const unsigned least = least_update_buffers(config);
    add(fmt::format("{} update buffers of {} (update_chunk = {}, five arrays)", least,
                    format_bytes(chunk), format_bytes(config.update_chunk)),
        least * chunk);
  }
  if (!config.nvme.empty()) {
    const io::SwapOptions swap;
    add("buffers of the swap files", swap.bounce_buffers * swap.io_bytes);
  }
  add("activation_reserve", config.activation_reserve);
  return out;
}

UpdateBuffers::UpdateBuffers(const Config& config, device::DeviceKind kind, int ranks)
    : each_(update_buffer_bytes(config)),
      take_memory_(!updates_in_place(config, kind)),
      least_(least_update_buffers(config)),
      most_(config.update_buffers) {
  for (const HostNeed& need : host_needs(config, kind, ranks)) needs_ += need.bytes;
}

unsigned UpdateBuffers::count(Bytes host_budget) const noexcept {
  // At most an eighth of the budget, and never the reason that another buffer does not fit.
  const Bytes spare = host_budget - std::min(host_budget, needs_);
  const Bytes room = std::min(host_budget / 8 / each_, least_ + spare / each_);
  return static_cast<unsigned>(std::clamp<Bytes>(room, least_, most_));
}

Bytes UpdateBuffers::bytes(Bytes host_budget) const noexcept {
  return take_memory_ ? count(host_budget) * each_ : 0;
}

Bytes UpdateBuffers::least_budget(Bytes host_budget, Bytes more) const noexcept {
  const Bytes beside = host_budget - bytes(host_budget) + more;
  Bytes out = host_budget + more;
  while (out < beside + bytes(out)) out = beside + bytes(out);
  return out;
}

void check_host_budget(const Config& config, device::DeviceKind kind, int ranks) {
  if (config.host_budget == 0) return;
  std::vector<HostNeed> needs = host_needs(config, kind, ranks);
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
                  config.get("host_budget"), format_bytes_up(sum), list));
}

}  // namespace pagoda::engine
