// SPDX-License-Identifier: Apache-2.0
#include "pagoda/engine/backend.h"

#include <algorithm>
#include <filesystem>
#include <string>

#include "pagoda/base/error.h"
#include "pagoda/device/cuda/cuda_device.h"
#include "pagoda/device/emulated/emulated_device.h"
#include "pagoda/device/host/host_device.h"
#include "pagoda/device/ordering_checker.h"

namespace pagoda::engine {
namespace {

// Gradients on their way take this share of the device budget, unless it is set.
constexpr Bytes kGradientShare = 8;

std::shared_ptr<device::OrderingChecker> checker(const Config& config) {
  if (!config.check_order) return device::OrderingChecker::from_environment();
  return std::make_shared<device::OrderingChecker>();
}

Bytes free_space(const std::vector<std::string>& directories) {
  Bytes sum = 0;
  for (const std::string& directory : directories) {
    std::error_code error;
    const auto space = std::filesystem::space(directory, error);
    PAGODA_REQUIRE(!error, "the swap directory '{}' cannot be used: {}", directory,
                   error.message());
    sum += space.available;
  }
  return sum;
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
  return device::cuda::make_device(options);
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

pager::Tiers::Options tiers_options(const Config& config,
                                    const std::shared_ptr<device::Device>& device) {
  pager::Tiers::Options options;
  options.device = device;
  options.device_budget =
      config.device_budget != 0 ? config.device_budget : device->memory_info().free / 2;
  options.gradient_staging = config.gradient_staging != 0 ? config.gradient_staging
                                                          : options.device_budget / kGradientShare;
  PAGODA_REQUIRE_LT(options.gradient_staging, options.device_budget,
                    "gradient_staging leaves nothing of device_budget for pages");
  options.host_budget = config.host_budget != 0 ? config.host_budget : kNoLimit;
  for (const std::string& directory : config.nvme) options.swap.directories.emplace_back(directory);
  if (!config.nvme.empty()) {
    options.swap.capacity =
        config.nvme_budget != 0 ? config.nvme_budget : free_space(config.nvme) / 2;
    options.swap.capacity -= options.swap.capacity % pager::Tiers::kNvmeBlock;
  }
  options.swap.checksums = config.checksums;
  options.swap.direct = config.direct;
  options.swap.engine = config.io_engine;
  options.swap.faults = config.faults;
  return options;
}

}  // namespace pagoda::engine
