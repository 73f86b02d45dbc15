// SPDX-License-Identifier: Apache-2.0
#include "report.h"

#include <algorithm>
#include <bit>
#include <numeric>

#include <fmt/format.h>

#include "pace.h"
#include "pagoda/pager/tier.h"

namespace tiny_gpt {
namespace {

using pagoda::format_bytes;
using pagoda::Nanos;

double seconds(Nanos nanos) {
  return static_cast<double>(nanos) * 1e-9;
}

double millions(std::int64_t count) {
  return static_cast<double>(count) * 1e-6;
}

/// As a share of `of`, in percent; all of nothing is 100.
double percent(double part, double of) {
  return of <= 0 ? 100 : 100 * std::clamp(part / of, 0.0, 1.0);
}

/// With a line break before each word that would pass the last column, and one at the end.
std::string wrapped(const std::string& text) {
  constexpr std::size_t kColumns = 79;
  std::string out;
  std::size_t column = 0;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find(' ', begin), text.size());
    const std::size_t letters = end - begin;
    if (column > 0) {
      const bool fits = column + 1 + letters <= kColumns;
      out += fits ? ' ' : '\n';
      column = fits ? column + 1 : 0;
    }
    out += text.substr(begin, letters);
    column += letters;
    begin = end + 1;
  }
  return out + "\n";
}

double mean(std::vector<float>::const_iterator begin, std::vector<float>::const_iterator end) {
  return std::accumulate(begin, end, 0.0) / static_cast<double>(end - begin);
}

}  // namespace

std::string opening(const Flags& flags, std::int64_t parameters, const Text& text) {
  const auto bytes = static_cast<pagoda::Bytes>(parameters) * sizeof(float);
  return wrapped(fmt::format(
      "A GPT of {:.1f} M parameters ({}; {} with gradients and optimizer state), all of it on disk "
      "in "
      "'{}', learns {} of text from {} files with {} of device memory.",
      millions(parameters), format_bytes(bytes), format_bytes(4 * bytes), flags.directory.string(),
      format_bytes(text.bytes().size()), text.files(), format_bytes(flags.device_budget)));
}

std::string where_bytes_lived(const pagoda::engine::Stats& stats, std::int64_t parameters) {
  std::string out = fmt::format("\n{:<30}{:>12}{:>20}\n", "Where each byte lived", "at most",
                                "bytes a parameter");
  for (std::size_t i = 0; i < stats.tiers.size(); ++i) {
    const auto row = [&](std::string_view name, pagoda::Bytes bytes) {
      out += fmt::format("  {:<28}{:>12}{:>20.2f}\n", name, format_bytes(bytes),
                         static_cast<double>(bytes) / static_cast<double>(parameters));
    };
    const auto& tier = stats.tiers[i];
    row(pagoda::pager::name(static_cast<pagoda::pager::Tier>(i)), tier.peak);
    for (const pagoda::BudgetHolder& holder : tier.holders) {
      if (holder.peak > 0) row("  " + holder.tag, holder.peak);
    }
  }
  return out;
}

std::string what_overlapped(const pagoda::engine::Stats& stats, double in_step) {
  const auto& pager = stats.pager;
  std::string out = "\nWhat went on while operators ran\n";
  const auto row = [&](std::string_view name, const std::string& value) {
    out += fmt::format("  {:<30}{}\n", name, value);
  };
  const double fetching = seconds(pager.fetch_busy);
  const double waited = seconds(pager.fault_stall + pager.late_stall);
  row("pages fetched ahead", fmt::format("{} of {} ({:.2f} %), {} of them late",  //
                                         pager.prefetch_hits + pager.late_prefetches,
                                         pager.prefetch_hits + pager.late_prefetches + pager.faults,
                                         100 * pager.hit_rate(), pager.late_prefetches));
  row("fetches", fmt::format("{:.1f} s, of which operators waited for {:.1f} s: {:.0f} % hidden",
                             fetching, waited, percent(fetching - waited, fetching)));
  const double updating = seconds(stats.updates.busy + stats.updates.waited_io);
  row("updates", fmt::format("{:.1f} s, of which operators waited for {:.1f} s: {:.0f} % hidden",
                             updating, seconds(pager.update_stall), 100 * stats.hidden_updates()));
  row("gradients", fmt::format("{} handed over, for which backward waited {:.1f} s",
                               stats.gradients.contributions, seconds(stats.gradients.push_stall)));
  row("in step(), nothing computed", fmt::format("{:.1f} s", in_step));
  row("from disk, to disk",
      fmt::format("{}, {}", format_bytes(pager.nvme_to_host + stats.updates.nvme_read),
                  format_bytes(pager.host_to_nvme + stats.updates.nvme_written)));
  return out;
}

bool same_bits(const std::vector<float>& paged, const std::vector<float>& resident) {
  return std::equal(resident.begin(), resident.end(), paged.begin(), [](float a, float b) {
    return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
  });
}

std::string comparison(const std::vector<float>& paged, const std::vector<float>& resident) {
  std::string out = fmt::format("  {:<6}{:>14}{:>12}{:>14}{:>12}\n", "step", "loss, on disk",
                                "bits", "in memory", "bits");
  for (std::size_t i = 0; i < resident.size(); ++i) {
    out += fmt::format("  {:<6}{:>14.6f}{:>12x}{:>14.6f}{:>12x}  {}\n", i + 1, paged[i],
                       std::bit_cast<std::uint32_t>(paged[i]), resident[i],
                       std::bit_cast<std::uint32_t>(resident[i]),
                       same_bits({paged[i]}, {resident[i]}) ? "equal" : "DIFFERENT");
  }
  return out;
}

std::string closing(const pagoda::engine::Stats& stats, std::int64_t parameters,
                    const std::vector<float>& losses, std::int64_t compared) {
  const double bytes = 4.0 * static_cast<double>(parameters);
  const auto device = static_cast<double>(stats.tiers[0].limit);
  const auto some = static_cast<std::ptrdiff_t>(std::clamp<std::size_t>(losses.size() / 4, 1, 10));
  const std::string equal = fmt::format(
      ", and the first {} of them gave exactly the same numbers, bit for bit, as with everything "
      "in "
      "memory",
      compared);
  return "\n" +
         wrapped(fmt::format(
             "The model's parameters are {:.1f} times as large as the device memory it was given, "
             "and "
             "{:.0f} times with all that training adds, so Pagoda kept everything on disk and "
             "brought "
             "each piece in shortly before it was used. The model learnt all the same: its error "
             "fell "
             "from {:.2f} to {:.2f} in {} steps{}. Its own code (examples/tiny_gpt/gpt.cpp) knows "
             "nothing of this: it is what one writes for a machine that has enough memory.",
             bytes / device, 4 * bytes / device, mean(losses.begin(), losses.begin() + some),
             mean(losses.end() - some, losses.end()), losses.size(), compared > 0 ? equal : ""));
}

}  // namespace tiny_gpt
