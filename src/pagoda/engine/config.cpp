// SPDX-License-Identifier: Apache-2.0
#include "pagoda/engine/config.h"

#include <algorithm>
#include <set>

#include "pagoda/base/error.h"
#include "pagoda/engine/config_field.h"
#include "pagoda/optim/updater.h"

namespace pagoda {
namespace {

/// Nothing that lies on NVMe without a place for it, and nothing named for it that is not used.
void check_nvme(const Config& config) {
  const std::pair<const char*, Placement> states[] = {{"parameters", config.parameters},
                                                      {"gradients", config.gradients},
                                                      {"optimizer", config.optimizer}};
  for (const auto& [name, placement] : states) {
    if (placement == Placement::Nvme && config.nvme.empty()) {
      throw UserError(fmt::format(
          "{} = 'nvme' needs directories: set nvme to at least one, or {} to auto, device or host",
          name, name));
    }
  }
  if (config.nvme_budget != 0 && config.nvme.empty()) {
    throw UserError(
        fmt::format("nvme_budget = '{}' needs directories: set nvme to at least one, or "
                    "nvme_budget to 0",
                    config.get("nvme_budget")));
  }
  std::set<std::filesystem::path> seen;
  for (const std::string& directory : config.nvme) {
    if (directory.empty()) throw UserError("nvme holds an empty directory name; leave it out");
    if (!seen.insert(std::filesystem::path(directory).lexically_normal()).second) {
      throw UserError(fmt::format("nvme names '{}' twice; one file goes into each", directory));
    }
  }
}

/// What is part of a budget fits into it.
void check_budgets(const Config& config) {
  const auto fits = [&](const char* part, Bytes bytes, const char* whole, Bytes budget) {
    if (budget != 0 && bytes > budget) {
      throw UserError(fmt::format("{} ({}) is more than {} = '{}'; lower it or raise {}", part,
                                  format_bytes(bytes), whole, config.get(whole), whole));
    }
  };
  if (config.device_limit) {
    PAGODA_REQUIRE_GT(*config.device_limit, 0U, "device_limit takes bytes above 0, or none");
    fits("device_budget", config.device_budget, "device_limit", *config.device_limit);
  }
  fits("gradient_staging", config.gradient_staging, "device_budget", config.device_budget);
  fits("activation_reserve", config.activation_reserve, "host_budget", config.host_budget);
  fits("staging", config.staging, "host_budget", config.host_budget);
  if (!config.nvme.empty()) {
    fits("five times update_chunk times update_buffers (four of them)",
         optim::UpdateChunk::kArrays * config.update_chunk *
             std::min(config.update_buffers, optim::Updater::kLeastBuffers),
         "host_budget", config.host_budget);
  }
}

}  // namespace

void Config::set(std::string_view key, std::string_view text) {
  set_field(*this, config_field(key), text);
}

std::string Config::get(std::string_view key) const {
  return config_field(key).print(*this);
}

void Config::validate() const {
  // A value that was assigned in C++ is allowed if its text is.
  Config copy = *this;
  for (const ConfigField& field : config_fields()) set_field(copy, field, field.print(*this));

  constexpr Bytes kLeastChunk = 4_KiB;
  const std::pair<const char*, Bytes> chunks[] = {{"update_chunk", update_chunk},
                                                  {"bucket", bucket}};
  for (const auto& [name, bytes] : chunks) {
    if (bytes < kLeastChunk || bytes > (Bytes{1} << 40)) {
      throw UserError(
          fmt::format("{} = '{}' is not allowed: it takes 4KiB to 1TiB", name, get(name)));
    }
  }
  check_nvme(*this);
  check_budgets(*this);
  if (loss_scale_minimum > loss_scale_initial) {
    throw UserError(fmt::format("loss_scale_minimum = '{}' is above loss_scale_initial = '{}'",
                                loss_scale_minimum, loss_scale_initial));
  }
  if (heartbeat * 2 > timeout) {
    throw UserError(
        fmt::format("heartbeat = '{}' is more than half of timeout = '{}': one lost sign of life "
                    "would end the run",
                    heartbeat, timeout));
  }
}

const std::vector<ConfigKey>& Config::keys() {
  static const std::vector<ConfigKey> all = [] {
    const Config initial;
    std::vector<ConfigKey> keys;
    for (const ConfigField& field : config_fields()) {
      keys.push_back({field.name, field.type, field.print(initial), field.help});
    }
    return keys;
  }();
  return all;
}

std::string config_table() {
  const auto cell = [](std::string_view text) {
    std::string escaped;
    for (const char c : text) escaped += c == '|' ? std::string("\\|") : std::string(1, c);
    return escaped;
  };
  std::string table = "| key | takes | default | meaning |\n| --- | --- | --- | --- |\n";
  for (const ConfigKey& key : Config::keys()) {
    table += fmt::format("| `{}` | {} | {} | {} |\n", key.name, cell(key.type),
                         key.initial.empty() ? "" : "`" + key.initial + "`", cell(key.help));
  }
  return table;
}

}  // namespace pagoda
