// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/stats_counts.h"

#include <string>

namespace pagoda::torch {

Counts counts_of(const engine::Stats& stats) {
  Counts out;
  const auto put = [&](const std::string& name, auto value) {
    out.insert(name, static_cast<std::int64_t>(value));
  };
  put("steps", stats.steps);
  put("skipped_steps", stats.skipped_steps);
  put("pages.touches", stats.pager.touches);
  put("pages.faults", stats.pager.faults);
  put("pages.late_prefetches", stats.pager.late_prefetches);
  put("pages.prefetch_hits", stats.pager.prefetch_hits);
  put("pages.prefetches", stats.pager.prefetches);
  put("pages.wasted_prefetches", stats.pager.wasted_prefetches);
  put("pages.lookups", stats.pager.lookups);
  put("pages.evictions", stats.pager.evictions);
  put("pages.writebacks", stats.pager.writebacks);
  put("pages.fault_stall_ns", stats.pager.fault_stall);
  put("pages.late_stall_ns", stats.pager.late_stall);
  put("pages.update_stall_ns", stats.pager.update_stall);
  put("pages.device_bytes", stats.device_pages);
  put("pages.device_bytes_peak", stats.device_pages_peak);
  put("moved.nvme_to_host", stats.pager.nvme_to_host + stats.updates.nvme_read);
  put("moved.host_to_device", stats.pager.host_to_device);
  put("moved.gathered", stats.pager.gathered);
  put("moved.device_to_host", stats.pager.device_to_host + stats.gradients.device_to_host);
  put("moved.host_to_nvme", stats.pager.host_to_nvme + stats.updates.nvme_written);
  put("moved.pulled", stats.pulled);
  put("moved.served", stats.served);
  put("moved.gradients_exchanged", stats.gradients.exchanged);
  put("gradients.larger_than_staging", stats.gradients.large);
  put("gradients.stall_ns", stats.gradients.push_stall);
  put("updates.pages", stats.updates.pages);
  put("updates.early", stats.updates.early);
  put("updates.rolled_back", stats.updates.rolled_back);
  put("updates.elements", stats.updates.elements);
  put("updates.busy_ns", stats.updates.busy);
  put("updates.waited_io_ns", stats.updates.waited_io);
  for (std::size_t i = 0; i < stats.tiers.size(); ++i) {
    const engine::TierStats& tier = stats.tiers[i];
    const std::string name = fmt::format("tiers.{}", pager::name(static_cast<pager::Tier>(i)));
    put(name + ".budget", tier.limit);
    put(name + ".used", tier.used);
    put(name + ".peak", tier.peak);
    for (const BudgetHolder& holder : tier.holders) {
      put(fmt::format("{}.holders.{}.used", name, holder.tag), holder.bytes);
      put(fmt::format("{}.holders.{}.peak", name, holder.tag), holder.peak);
    }
  }
  put("unbudgeted.group_buffers", stats.unbudgeted.group_buffers);
  put("unbudgeted.free_blocks", stats.unbudgeted.free_blocks);
  put("unbudgeted.free_heap", stats.unbudgeted.free_heap);
  return out;
}

}  // namespace pagoda::torch
