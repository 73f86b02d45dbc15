// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "pagoda/base/bytes.h"
#include "pagoda/engine/choices.h"
#include "pagoda/io/engine.h"
#include "pagoda/io/swap_file.h"
#include "pagoda/pager/dropped_wait.h"

namespace pagoda::io {
class FaultPlan;
}
namespace pagoda::device::emulated {
struct Options;
}

namespace pagoda {

/// What there is to know about one key of Config.
struct ConfigKey {
  std::string name;
  std::string type;     ///< what may be given: "bytes", "auto | host | …", "whole number from 1"
  std::string initial;  ///< its default, as set() takes it
  std::string help;     ///< one line
  bool expert = false;  ///< its default is right; docs/config.md lists it apart
};

/// Everything that can be set about an engine.
///
/// A name is the same wherever it is written: a field here, a key in JSON, a keyword in Python, a
/// flag on the command line. One table (config_field.cpp) says for each what it takes and means;
/// keys(), docs/config.md and the errors are made from it. Every error is a UserError that names
/// the key, the value and what is allowed. A plain value: one thread at a time may change it.
struct Config {
  // What runs where.
  std::string device = "auto";
  Bytes device_budget = 0;
  Bytes gradient_staging = 0;
  std::optional<Bytes> device_limit;
  Bytes host_budget = 0;
  Bytes activation_reserve = 0;
  Bytes nvme_budget = 0;
  std::vector<std::string> nvme;
  Placement parameters = Placement::Auto;
  Placement gradients = Placement::Auto;
  Placement optimizer_state = Placement::Auto;
  unsigned zero = 3;
  Initial initial = Initial::Broadcast;

  // What a step computes.
  unsigned accumulation = 1;
  GradientType gradient_dtype = GradientType::Parameter;
  Reduction reduction = Reduction::Mean;
  double clip = 0;
  bool clip_ahead = false;
  LossScale loss_scale;
  double loss_scale_initial = 65536;
  double loss_scale_minimum = 1;
  unsigned loss_scale_window = 2000;
  Master master = Master::Whole;
  MomentType moments = MomentType::Fp32;
  std::uint64_t seed = 0;
  bool early_updates = true;

  // How bytes move.
  bool checksums = true;
  io::EngineChoice io_engine = io::EngineChoice::Auto;
  io::Direct direct = io::Direct::Auto;
  bool prefetch = true;
  unsigned fetch_threads = 4;
  unsigned update_threads = 0;
  Bytes update_chunk = 0;
  unsigned update_buffers = 8;
  Bytes staging = 0;
  Bytes lookup_in_place = 64_MiB;
  Bytes bucket = 32_MiB;

  // What is watched.
  double timeout = 60;
  double join_timeout = 300;
  double heartbeat = 0;
  bool check_order = false;
  std::string trace;
  std::string trace_steps = "3-5";

  /// For tests: what shall go wrong below the swap space. Not a key.
  std::shared_ptr<io::FaultPlan> faults;
  /// For tests and benches: what an emulated device is like. Not a key; null: as fast as this
  /// machine.
  std::shared_ptr<const device::emulated::Options> emulated;
  /// For bindings: what messages tell the user to do with a page whose bytes were read without an
  /// operator. Not a key; empty: the pager's own words.
  std::string pin_advice;
  /// For tests: a wait to be left out. Not a key.
  pager::DroppedWait dropped_wait = pager::DroppedWait::None;

  bool scales_loss() const noexcept { return loss_scale.kind != LossScale::Kind::None; }
  /// Whether a step may clip. With `clip` = inf it takes the norm and never does.
  bool clips() const noexcept { return clip > 0 && std::isfinite(clip); }
  bool takes_norm() const noexcept { return clip > 0 || scales_loss(); }
  /// Seconds between heartbeats: `heartbeat`, or what 0 stands for.
  double beat() const noexcept {
    return heartbeat > 0 ? heartbeat : std::min(5.0, timeout / kBeats);
  }
  static constexpr double kBeats = 12;         ///< heartbeats in a timeout
  static constexpr double kLeastBeat = 0.001;  ///< seconds

  /// Reads a JSON object. Sizes may be numbers or texts ("8GiB"). What is not named, or null, keeps
  /// its default. An unknown key is an error that names the nearest one. Does not validate().
  static Config from_json(std::string_view text);
  /// The same for a file, which errors name too.
  static Config from_json_file(const std::filesystem::path& path);
  /// Every key, in the order of keys(). Reading it back gives an equal Config.
  std::string to_json() const;

  /// Sets one key from text, as on a command line. Lists are separated by commas.
  void set(std::string_view key, std::string_view text);
  /// The value as set() takes it.
  std::string get(std::string_view key) const;
  /// Throws unless every value is allowed and they fit together.
  void validate() const;

  /// Every key, in the order of the fields above.
  static const std::vector<ConfigKey>& keys();

  friend bool operator==(const Config&, const Config&) = default;
};

/// The keys as a Markdown table: what docs/config.md holds, those for experts apart.
std::string config_table(bool expert);

}  // namespace pagoda
