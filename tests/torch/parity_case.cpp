// SPDX-License-Identifier: Apache-2.0
#include "torch/parity_case.h"

#include <algorithm>
#include <cmath>
#include <map>

#include <fmt/format.h>

#include "pagoda/pager/tier.h"
#include "unit/io/scratch_directory.h"

namespace zoo {
namespace {

using pagoda::Bytes;
using pagoda::Placement;
using namespace pagoda::literals;

std::size_t differing_elements(const Bits& a, const Bits& b) {
  const std::size_t size = pagoda::kernels::element_size(a.type);
  std::size_t count = 0;
  for (std::size_t i = 0; i + size <= std::min(a.bytes.size(), b.bytes.size()); i += size) {
    const auto at = static_cast<std::ptrdiff_t>(i);
    if (!std::equal(a.bytes.begin() + at, a.bytes.begin() + at + static_cast<std::ptrdiff_t>(size),
                    b.bytes.begin() + at)) {
      ++count;
    }
  }
  return count;
}

void set_placement(pagoda::Config& config, std::string_view word) {
  const auto all = [&](Placement placement) {
    config.parameters = config.gradients = config.optimizer_state = placement;
  };
  if (word == "host" || word == "spill") all(Placement::Host);
  if (word == "nvme") all(Placement::Nvme);
  if (word == "optimizer_nvme") {
    all(Placement::Host);
    config.optimizer_state = Placement::Nvme;
  }
  if (word == "parameters_nvme") {
    all(Placement::Host);
    config.parameters = Placement::Nvme;
  }
  if (word == "auto" || word == "host") return;
  config.nvme = {scratch_directory()};
  config.nvme_budget = 64_MiB;
}

/// What the reference depends on.
std::string reference_key(const Options& options, const Training& t) {
  return fmt::format(
      "{} {} {} {} {} {} {} {} {} {} {}", name(options.kind), static_cast<int>(options.dtype),
      name(options.checkpointing), t.steps, t.ranks, t.micro_batches,
      t.optimizer.index() * 10 +
          (t.optimizer.index() == 0 && std::get<0>(t.optimizer).decay == pagoda::kernels::Decay::L2
               ? 1
               : 0),
      static_cast<int>(t.moments), t.accumulation ? static_cast<int>(*t.accumulation) : -1,
      t.clip.value_or(0), t.loss_scale ? t.loss_scale->initial : 0);
}

const Trained& reference(const Options& options, const Training& training) {
  static std::map<std::string, Trained> known;
  const std::string key = reference_key(options, training);
  const auto found = known.find(key);
  if (found != known.end()) return found->second;
  return known.emplace(key, plain_loop(options, training)).first->second;
}

std::string check_budgets(const pagoda::engine::Stats& stats, const pagoda::Config& config) {
  constexpr const char* kNames[] = {"device", "host", "nvme"};
  const Bytes budgets[] = {config.device_budget, config.host_budget, config.nvme_budget};
  for (std::size_t i = 0; i < stats.tiers.size(); ++i) {
    if (budgets[i] != 0 && stats.tiers[i].peak > budgets[i]) {
      return fmt::format("{} budget {} exceeded: peak {}", kNames[i], budgets[i],
                         stats.tiers[i].peak);
    }
  }
  if (config.device_budget != 0 && stats.device_pages_peak > config.device_budget) {
    return fmt::format("pages took {} of a device budget of {}", stats.device_pages_peak,
                       config.device_budget);
  }
  return {};
}

}  // namespace

std::string scratch_directory() {
  static const pagoda::io::ScratchDirectory directory;
  return directory.path().string();
}

void set_small_pieces(pagoda::Config& config) {
  config.staging = 32_KiB;
  config.update_chunk = 16_KiB;
  config.update_buffers = 3;
  config.bucket = 40_KiB;
  config.lookup_in_place = 1;
  config.fetch_threads = 2;
  config.update_threads = 1;
  config.heartbeat = 1;
}

void set_tight_budget(pagoda::Config& config, const Options& options) {
  Options born = options;
  born.dtype = Dtype::F32;  // as torch's modules make them; they are cast later
  const ModelBytes model = model_bytes(born);
  // An operator takes a weight with its bias; the cell of an LSTM takes two of each.
  const Bytes weights = options.kind == Kind::Lstm ? 2 : 1;
  const Bytes pages = weights * (model.largest + 4_KiB);
  config.device_budget =
      pages + pages / 7 + 1;  // an eighth is for gradients, of which many are larger
}

const std::vector<covering::Dimension>& parity_dimensions() {
  static const std::vector<covering::Dimension> all = {
      {"kind", {"gpt", "tied_gpt", "moe", "conv", "lstm", "loop"}},
      {"dtype", {"fp32", "bf16"}},
      {"place", {"auto", "host", "nvme", "optimizer_nvme", "parameters_nvme", "spill"}},
      {"zero", {"0", "1", "2", "3"}},
      {"ranks", {"1", "2", "3", "4"}},
      {"budget", {"tight", "roomy"}},
      {"checkpointing", {"none", "reentrant", "saved_hooks"}},
      {"accumulation", {"1", "3"}},
      {"clip", {"no", "yes", "ahead"}},
      {"backward", {"engine", "plain"}},
      {"gradient", {"parameter", "fp32"}},
      {"moments", {"fp32", "bf16"}},
      {"master", {"whole", "split"}},
      {"optimizer", {"adamw", "adam", "sgd", "lion"}},
      {"prefetch", {"on", "off"}},
      {"device", {"cpu", "emulated", "checked"}},
  };
  return all;
}

bool parity_allowed(const covering::Combination& c) {
  const bool no_blocks = c.is("kind", "moe") || c.is("kind", "conv") || c.is("kind", "lstm");
  if (no_blocks && (c.is("checkpointing", "reentrant") || c.is("checkpointing", "saved_hooks"))) {
    return false;
  }
  if (c.is("master", "split") &&
      (c.is("dtype", "fp32") || c.is("optimizer", "sgd") || c.is("optimizer", "lion"))) {
    return false;
  }
  return true;
}

ParityCase parity_case(const covering::Combination& c) {
  ParityCase out;
  out.options.kind = parse_kind(c["kind"]);
  out.options.dtype = c.is("dtype", "bf16") ? Dtype::BF16 : Dtype::F32;
  out.options.checkpointing = parse_checkpointing(c["checkpointing"]);
  out.backward = c.is("backward", "plain") ? Backward::Plain : Backward::Engine;

  Training& training = out.training;
  training.ranks = std::stoi(std::string(c["ranks"]));
  training.micro_batches = std::stoi(std::string(c["accumulation"]));
  if (c.is("clip", "yes")) training.clip = 0.1;
  if (c.is("clip", "ahead")) training.clip = 1e6;  // nothing is clipped, which is trusted in
  if (c.is("gradient", "fp32")) training.accumulation = Dtype::F32;
  if (c.is("moments", "bf16")) training.moments = Dtype::BF16;
  if (c.is("optimizer", "adamw")) {
    training.optimizer = pagoda::kernels::AdamConfig{.lr = 1e-3, .weight_decay = 0.1};
  } else if (c.is("optimizer", "adam")) {
    training.optimizer = pagoda::kernels::AdamConfig{
        .lr = 1e-3, .weight_decay = 0.1, .decay = pagoda::kernels::Decay::L2};
  } else if (c.is("optimizer", "sgd")) {
    training.optimizer =
        pagoda::kernels::SgdConfig{.lr = 1e-2, .momentum = 0.9, .weight_decay = 0.1};
  } else {
    training.optimizer = pagoda::kernels::LionConfig{.lr = 1e-3, .weight_decay = 0.1};
  }

  pagoda::Config& config = out.config;
  set_small_pieces(config);
  config.device = c.is("device", "cpu") ? "cpu" : "emulated";
  config.check_order = c.is("device", "checked");
  config.zero = static_cast<unsigned>(std::stoi(std::string(c["zero"])));
  config.master = c.is("master", "split") ? pagoda::Master::Split : pagoda::Master::Whole;
  config.prefetch = c.is("prefetch", "on");
  config.clip_ahead = c.is("clip", "ahead");
  set_placement(config, c["place"]);
  if (c.is("budget", "tight")) {
    set_tight_budget(config, out.options);
  } else {
    config.device_budget = 16_MiB;
  }
  if (c.is("place", "spill")) {
    // Staging, and a part of the states: the rest goes to NVMe page by page.
    config.host_budget = 9_MiB + model_bytes(out.options).all;
  }
  return out;
}

std::string difference(const Trained& expected, const Trained& got) {
  for (std::size_t step = 0; step < expected.losses.size(); ++step) {
    for (std::size_t i = 0; i < expected.losses[step].size(); ++i) {
      if (step < got.losses.size() && i < got.losses[step].size() &&
          got.losses[step][i] == expected.losses[step][i]) {
        continue;
      }
      return fmt::format(
          "loss {} of step {} differs: {} instead of {}", i, step,
          step < got.losses.size() && i < got.losses[step].size() ? got.loss(step, i) : -1.0F,
          expected.loss(step, i));
    }
  }
  if (got.parameters.size() != expected.parameters.size()) return "other parameters";
  std::string first;
  int differing = 0;
  for (std::size_t i = 0; i < expected.parameters.size(); ++i) {
    const Bits& a = expected.parameters[i];
    const Bits& b = got.parameters[i];
    if (a == b) continue;
    if (differing++ == 0) {
      first = fmt::format("'{}' in {} of {} elements", a.name, differing_elements(a, b),
                          a.bytes.size() / pagoda::kernels::element_size(a.type));
    }
  }
  if (differing > 0) {
    return fmt::format("{} of {} parameters differ, first {}", differing,
                       expected.parameters.size(), first);
  }
  for (std::size_t i = 0; i < expected.norms.size(); ++i) {
    const double norm = i < got.norms.size() ? got.norms[i] : -1;
    const bool both_nan = std::isnan(norm) && std::isnan(expected.norms[i]);
    if (norm != expected.norms[i] && !both_nan) {
      return fmt::format("norm of step {} differs: {} instead of {}", i, norm, expected.norms[i]);
    }
  }
  if (got.skipped != expected.skipped) {
    return fmt::format("{} skipped steps instead of {}", got.skipped, expected.skipped);
  }
  if (got.final_scale != expected.final_scale) {
    return fmt::format("loss scale {} instead of {}", got.final_scale, expected.final_scale);
  }
  return {};
}

std::string check_parity(const ParityCase& parity) {
  use_one_torch_thread();
  const Trained& expected = reference(parity.options, parity.training);
  try {
    const PagedTrained got =
        paged_loop(parity.options, parity.training, parity.config, parity.backward);
    std::string wrong = difference(expected, got);
    if (wrong.empty()) wrong = check_budgets(got.stats, parity.config);
    return wrong;
  } catch (const std::exception& error) {
    const std::string text = error.what();  // torch adds its stack
    return fmt::format("threw: {}", text.substr(0, text.find("\nException raised")));
  }
}

}  // namespace zoo
