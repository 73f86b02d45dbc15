// SPDX-License-Identifier: Apache-2.0
// Pages arrive while operators run, and updates run while the next forward does. Judged by the
// recorded slices relative to each other, never by the clock on the wall.
#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "pagoda/base/trace.h"
#include "pagoda/device/emulated/emulated_device.h"
#include "pagoda/io/fault/fault_plan.h"
#include "torch/trainee.h"
#include "unit/io/scratch_directory.h"

namespace zoo {
namespace {

using pagoda::Placement;
namespace trace = pagoda::trace;

struct Slice {
  std::string track;
  std::string category;
  std::string name;
  double begin = 0;  // microseconds
  double end = 0;
};

std::vector<Slice> recorded() {
  trace::stop();
  const nlohmann::json all = nlohmann::json::parse(trace::to_json());
  std::map<int, std::string> tracks;
  std::vector<Slice> slices;
  for (const auto& event : all["traceEvents"]) {
    if (event["ph"] == "M") tracks[event["tid"]] = event["args"]["name"];
  }
  for (const auto& event : all["traceEvents"]) {
    if (event["ph"] != "X") continue;
    const double begin = event["ts"];
    const double duration = event["dur"];
    slices.push_back({tracks[event["tid"]], event["cat"], event["name"], begin, begin + duration});
  }
  std::ranges::sort(slices, {}, &Slice::begin);
  return slices;
}

bool overlap(const Slice& a, const Slice& b) {
  return a.begin < b.end && b.begin < a.end;
}

bool is_operator(const Slice& slice) {
  return slice.category == "operator";
}

/// Copies of pages to the device, and how many of them some operator ran beside.
struct Fetches {
  int all = 0;
  int hidden = 0;
};

Fetches fetches(bool prefetch) {
  use_one_torch_thread();
  const Options options{.kind = Kind::Gpt};
  pagoda::Config config = crowded(options, 6);
  config.device = "emulated";
  config.prefetch = prefetch;
  pagoda::device::emulated::Options setup;
  // A page takes longer than an operator, so that the link is busy all the time: what is fetched
  // ahead is on its way while the operator before runs, however quick or busy the machine is.
  setup.host_to_device = {.bytes_per_second = 1e8, .latency = 20'000};
  config.emulated = std::make_shared<pagoda::device::emulated::Options>(setup);
  Trainee trainee(options, {}, config);
  for (int step = 0; step < 4; ++step) trainee.train(step);
  trainee.finish();
  trace::start();
  for (int step = 4; step < 8; ++step) trainee.train(step);
  trainee.finish();
  const std::vector<Slice> slices = recorded();
  Fetches out;
  for (const Slice& copy : slices) {
    if (copy.category != "device" || !copy.track.starts_with("pages in")) continue;
    ++out.all;
    out.hidden += std::ranges::any_of(
        slices, [&](const Slice& s) { return is_operator(s) && overlap(s, copy); });
  }
  return out;
}

TEST(DeviceOverlap, PagesArriveWhileOperatorsRun) {
  const Fetches ahead = fetches(true);
  ASSERT_GT(ahead.all, 0);
  EXPECT_GT(ahead.hidden, ahead.all / 10) << "of " << ahead.all;
  // Without read-ahead every copy is waited for: the measure itself can fail.
  const Fetches on_demand = fetches(false);
  ASSERT_GT(on_demand.all, 0);
  EXPECT_EQ(on_demand.hidden, 0) << "of " << on_demand.all;
}

TEST(DeviceOverlap, UpdatesRunWhileTheNextForwardDoes) {
  use_one_torch_thread();
  const pagoda::io::ScratchDirectory scratch;
  const Options options{.kind = Kind::Gpt};
  pagoda::Config config = crowded(options, 6);
  config.device = "emulated";
  config.optimizer_state = Placement::Nvme;
  config.nvme = {scratch.path().string()};
  config.nvme_budget = 32U << 20U;
  config.faults = std::make_shared<pagoda::io::FaultPlan>();
  Trainee trainee(options, {}, config);
  for (int step = 0; step < 4; ++step) trainee.train(step);
  trainee.finish();
  // A disk so slow that updates last as long as a forward.
  config.faults->set_lottery(
      {.probability = 1, .faults = {{.kind = pagoda::io::FaultKind::Delay, .delay = 2'000'000}}});
  trace::start();
  for (int step = 4; step < 7; ++step) {
    {
      PAGODA_TRACE("test", "forward");
      trainee.forward(step);
    }
    trainee.backward();
    trainee.step();
  }
  trainee.finish();
  const std::vector<Slice> slices = recorded();
  int forwards = 0;
  for (const Slice& forward : slices) {
    if (forward.category != "test" || ++forwards == 1) continue;  // nothing is pending in the first
    int updates = 0;
    int operators_first = 0;  // operators that were over before a later update began
    for (const Slice& update : slices) {
      if (update.name != "update" || update.category != "optim" || !overlap(update, forward))
        continue;
      ++updates;
      operators_first += std::ranges::any_of(slices, [&](const Slice& s) {
        return is_operator(s) && s.begin >= forward.begin && s.end <= update.begin;
      });
    }
    EXPECT_GT(updates, 0) << "updates run in forward " << forwards;
    EXPECT_GT(operators_first, 0) << "forward " << forwards << " did not wait for all updates";
  }
  EXPECT_EQ(forwards, 3);
}

}  // namespace
}  // namespace zoo
