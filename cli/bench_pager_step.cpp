// SPDX-License-Identifier: Apache-2.0
// A made-up model through the engine without torch: pages, operators that only take time,
// gradients.
#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <malloc.h>

#include "bench_pager.h"
#include "pagoda/base/clock.h"
#include "pagoda/comm/solo_world.h"
#include "pagoda/device/emulated/emulated_device.h"
#include "pagoda/engine/runtime.h"
#include "pagoda/io/fault/fault_plan.h"
#include "swap_load.h"

namespace pagoda::cli {
namespace {

/// Pages of so many elements, all of them trained: forward through them, backward, step.
class MadeUpModel {
 public:
  MadeUpModel(const Config& config, const std::vector<std::uint64_t>& sizes)
      : runtime_(config, comm::make_solo_world()) {
    const std::vector<float> values(std::ranges::max(sizes), 0.5F);
    gradient_ =
        runtime_.device().allocate(device::MemoryKind::Device, values.size() * sizeof(float));
    std::vector<pager::Page*> all;
    std::vector<engine::TrainedSpec> specs;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      const std::uint64_t elements = sizes[i];
      pager::Page& page = runtime_.pager().adopt(
          fmt::format("w{}", i), elements, sizeof(float), pager::Placement::Host,
          reinterpret_cast<const std::byte*>(values.data()), device::Direction::HostToHost);
      all.push_back(&page);
      specs.push_back({&page,
                       kernels::Dtype::F32,
                       {{{0, elements}, 0, 0}},
                       {{static_cast<std::uint32_t>(i), 0, 0, false, false}}});
    }
    runtime_.attach(all, std::move(specs), {AdamW{}});
    pages_ = std::move(all);
    for (pager::Page* page : pages_) trained_.push_back(runtime_.trained(*page));
  }

  /// One step whose operators take so long on each page.
  void step(Nanos forward, Nanos backward) {
    for (pager::Page* page : pages_) run(*page, 1, forward);
    runtime_.begin_backward(true);
    for (std::size_t i = pages_.size(); i-- > 0;) {
      run(*pages_[i], 3, backward);
      engine::Contribution gradient;
      gradient.page = trained_[i];
      gradient.present = {true};
      gradient.data = gradient_->data();
      runtime_.contribute(std::move(gradient));
    }
    runtime_.end_backward();
    runtime_.step([](pager::Page&) {});
  }
  void finish() { runtime_.finish(); }
  engine::Stats stats() const { return runtime_.stats(); }

  static void operate(Nanos duration) {
    if (duration > 0) std::this_thread::sleep_for(std::chrono::nanoseconds(duration));
  }

 private:
  void run(pager::Page& page, std::uint8_t mode, Nanos duration) {
    const pager::Access access{&page, false};
    const pager::Pin pin = runtime_.pager().touch({&access, 1}, mode, nullptr);
    operate(duration);
  }

