// SPDX-License-Identifier: Apache-2.0
#include "pagoda/engine/backend.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <system_error>

#include <sys/stat.h>
#include <sys/statvfs.h>

#include "pagoda/base/error.h"
#include "pagoda/base/memory_limit.h"
#include "pagoda/device/cuda/cuda_device.h"
#include "pagoda/device/emulated/emulated_device.h"
#include "pagoda/device/host/host_device.h"
#include "pagoda/device/ordering_checker.h"
#include "pagoda/engine/host_buffers.h"
#include "pagoda/io/swap_file.h"
#include "pagoda/plan/host_margin.h"

namespace pagoda::engine {
namespace {

// Gradients on their way take this share of the device budget, unless it is set.
constexpr Bytes kGradientShare = 8;

std::shared_ptr<device::OrderingChecker> checker(const Config& config) {
  if (!config.check_order) return device::OrderingChecker::from_environment();
  return std::make_shared<device::OrderingChecker>();
}

/// What the directories' file systems have, each of them once.
struct FileSystem {
  Bytes free = 0;
  Bytes directories = 0;  // on it
};

std::map<dev_t, FileSystem> file_systems(const std::vector<std::string>& directories) {
  std::map<dev_t, FileSystem> out;
  for (const std::string& directory : directories) {
    struct stat info {};
    struct statvfs disk {};
    const bool there = ::stat(directory.c_str(), &info) == 0;
    if (!there || ::statvfs(directory.c_str(), &disk) != 0) {
      throw UserError(fmt::format("nvme = '{}' cannot be used: {}: {}name another directory",
                                  directory, std::generic_category().message(errno),
                                  errno == ENOENT ? "create it, or " : ""));
    }
    if (!S_ISDIR(info.st_mode)) {
      throw UserError(
          fmt::format("nvme = '{}' cannot be used: it is not a directory; name one", directory));
    }
    FileSystem& system = out[info.st_dev];
    system.free = static_cast<Bytes>(disk.f_bavail) * disk.f_frsize;
    ++system.directories;
  }
  return out;
}

/// Half of what is free, shared by the ranks of this machine. Every directory gets a file of the
/// same size, so the file system with the least for each of its directories decides, or the limit
/// on files of this process.
Bytes default_nvme_budget(const std::vector<std::string>& directories, int ranks_here) {
  Bytes each = io::file_size_limit().value_or(std::numeric_limits<Bytes>::max());
  for (const auto& [id, system] : file_systems(directories)) {
    each = std::min(each, system.free / 2 / system.directories / static_cast<Bytes>(ranks_here));
  }
  const Bytes sum = each * directories.size();
  return sum - sum % pager::Tiers::kNvmeBlock;
}

/// What is available now, less a margin: to all ranks of this machine, which share it, and to this
/// process. At least `own` buffers: where there is no memory for these, the system says so.
Bytes default_host_budget(Bytes own, int ranks_here) {
  const auto less_margin = [](Bytes left) { return left - plan::host_margin(left); };
  Bytes out = less_margin(available_to_all()) / static_cast<Bytes>(ranks_here);
  if (const auto limit = tightest_memory_limit()) out = std::min(out, less_margin(limit->left()));
  return std::max(own, out);
}

Bytes nvme_capacity(const Config& config, int ranks_here) {
  const Bytes most = default_nvme_budget(config.nvme, ranks_here);  // also looks at each of them
  const Bytes capacity =
      config.nvme_budget == 0 ? most : align_down(config.nvme_budget, pager::Tiers::kNvmeBlock);
  if (capacity > 0) return capacity;
  if (config.nvme_budget != 0) {
    throw UserError(
        fmt::format("nvme_budget = {} is less than one block of a file: raise "
                    "nvme_budget to at least {}",
                    config.get("nvme_budget"), format_bytes(pager::Tiers::kNvmeBlock)));
  }
  throw UserError(
      fmt::format("nvme = '{}' has no room for files: make some, or name other directories",
                  config.get("nvme")));
}

}  // namespace

std::shared_ptr<device::Device> make_device(const Config& config) {
  if (config.device == "emulated") {
    device::emulated::Options options;
    if (config.emulated != nullptr) options = *config.emulated;
    if (config.emulated == nullptr || config.check_order) options.checker = checker(config);
    return device::emulated::make_device(options);
  }
  if (config.device == "cpu" || (config.device == "auto" && device::cuda::device_count() == 0)) {
    return device::host::make_device({.checker = checker(config)});
  }
  device::cuda::Options options;
  options.checker = checker(config);
  if (const auto colon = config.device.find(':'); colon != std::string::npos) {
    options.index = std::stoi(config.device.substr(colon + 1));
  }
  try {
    return device::cuda::make_device(options);
  } catch (const UserError& error) {
    throw UserError(fmt::format("device = '{}' cannot be used: {}; set device to cpu, or to auto",
                                config.device, error.message()));
  }
}

pager::Placement pager_placement(Placement placement) {
  switch (placement) {
    case Placement::Auto:
      return pager::Placement::Auto;
    case Placement::Device:
      return pager::Placement::Device;
    case Placement::Host:
      return pager::Placement::Host;
    case Placement::Nvme:
      return pager::Placement::Nvme;
  }
  return pager::Placement::Auto;
}

EarlyUpdates::Mode early_mode(const Config& config) noexcept {
  using Mode = EarlyUpdates::Mode;
  if (!config.early_updates || config.scales_loss()) return Mode::Never;
  if (!config.clips()) return Mode::Final;
  return config.clip_ahead ? Mode::Reversible : Mode::Never;
}

int ranks_here(int ranks) {
  const char* text = std::getenv("LOCAL_WORLD_SIZE");
  int here = 0;
  if (text == nullptr) return ranks;
  const char* const end = text + std::strlen(text);
  const auto parsed = std::from_chars(text, end, here);
  const bool number = parsed.ec == std::errc() && parsed.ptr == end;
  return number && here >= 1 && here <= ranks ? here : ranks;
}

pager::Tiers::Options tiers_options(const Config& config,
                                    const std::shared_ptr<device::Device>& device, int ranks) {
  pager::Tiers::Options options;
  options.device = device;
  options.device_budget =
      config.device_budget != 0 ? config.device_budget : device->memory_info().free / 2;
  options.gradient_share = config.gradient_staging != 0 ? 0 : kGradientShare;
  options.gradient_staging = config.gradient_staging != 0 ? config.gradient_staging
                                                          : options.device_budget / kGradientShare;
  const Bytes least = options.gradient_staging + pager::Tiers::kDeviceBlock;
  if (options.device_budget < least) {
    const auto limit = tightest_memory_limit();
    if (config.device_budget == 0 && device->kind() == device::DeviceKind::Host && limit &&
        limit->left() / 2 < least) {
      throw UserError(fmt::format("there is no room for device_budget: {}; raise the limit",
                                  limit->describe()));
    }
    const bool set = config.gradient_staging != 0;
    throw UserError(fmt::format(
        "device_budget = {}{} has no room for pages{}: raise device_budget to at least {}{}",
        format_bytes(options.device_budget),
        config.device_budget == 0 ? " (half of what is free)" : "",
        set ? fmt::format(" beside the {} of gradient_staging",
                          format_bytes(options.gradient_staging))
            : "",
        format_bytes_up(pager::Tiers::least_device_budget(options, 1)),
        set ? ", or lower gradient_staging" : ""));
  }
  options.host_budget = config.host_budget;
  if (config.host_budget == 0) {
    Config without_reserve = config;
    without_reserve.activation_reserve = 0;
    const HostBuffers own(without_reserve, device->kind(), ranks);
    options.host_budget = default_host_budget(own.least(), ranks_here(ranks));
    options.host_budget_derived = true;
  }
  for (const std::string& directory : config.nvme) options.swap.directories.emplace_back(directory);
  if (!config.nvme.empty()) options.swap.capacity = nvme_capacity(config, ranks_here(ranks));
  options.swap.checksums = config.checksums;
  options.swap.direct = config.direct;
  options.swap.engine = config.io_engine;
  options.swap.faults = config.faults;
  return options;
}

std::unique_ptr<pager::Tiers> make_tiers(const Config& config,
                                         const std::shared_ptr<device::Device>& device, int ranks) {
  check_host_budget(config, device->kind(), ranks);
  return std::make_unique<pager::Tiers>(tiers_options(config, device, ranks));
}

}  // namespace pagoda::engine
