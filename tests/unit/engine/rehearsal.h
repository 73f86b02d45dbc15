// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <tuple>
#include <vector>

#include <fmt/format.h>

#include "pagoda/comm/world.h"
#include "pagoda/engine/config.h"
#include "pagoda/engine/runtime.h"
#include "pagoda/kernels/element.h"
#include "pagoda/optim/optimizer.h"
#include "pagoda/pager/page.h"

namespace pagoda::engine {

/// Small pieces, and a device that holds little more than the largest operator.
Config tiny();

/// Training without a model: pages of known bytes are touched as a forward and a backward would,
/// gradients are made up, and what every touch sees is compared with the same steps taken by the
/// kernels on plain arrays. Without torch, so that sanitizers see all of it.
struct Rehearsal {
  Config config;
  int ranks = 1;
  int steps = 3;
  int micro_batches = 1;
  unsigned touching_threads = 1;  // of each rank, in a forward
  kernels::Dtype dtype = kernels::Dtype::BF16;
  Optimizer optimizer = AdamW{};
  bool all_contribute = true;  // false: ranks leave out pages, now and then all of them the same
  bool writes = false;         // user code writes a page in place between steps
  bool looks_up = false;  // forwards, on every thread, begin with rows of the last page but two
  int late_from = -1;     // from this step on, pages are looked at between backward and step()
  using Hook = std::function<void(int step, Runtime& runtime, std::span<pager::Page* const> pages)>;
  /// Called between the last backward and step(), on the rank's thread.
  Hook before_step;
  /// Called within the last backward, with all gradients handed over, on the rank's thread.
  Hook in_backward;
  int idle_rank = -1;                  // has forwards, and no backward
  std::vector<double> learning_rates;  // of the steps, over and over; empty: the optimizer's
  std::vector<float> gradient_sizes;   // factors of the steps' gradients, over and over; empty: 1
  /// Changes what a rank has for itself.
  std::function<void(int rank, Config& config)> configure;
  /// Pages that are frozen at attach(), and whether such a page requires a gradient on a rank in
  /// this micro-batch, and before step() (`micro` is micro_batches then). It trains in a step for
  /// which it does so at some time on every rank.
  std::vector<std::size_t> frozen;
  std::function<bool(int rank, int step, int micro, std::size_t page)> thawed;
  /// Whether step() refuses what is thawed; then it is taken again. Empty: never.
  std::function<bool(int step)> refused;
  std::vector<std::uint64_t> pages = {300, 5000, 9000, 20000, 4096, 1};
};

using Worlds = std::vector<std::shared_ptr<comm::World>>;
/// Told at a rank's end, with no update pending and the runtime still there; on that rank's thread.
using AtEnd = std::function<void(int rank, Runtime& runtime)>;

/// Runs every rank on a thread of its own; throws at the first byte that is not as it should be.
void rehearse(const Rehearsal& rehearsal);
void rehearse(const Rehearsal& rehearsal, const Worlds& worlds, const AtEnd& at_end);

/// Names a test by its parameters: how many ranks, and the stage.
inline constexpr auto kRanksAndStage = [](const auto& info) {
  return fmt::format("{}RanksZero{}", std::get<0>(info.param), std::get<1>(info.param));
};

}  // namespace pagoda::engine
