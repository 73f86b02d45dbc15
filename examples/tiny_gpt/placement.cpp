// SPDX-License-Identifier: Apache-2.0
#include "placement.h"

namespace tiny_gpt {

using namespace pagoda::literals;

pagoda::Config paged(const Flags& flags) {
  pagoda::Config config;
  config.device = flags.device;
  config.device_budget = flags.device_budget;
  config.host_budget = flags.host_budget;
  config.nvme = {flags.directory.string()};
  config.nvme_budget = flags.disk_budget;
  config.parameters = config.gradients = config.optimizer_state = pagoda::Placement::Nvme;
  // Small buffers for a small model: what is on its way shall be little beside what lies on disk.
  config.fetch_threads = 2;
  config.staging = 1_MiB;
  config.update_chunk = 512_KiB;
  config.bucket = 1_MiB;
  return config;
}

pagoda::Config resident(const Flags& flags) {
  pagoda::Config config;
  config.device = flags.device;
  config.device_budget = 256_MiB;
  config.parameters = pagoda::Placement::Device;
  config.gradients = config.optimizer_state = pagoda::Placement::Host;
  config.prefetch = false;
  return config;
}

}  // namespace tiny_gpt