  engine::Runtime runtime_;
  std::shared_ptr<device::Memory> gradient_;
  std::vector<pager::Page*> pages_;
  std::vector<optim::TrainedPage*> trained_;
};

std::vector<std::uint64_t> equal(std::size_t pages, std::uint64_t elements) {
  return std::vector<std::uint64_t>(pages, elements);
}

/// Weights and, after each, a norm, as layers have them: their states lie on disk as a model's do.
std::vector<std::uint64_t> with_norms(std::size_t weights, std::uint64_t elements) {
  constexpr std::uint64_t kNorm = 1536;
  std::vector<std::uint64_t> out;
  for (std::size_t i = 0; i < weights; ++i) out.insert(out.end(), {elements, kNorm});
  return out;
}

constexpr std::size_t kPages = 24;
constexpr Bytes kPageBytes = 2_MiB;
constexpr double kLink = 1e9;  // bytes a second, each way
constexpr std::size_t kWarmSteps = 3;

device::emulated::Options paced_device() {
  device::emulated::Options options;
  options.host_to_device.bytes_per_second = kLink;
  options.device_to_host.bytes_per_second = kLink;
  options.checker = nullptr;
  return options;
}

Config step_config(bool paged) {
  Config config;
  config.device = "emulated";
  config.emulated = std::make_shared<device::emulated::Options>(paced_device());
  config.device_budget = paged ? kPages * kPageBytes / 4 : 2 * kPages * kPageBytes;
  config.gradient_staging = 2 * kPageBytes;
  config.parameters = paged ? Placement::Host : Placement::Device;
  config.gradients = config.optimizer_state = Placement::Host;
  return config;
}

double measured_step(bool paged, Nanos forward, Nanos backward, std::size_t steps) {
  MadeUpModel model(step_config(paged), equal(kPages, kPageBytes / sizeof(float)));
  for (std::size_t i = 0; i < kWarmSteps; ++i) model.step(forward, backward);
  std::vector<double> seconds;
  for (std::size_t i = 0; i < steps; ++i) {
    const Stopwatch watch;
    model.step(forward, backward);
    seconds.push_back(watch.seconds());
  }
  model.finish();
  return median(seconds);
}

double pure_compute(Nanos forward, Nanos backward) {
  const Stopwatch watch;
  for (std::size_t i = 0; i < kPages; ++i) MadeUpModel::operate(forward);
  for (std::size_t i = 0; i < kPages; ++i) MadeUpModel::operate(backward);
  return watch.seconds();
}

/// The copies of one step and nothing else: every page in twice, every gradient out, both ways at
/// once.
double pure_transfer() {
  const auto device = device::emulated::make_device(paced_device());
  const auto in = device->make_stream({.name = "in"});
  const auto out = device->make_stream({.name = "out"});
  const auto there = device->allocate(device::MemoryKind::Device, 2 * kPageBytes);
  const auto here = device->allocate(device::MemoryKind::Pinned, 2 * kPageBytes);
  const Stopwatch watch;
  for (std::size_t i = 0; i < kPages; ++i) {
    for (int twice = 0; twice < 2; ++twice) {
      in->copy_async(there->data(), here->data(), kPageBytes, device::Direction::HostToDevice);
    }
    out->copy_async(here->data() + kPageBytes, there->data() + kPageBytes, kPageBytes,
                    device::Direction::DeviceToHost);
  }
  in->synchronize();
  out->synchronize();
  return watch.seconds();
}

void add_step_rows(BenchReport& report, const std::string& name, Nanos forward, Nanos backward,
                   std::size_t steps) {
  double compute = pure_compute(forward, backward);  // limits are the best of a few
  double transfer = pure_transfer();
  for (int i = 0; i < 4; ++i) {
    compute = std::min(compute, pure_compute(forward, backward));
    transfer = std::min(transfer, pure_transfer());
  }
  const double resident = measured_step(false, forward, backward, steps);
  const double paged = measured_step(true, forward, backward, steps);
  report.add({name, 1e3 * paged, "ms", 1e3 * std::max(compute, transfer),
              fmt::format("the larger of compute ({:.0f}) and transfer ({:.0f}); goal 115 %",
                          1e3 * compute, 1e3 * transfer)});
  report.add({name + ", beside resident", 1e3 * paged, "ms", 1e3 * resident,
              "the same step with everything on the device"});
}

/// AdamW's moments: the fp32 parameter is its own master.
Bytes state_bytes(MomentType moments, std::uint64_t elements) {
  return elements * 2 * (moments == MomentType::Fp32 ? sizeof(float) : sizeof(std::uint16_t));
}

Config disk_config(const std::filesystem::path& directory, MomentType moments, Bytes states) {
  Config config;
  config.device = "cpu";
  config.device_budget = 512_MiB;
  config.parameters = config.gradients = Placement::Host;
  config.optimizer_state = Placement::Nvme;
  config.moments = moments;
  config.nvme = {directory};
  config.nvme_budget = states + 64_MiB;
  return config;
}

/// Steps whose operators take no time, and in turns with them, for as long, the disk's own best:
/// disks drift, and some are quick for a while only. Returns bytes a second.
double add_disk_row(BenchReport& report, const std::filesystem::path& directory, Bytes states,
                    MomentType moments, std::size_t steps) {
  constexpr std::uint64_t kElements = 16U << 20U;  // of a weight
  const Bytes weight = state_bytes(moments, kElements);
  const std::size_t weights = std::max<std::size_t>(2, states / weight);
  states = weights * weight;
  std::vector<double> rates;
  std::vector<double> limits;
  SwapLoad disk({directory}, {.size = states, .depth = 32, .checksums = false});
  MadeUpModel model(disk_config(directory, moments, states), with_norms(weights, kElements));
  for (std::size_t i = 0; i < kWarmSteps; ++i) model.step(0, 0);
  model.finish();
  for (std::size_t i = 0; i < steps; ++i) {
    const Stopwatch watch;
    model.step(0, 0);
    model.finish();
    const double seconds = watch.seconds();
    rates.push_back(2.0 * static_cast<double>(states) / seconds);
    limits.push_back(disk.run(DiskLoad::Kind::Mixed, seconds));
  }
  const std::string_view kind = moments == MomentType::Fp32 ? "fp32" : "bf16";
  report.add({fmt::format("states on disk, {} moments", kind), 1e-9 * median(rates), "GB/s",
              1e-9 * median(limits),
              "the swap path's mixed load without checksums, in turns (higher is better)"});
  report.note(fmt::format(
      "States on disk: {} of AdamW's {} moments, each read, used and written once a step; "
      "operators take no time. In turns, each as long: {:.2f} to {:.2f} GB/s of ours, {:.2f} to "
      "{:.2f} of the disk's.",
      format_bytes(states), kind, 1e-9 * std::ranges::min(rates), 1e-9 * std::ranges::max(rates),
      1e-9 * std::ranges::min(limits), 1e-9 * std::ranges::max(limits)));
  return median(rates);
}

/// A step on a disk whose rate never changes, with operators that take a tenth of its time, one
/// step following the other as in training: whatever is missing, the disk had nothing to do.
void add_even_disk_row(BenchReport& report, const std::filesystem::path& directory, double pace,
                       std::size_t steps) {
  constexpr std::size_t kCount = 32;
  constexpr std::uint64_t kElements = 2U << 20U;
  const Bytes states = kCount * state_bytes(MomentType::Fp32, kElements);
  Config config = disk_config(directory, MomentType::Fp32, states);
  config.faults = std::make_shared<io::FaultPlan>();
  config.faults->set_pace(pace);
  const double disk = 2.0 * static_cast<double>(states) / pace;
  const auto forward = static_cast<Nanos>(disk / 30 / kCount * 1e9);
  MadeUpModel model(config, equal(kCount, kElements));
  for (std::size_t i = 0; i < kWarmSteps; ++i) model.step(forward, 2 * forward);
  const Stopwatch watch;
  for (std::size_t i = 0; i < steps; ++i) model.step(forward, 2 * forward);
  const double seconds = watch.seconds() / static_cast<double>(steps);
  model.finish();
  report.add({"step, states on an even disk", 1e3 * seconds, "ms", 1e3 * disk,
              fmt::format("bytes ÷ {:.2f} GB/s, the pace it is held to", pace * 1e-9)});
}

/// Bytes that this process has from malloc.
Bytes allocated() {
  const struct mallinfo2 info = ::mallinfo2();
  return info.uordblks + info.hblkhd;
}

}  // namespace

