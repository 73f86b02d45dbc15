// SPDX-License-Identifier: Apache-2.0
#include "pagoda/engine/fit.h"

#include <algorithm>
#include <numeric>
#include <optional>

#include <fmt/format.h>

#include "pagoda/base/error.h"
#include "pagoda/engine/backend.h"

namespace pagoda::engine {

using pager::Tier;
using pager::Tiers;

namespace {

/// The value that a message asks for when it says "at least" so many bytes: rounded up.
Bytes as_printed(Bytes bytes) {
  return parse_bytes(format_bytes_up(bytes));
}

}  // namespace

Bytes StateNeed::bytes() const noexcept {
  return std::accumulate(pages.begin(), pages.end(), Bytes{0});
}

Bytes StateNeed::device_bytes() const noexcept {
  return std::accumulate(pages.begin(), pages.end(), Bytes{0},
                         [](Bytes sum, Bytes page) { return sum + Tiers::device_bytes(page); });
}

Fit::Fit(const Tiers& tiers, const HostBuffers& own)
    : tiers_(tiers),
      own_(own),
      device_(tiers.arena().stats().capacity),
      host_{tiers.budget(Tier::Host).limit(), tiers.budget(Tier::Host).available()},
      nvme_{tiers.budget(Tier::Nvme).limit(), tiers.budget(Tier::Nvme).available()} {}

void Fit::hold(const pager::Home& home) {
  if (home.tier() == Tier::Host) host_.free += home.size();
  if (home.tier() != Tier::Nvme) return;
  nvme_.free += Tiers::nvme_bytes(home.size());
  host_.free += tiers_.checksum_bytes(home.size());
}

void Fit::need_page(std::string_view name, Bytes bytes) {
  if (bytes > largest_page_.bytes) largest_page_ = {std::string(name), bytes};
}

bool Fit::parameters_fit_on_device() const noexcept {
  Bytes sum = parameters.device_bytes();
  for (const StateNeed* state : {&gradients, &optimizer}) {
    if (state->placement == pager::Placement::Device) sum += state->device_bytes();
  }
  return sum <= device_;
}

std::vector<const StateNeed*> Fit::states() const {
  return {&parameters, &gradients, &optimizer, &waiting};
}

std::string Fit::list() const {
  std::string out;
  for (const StateNeed* state : states()) {
    if (state->pages.empty()) continue;
    out += fmt::format("{}{} {} ({})", out.empty() ? "" : ", ", state->state,
                       format_bytes(state->bytes()), pager::name(state->placement));
  }
  if (buffers_ > 0) out += fmt::format(", buffers for gradients {} (host)", format_bytes(buffers_));
  return out;
}

void Fit::check_device() const {
  const Tiers::Options& options = tiers_.options();
  const auto enough = [&](Bytes pages) {
    return format_bytes_up(Tiers::least_device_budget(options, pages));
  };
  Bytes placed = 0;
  for (const StateNeed* state : states()) {
    if (state->placement == pager::Placement::Device) placed += state->device_bytes();
  }
  // Operators need their pages there, whatever else is.
  const bool all_there = parameters.placement == pager::Placement::Device && whole_parameters;
  const Bytes page =
      all_there || largest_page_.bytes == 0 ? 0 : Tiers::device_bytes(largest_page_.bytes);
  if (placed + page <= device_) return;
  if (placed == 0) {
    throw UserError(
        fmt::format("the parameter '{}' takes {}, and device_budget = {} has {} for pages: "
                    "raise device_budget to at least {}",
                    largest_page_.name, format_bytes(largest_page_.bytes),
                    format_bytes(options.device_budget), format_bytes(device_), enough(page)));
  }
  throw UserError(fmt::format(
      "{} states do not fit on the device: {}; in blocks of {} B they take {} there{}, and "
      "device_budget = {} has {} for pages: raise device_budget to at least {}, or place some of "
      "them on the host",
      whose, list(), Tiers::kDeviceBlock, format_bytes(placed),
      page == 0 ? ""
                : fmt::format(" and the parameter '{}' {}", largest_page_.name, format_bytes(page)),
      format_bytes(options.device_budget), format_bytes(device_), enough(placed + page)));
}

Fit::Missing Fit::fill(Bytes host_budget, Bytes nvme_budget) const {
  const bool has_nvme = tiers_.swaps();
  Missing missing;
  Bytes host = host_.free + (host_budget - host_.limit);
  Bytes nvme = nvme_.free + (nvme_budget - nvme_.limit);
  const auto take = [](Bytes& free, Bytes bytes, Bytes& lacks) {
    lacks += bytes - std::min(free, bytes);
    free -= std::min(free, bytes);
  };
  const auto put = [&](pager::Placement placement, Bytes bytes) {
    if (placement == pager::Placement::Device) return;
    const Bytes kept = has_nvme ? tiers_.kept_for_checksums(nvme, host_budget) : 0;
    if (placement != pager::Placement::Nvme && (bytes + kept <= host || !has_nvme)) {
      take(host, bytes, missing.host);
      return;
    }
    take(nvme, Tiers::nvme_bytes(bytes), missing.nvme);
    take(host, tiers_.checksum_bytes(bytes), missing.host);
  };
  const Bytes own = own_.bytes(host_budget);
  take(host, own - std::min(own, own_.bytes(host_.limit)), missing.host);
  take(host, buffers_, missing.host);
  for (const Bytes page : parameters.pages) put(parameters.placement, page);
  for (std::size_t i = 0; i < gradients.pages.size(); ++i) {  // as attach() takes them
    put(gradients.placement, gradients.pages[i]);
    put(optimizer.placement, optimizer.pages[i]);
  }
  for (const Bytes page : waiting.pages) put(waiting.placement, page);
  return missing;
}

std::optional<Bytes> Fit::least_host_budget(Bytes nvme_budget) const {
  // What a larger host takes over is not cut as what was missing: until all fits.
  constexpr int kAttempts = 64;
  Bytes too_small = host_.limit;
  Bytes enough = host_.limit;
  Missing missing = fill(enough, nvme_budget);
  if (missing.none()) return enough;
  for (int i = 0; i < kAttempts && !missing.none(); ++i) {
    too_small = enough;
    enough = as_printed(own_.least_budget(enough, missing.host + missing.nvme));
    missing = fill(enough, nvme_budget);
  }
  if (!missing.none()) return std::nullopt;
  // That may be too much: what was missing on NVMe was counted in whole blocks.
  while (enough - too_small > 1) {
    const Bytes middle = too_small + (enough - too_small) / 2;
    (fill(as_printed(middle), nvme_budget).none() ? enough : too_small) = middle;
  }
  return as_printed(enough);
}

void Fit::check() const {
  check_device();
  const Missing missing = fill(host_.limit, nvme_.limit);
  if (missing.none()) return;
  const bool derived = tiers_.options().host_budget_derived;
  const auto room = [](std::string_view key, const Room& tier, std::string_view why) {
    return tier.limit >= kNoLimit
               ? fmt::format("{} is not set", key)
               : fmt::format("{} = {}{} has {} for them", key, format_bytes(tier.limit), why,
                             format_bytes(tier.free));
  };
  const auto host_of = [](Bytes budget) {
    return fmt::format("host_budget to at least {}", format_bytes_up(budget));
  };
  std::vector<std::string> has = {
      room("host_budget", host_, derived ? " (what was available to a rank, less a margin)" : "")};
  if (tiers_.swaps()) has.push_back(room("nvme_budget", nvme_, ""));
  std::vector<std::string> help;
  const std::optional<Bytes> host_alone = least_host_budget(nvme_.limit);
  if (missing.nvme > 0) {
    const Bytes nvme = as_printed(nvme_.limit + missing.nvme);
    const Bytes host = least_host_budget(align_down(nvme, Tiers::kNvmeBlock)).value_or(host_.limit);
    help.push_back(fmt::format("raise nvme_budget to at least {}{}", format_bytes_up(nvme),
                               host > host_.limit ? " and " + host_of(host) : ""));
  }
  if (host_alone) help.push_back((derived ? "set " : "raise ") + host_of(*host_alone));
  if (!tiers_.swaps()) help.emplace_back("set nvme to a directory");
  throw UserError(fmt::format("{} states do not fit: {}; {}: {}", whose, list(),
                              fmt::join(has, ", "), fmt::join(help, " or ")));
}

}  // namespace pagoda::engine
