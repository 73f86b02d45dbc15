// SPDX-License-Identifier: Apache-2.0
#include "pagoda/engine/config.h"

#include <algorithm>
#include <set>

#include "pagoda/base/error.h"
#include "pagoda/engine/config_field.h"
#include "pagoda/pager/tiers.h"

namespace pagoda {
namespace {

/// Nothing that lies on NVMe without a place for it, and nothing named for it that is not used.
void check_nvme(const Config& config) {
  const std::pair<const char*, Placement> states[] = {{"parameters", config.parameters},
                                                      {"gradients", config.gradients},
                                                      {"optimizer_state", config.optimizer_state}};
  for (const auto& [name, placement] : states) {
    if (placement == Placement::Nvme && config.nvme.empty()) {
      throw UserError(fmt::format(
          "{} = 'nvme' needs directories: set nvme to at least one, or {} to auto, device or host",
          name, name));
    }
  }
  if (config.nvme_budget != 0 && config.nvme.empty()) {
    throw UserError(
        fmt::format("nvme_budget = {} needs directories: set nvme to at least one, or "
                    "nvme_budget to 0",
                    config.get("nvme_budget")));
  }
  std::set<std::filesystem::path> seen;
  for (const std::string& directory : config.nvme) {
    if (directory.empty()) throw UserError("nvme holds an empty directory name; leave it out");
    if (!seen.insert(std::filesystem::path(directory).lexically_normal()).second) {
      throw UserError(fmt::format("nvme names '{}' twice: leave one of them out", directory));
    }
  }
}

/// What is part of a budget leaves something of it. What the host must have room for depends on
/// the device, too: host_buffers.h.
void check_budgets(const Config& config) {
  if (config.device_limit && config.device_budget > *config.device_limit) {
    throw UserError(
        fmt::format("device_budget = {} is more than device_limit = {}: lower it, or "
                    "raise device_limit to at least {}",
                    config.get("device_budget"), config.get("device_limit"),
                    format_bytes_up(config.device_budget)));
  }
  if (config.device_budget != 0 && config.gradient_staging >= config.device_budget) {
    throw UserError(fmt::format(
        "gradient_staging = {} leaves nothing of device_budget = {} for pages: lower it, or "
        "raise device_budget to at least {}",
        config.get("gradient_staging"), config.get("device_budget"),
        format_bytes_up(config.gradient_staging + pager::Tiers::kDeviceBlock)));
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

  check_nvme(*this);
  check_budgets(*this);
  if (loss_scale_minimum > loss_scale_initial) {
    throw UserError(
        fmt::format("loss_scale_minimum = {} is above loss_scale_initial = {}: lower it, or "
                    "raise loss_scale_initial to at least {}",
                    loss_scale_minimum, loss_scale_initial, loss_scale_minimum));
  }
  if (beat() < kLeastBeat) {
    throw UserError(heartbeat > 0
                        ? fmt::format("heartbeat = {} is too short: raise it to at least {}, or "
                                      "leave it to timeout (0)",
                                      heartbeat, kLeastBeat)
                        : fmt::format("timeout = {} is too short: raise it to at least {}", timeout,
                                      kBeats * kLeastBeat));
  }
  if (heartbeat * 2 > timeout) {
    throw UserError(
        fmt::format("heartbeat = {} is more than half of timeout = {}, so one lost sign of life "
                    "would end the run: lower it, or raise timeout to at least {}",
                    heartbeat, timeout, 2 * heartbeat));
  }
}

const std::vector<ConfigKey>& Config::keys() {
  static const std::vector<ConfigKey> all = [] {
    const Config initial;
    std::vector<ConfigKey> keys;
    for (const ConfigField& field : config_fields()) {
      keys.push_back({field.name, field.type, field.print(initial), field.help, field.expert});
    }
    return keys;
  }();
  return all;
}

std::string config_table(bool expert) {
  const auto cell = [](std::string_view text) {
    std::string escaped;
    for (const char c : text) escaped += c == '|' ? std::string("\\|") : std::string(1, c);
    return escaped;
  };
  std::string table = "| key | takes | default | meaning |\n| --- | --- | --- | --- |\n";
  for (const ConfigKey& key : Config::keys()) {
    if (key.expert != expert) continue;
    table += fmt::format("| `{}` | {} | {} | {} |\n", key.name, cell(key.type),
                         key.initial.empty() ? "" : "`" + key.initial + "`", cell(key.help));
  }
  return table;
}

}  // namespace pagoda