void bench_paged_step(BenchReport& report, std::size_t steps) {
  using namespace std::chrono_literals;
  add_step_rows(report, "paged step", Nanos{2'000'000}, Nanos{4'000'000}, steps);
  add_step_rows(report, "paged step, slow link", Nanos{1'000'000}, Nanos{2'000'000}, steps);
  report.note(
      fmt::format("Steps: {} pages of {}, a quarter of them on an emulated device at a time, links "
                  "of {:.0f} GB/s "
                  "each way, operators that sleep, gradients and AdamW on the host.",
                  kPages, format_bytes(kPageBytes), kLink * 1e-9));
}

void bench_disk_step(BenchReport& report, const std::filesystem::path& directory, Bytes states,
                     std::size_t steps) {
  const double rate = add_disk_row(report, directory, states, MomentType::Fp32, steps);
  add_disk_row(report, directory, states, MomentType::Bf16, steps);
  // At a fraction of what the disk below can do: what is missing then is ours.
  add_even_disk_row(report, directory, std::min(0.25 * rate, 1e9), steps);
}

void bench_bookkeeping(BenchReport& report, std::size_t pages) {
  constexpr std::uint64_t kElements = 4;
  constexpr Bytes kContents = kElements * 4 * sizeof(float);  // with gradient and moments
  Config config;
  config.device = "cpu";
  config.device_budget = 64_MiB;
  config.parameters = config.gradients = config.optimizer_state = Placement::Host;
  config.staging = 1_MiB;
  config.update_chunk = 1_MiB;
  const auto bytes_for = [&](std::size_t count) {
    const Bytes before = allocated();
    MadeUpModel model(config, equal(count, kElements));
    for (int i = 0; i < 2; ++i) model.step(0, 0);
    model.finish();
    return static_cast<double>(allocated() - before);
  };
  // The difference of two models: what does not grow with the pages is left out.
  const std::size_t few = std::max<std::size_t>(1, pages / 5);
  const double bytes =
      (bytes_for(pages) - bytes_for(few)) / static_cast<double>(pages - few) - kContents;
  report.add({"bookkeeping per page", bytes, "bytes",
              static_cast<double>(pager::Pager::bookkeeping()), "the record of a page itself"});

  MadeUpModel model(config, equal(pages, kElements));
  for (int i = 0; i < 3; ++i) model.step(0, 0);
  std::vector<double> seconds;
  for (int i = 0; i < 5; ++i) {
    const Stopwatch watch;
    model.step(0, 0);
    model.finish();
    seconds.push_back(watch.seconds());
  }
  report.add({"bookkeeping per page, time of a step",
              1e9 * median(seconds) / static_cast<double>(pages), "ns", 0, ""});
  report.note(fmt::format(
      "Bookkeeping: {} trained pages of {} elements, with gradient and AdamW on the host; a step "
      "fetches each page, touches it twice, takes its gradient and updates it.",
      pages, kElements));
}

}  // namespace pagoda::cli
