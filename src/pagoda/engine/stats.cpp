// SPDX-License-Identifier: Apache-2.0
#include "pagoda/engine/stats.h"

#include <algorithm>

#include <fmt/format.h>

#include "pagoda/engine/backend.h"

namespace pagoda::engine {
namespace {

double milliseconds(Nanos nanos) {
  return static_cast<double>(nanos) * 1e-6;
}

void line(std::string& out, std::string_view name, std::string_view value) {
  out += fmt::format("  {:<28} {}\n", name, value);
}

}  // namespace

Bytes Stats::held(pager::Tier tier, std::string_view tag) const noexcept {
  for (const BudgetHolder& holder : tiers[static_cast<std::size_t>(tier)].holders) {
    if (holder.tag == tag) return holder.bytes;
  }
  return 0;
}

double Stats::hidden_updates() const noexcept {
  const Nanos total = updates.busy + updates.waited_io;
  if (total <= 0) return 1;
  return std::clamp(1 - static_cast<double>(pager.update_stall) / static_cast<double>(total), 0.0,
                    1.0);
}

std::string Stats::table() const {
  std::string out = fmt::format("steps {} ({} skipped)\n", steps, skipped_steps);
  out += "pages\n";
  line(out, "touches", fmt::format("{}", pager.touches));
  line(out, "faults",
       fmt::format("{}, stalled {:.1f} ms", pager.faults, milliseconds(pager.fault_stall)));
  line(out, "prefetch hits",
       fmt::format("{} ({:.2f} %)", pager.prefetch_hits, 100 * pager.hit_rate()));
  line(out, "late prefetches",
       fmt::format("{}, stalled {:.1f} ms", pager.late_prefetches, milliseconds(pager.late_stall)));
  line(out, "in-place embedding lookups", fmt::format("{}", pager.lookups));
  line(
      out, "evictions",
      fmt::format("{}, {} wasted prefetches among them", pager.evictions, pager.wasted_prefetches));
  line(out, "NVMe → host (nc)", format_bytes(pager.nvme_to_host + updates.nvme_read));
  line(out, "host → device (cg)", format_bytes(pager.host_to_device));
  line(out, "ranks → device (gg)", format_bytes(pager.gathered));
  line(out, "device → host", format_bytes(pager.device_to_host + gradients.device_to_host));
  line(out, "host → NVMe", format_bytes(pager.host_to_nvme + updates.nvme_written));
  line(out, "gradients to other ranks", format_bytes(gradients.exchanged));
  out += "updates\n";
  line(out, "elements", fmt::format("{}", updates.elements));
  line(out, "pages",
       fmt::format("{}, {} of them started during backward, {} rolled back", updates.pages,
                   updates.early, updates.rolled_back));
  line(out, "time",
       fmt::format("{:.1f} ms in kernels, {:.1f} ms waiting for state", milliseconds(updates.busy),
                   milliseconds(updates.waited_io)));
  line(out, "operators stalled",
       fmt::format("{:.1f} ms ({:.0f} % hidden)", milliseconds(pager.update_stall),
                   100 * hidden_updates()));
  out += fmt::format("{:<10}{:>12}{:>12}{:>12}\n", "tier", "now", "peak", "budget");
  for (std::size_t i = 0; i < tiers.size(); ++i) {
    const TierStats& tier = tiers[i];
    out += fmt::format("{:<10}{:>12}{:>12}{:>12}\n", pager::name(static_cast<pager::Tier>(i)),
                       format_bytes(tier.used), format_bytes(tier.peak),
                       tier.limit < kNoLimit ? format_bytes(tier.limit) : "no limit");
    for (const BudgetHolder& holder : tier.holders) {
      out += fmt::format("  {:<18}{:>12}{:>12}\n", holder.tag, format_bytes(holder.bytes),
                         format_bytes(holder.peak));
    }
  }
  out += "not budgeted\n";
  line(out, "buffers of a process group", format_bytes(unbudgeted.group_buffers));
  line(out, "cached blocks", format_bytes(unbudgeted.free_blocks));
  line(out, "freed heap", format_bytes(unbudgeted.free_heap));
  return out;
}

}  // namespace pagoda::engine
