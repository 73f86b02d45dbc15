// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "pagoda/base/bytes.h"
namespace pagoda::io {
class FaultPlan;
}
namespace pagoda {
struct Config {
  std::string device = "auto";
  Bytes device_budget = 0, gradient_staging = 0, host_budget = 0, nvme_budget = 0;
  std::vector<std::string> nvme;
  std::string parameters = "auto", gradients = "auto", optimizer = "auto";
  std::uint64_t zero = 3, accumulation = 1;
  std::string gradient_dtype = "parameter", reduction = "mean";
  double clip = 0;
  std::string loss_scale = "none";
  double loss_scale_initial = 65536;
  std::uint64_t loss_scale_window = 2000;
  std::string master = "whole", moments = "fp32";
  bool checksums = true;
  std::string io_engine = "auto", direct = "auto";
  std::uint64_t update_threads = 0, fetch_threads = 4, update_chunk = 1 << 20, update_buffers = 4;
  Bytes bucket = 32_MiB, staging = 4_MiB;
  double timeout = 60, heartbeat = 1;
  bool check_order = false, prefetch = true;
  std::uint64_t seed = 0;
  std::shared_ptr<io::FaultPlan> faults;
  void validate() const {}
};
}  // namespace pagoda
