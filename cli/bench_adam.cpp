// SPDX-License-Identifier: Apache-2.0
// `pagoda bench adam`: each kernel beside a loop that moves the same bytes and computes nothing, in
// alternation, so that whatever else the machine does hits both alike.
#include <algorithm>
#include <functional>
#include <iostream>
#include <memory>
#include <optional>
#include <thread>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "bench_report.h"
#include "commands.h"
#include "pagoda/base/aligned_buffer.h"
#include "pagoda/base/clock.h"
#include "pagoda/base/error.h"
#include "pagoda/base/thread_pool.h"
#include "pagoda/kernels/adam.h"
#include "pagoda/kernels/bandwidth_probe.h"
#include "pagoda/kernels/cast.h"
#include "pagoda/kernels/gradient_norm.h"
#include "pagoda/kernels/lion.h"
#include "pagoda/kernels/sgd.h"

namespace pagoda::cli {
namespace {

using kernels::BandwidthProbe;
using kernels::Bf16;
using kernels::ConstElements;
using kernels::Elements;
using kernels::Fp16;
using kernels::Isa;
using kernels::OptimizerShard;

constexpr std::size_t kGrain = 65536;  // elements a thread takes at once, of kernel and probe

struct Options {
  std::size_t params = std::size_t{1} << 26;
  std::size_t threads = 0;  // 0: rows for 1 and for all
  std::size_t rounds = 7;
  std::string isa;
  std::string only;
  bool json = false;
};

/// Every array that a variant may need, on huge pages. Values are those of training, roughly: none
/// is denormal, which would measure something else.
class Arrays {
 public:
  explicit Arrays(std::size_t count)
      : grad(make<float>(count, [](std::size_t i) { return wave(i) * 1e-3F; })),
        master(make<float>(count, [](std::size_t i) { return wave(i + 7); })),
        momentum(make<float>(count, [](std::size_t i) { return wave(i + 3) * 1e-3F; })),
        variance(make<float>(count, [](std::size_t) { return 1e-6F; })),
        small_grad(make<Bf16>(count, [](std::size_t i) { return bf16(wave(i) * 1e-3F); })),
        param(make<Bf16>(count, [](std::size_t i) { return bf16(wave(i + 7)); })),
        rest(make<std::int16_t>(count,
                                [](std::size_t i) { return static_cast<std::int16_t>(i * 77); })),
        small_momentum(make<Bf16>(count, [](std::size_t i) { return bf16(wave(i) * 1e-3F); })),
        small_variance(make<Bf16>(count, [](std::size_t) { return bf16(1e-6F); })),
        half_grad(make<Fp16>(count, [](std::size_t i) {
          return Fp16{static_cast<std::uint16_t>(0x1800 + i % 1024)};
        })) {
    for (AlignedBuffer& buffer : spare) {
      buffer = make<float>(count, [](std::size_t) { return 0.0F; });
    }
  }

  template <class T>
  static T* at(const AlignedBuffer& buffer) {
    return reinterpret_cast<T*>(const_cast<std::byte*>(buffer.data()));
  }

  AlignedBuffer grad, master, momentum, variance;
  AlignedBuffer small_grad, param, rest, small_momentum, small_variance, half_grad;
  AlignedBuffer spare[3];  // states that are written elsewhere

 private:
  static float wave(std::size_t i) {
    return (static_cast<float>(i % 1999) - 999.0F + 0.5F) / 25000.0F;
  }
  static Bf16 bf16(float x) {
    return {static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(x) >> 16)};
  }
  template <class T, class Fn>
  static AlignedBuffer make(std::size_t count, Fn value) {
    AlignedBuffer buffer(count * sizeof(T), 64, AlignedBuffer::Pages::Huge);
    T* out = at<T>(buffer);
    for (std::size_t i = 0; i < count; ++i) out[i] = value(i);
    return buffer;
  }
};

/// A kernel as a function of a range of elements, and the streams that it moves.
struct Variant {
  std::string name;
  std::function<void(std::size_t, std::size_t)> run;
  BandwidthProbe::Streams streams;
};

OptimizerShard shard_of(const Arrays& a, std::size_t count, ConstElements grad) {
  OptimizerShard shard;
  shard.count = count;
  shard.grad = grad;
  shard.master = Arrays::at<float>(a.master);
  shard.momentum = Arrays::at<float>(a.momentum);
  shard.variance = Arrays::at<float>(a.variance);
  return shard;
}

/// The streams of a step: what a shard reads, updates and writes.
BandwidthProbe::Streams streams_of(const OptimizerShard& shard) {
  BandwidthProbe::Streams out;
  out.read = {shard.grad};
  const auto state = [&out](Elements from, Elements to) {
    if (!from) return;
    if (!to) return out.update.push_back(from);
    out.read.push_back(from);
    out.write.push_back(to);
  };
  const auto rest = [](std::int16_t* data) { return Elements(kernels::Dtype::BF16, data); };
  state(shard.master, shard.to.master);
  state(rest(shard.rest), rest(shard.to.rest));
  state(shard.momentum, shard.to.momentum);
  state(shard.variance, shard.to.variance);
  if (shard.param) (shard.rest != nullptr ? out.update : out.write).push_back(shard.param);
  return out;
}

std::vector<Variant> variants(const Arrays& a, std::size_t count, Isa isa) {
  const kernels::Step step{10, 0.5, 1234};
  std::vector<Variant> out;
  const auto add = [&](std::string name, const OptimizerShard& shard, auto kernel) {
    out.push_back(
        {std::move(name),
         [=](std::size_t begin, std::size_t end) { kernel(step, shard.part(begin, end), isa); },
         streams_of(shard)});
  };
  const auto adamw = [](const kernels::Step& s, const OptimizerShard& shard, Isa on) {
    kernels::adam_step({.weight_decay = 0.01}, s, shard, on);
  };
  const auto* grad = Arrays::at<float>(a.grad);
  const auto* small_grad = Arrays::at<Bf16>(a.small_grad);
  auto* param = Arrays::at<Bf16>(a.param);

  OptimizerShard shard = shard_of(a, count, grad);
  add("adamw fp32", shard, adamw);
  shard.param = param;
  add("adamw fp32 → bf16", shard, adamw);
  shard.grad = small_grad;
  add("adamw bf16 grad → bf16", shard, adamw);
  OptimizerShard moving = shard;
  moving.to.master = Arrays::at<float>(a.spare[0]);
  moving.to.momentum = Arrays::at<float>(a.spare[1]);
  moving.to.variance = Arrays::at<float>(a.spare[2]);
  add("adamw bf16 grad → bf16, states written elsewhere", moving, adamw);
  shard.grad = Arrays::at<Fp16>(a.half_grad);
  shard.param = Elements(kernels::Dtype::F16, param);
  add("adamw fp16 grad → fp16", shard, adamw);
  shard.grad = small_grad;
  shard.param = param;
  shard.momentum = Arrays::at<Bf16>(a.small_momentum);
  shard.variance = Arrays::at<Bf16>(a.small_variance);
  add("adamw bf16 grad → bf16, bf16 moments", shard, adamw);
  shard.master = nullptr;
  shard.rest = Arrays::at<std::int16_t>(a.rest);
  add("adamw bf16 grad, split master, bf16 moments", shard, adamw);
  moving = shard;
  moving.to.rest = Arrays::at<std::int16_t>(a.spare[0]);
  moving.to.momentum = Arrays::at<Bf16>(a.spare[1]);
  moving.to.variance = Arrays::at<Bf16>(a.spare[2]);
  add("adamw bf16 grad, split master, bf16 moments, states written elsewhere", moving, adamw);
  shard.momentum = Arrays::at<float>(a.momentum);
  shard.variance = Arrays::at<float>(a.variance);
  add("adamw bf16 grad, split master", shard, adamw);

  OptimizerShard single = shard_of(a, count, small_grad);
  single.variance = {};
  single.param = param;
  add("lion bf16 grad → bf16", single,
      [](const kernels::Step& s, const OptimizerShard& part, Isa on) {
        kernels::lion_step({.weight_decay = 0.01}, s, part, on);
      });
  add("sgd momentum bf16 grad → bf16", single,
      [](const kernels::Step& s, const OptimizerShard& part, Isa on) {
        kernels::sgd_step({.weight_decay = 0.01}, s, part, on);
      });

  const auto add_cast = [&](std::string name, ConstElements from, Elements to) {
    out.push_back({std::move(name),
                   [=](std::size_t begin, std::size_t end) {
                     kernels::cast(from.from(begin), to.from(begin), end - begin, isa);
                   },
                   {{from}, {}, {to}}});
  };
  add_cast("cast fp32 → bf16", grad, param);
  add_cast("cast fp32 → fp16", grad, Elements(kernels::Dtype::F16, param));
  add_cast("cast bf16 → fp32", small_grad, Arrays::at<float>(a.momentum));
  const auto add_norm = [&](std::string name, ConstElements from) {
    out.push_back({std::move(name),
                   [=](std::size_t begin, std::size_t end) {
                     volatile double sum =
                         kernels::sum_of_squares(from.from(begin), end - begin, 1, isa);
                     static_cast<void>(sum);
                   },
                   {{from}, {}, {}}});
  };
  add_norm("sum of squares fp32", grad);
  add_norm("sum of squares bf16", small_grad);
  out.push_back(
      {"finite check bf16",
       [=](std::size_t begin, std::size_t end) {
         PAGODA_CHECK(kernels::all_finite(ConstElements(small_grad).from(begin), end - begin, isa));
       },
       {{small_grad}, {}, {}}});
  return out;
}

/// Runs ranges on a set number of threads, the caller's included.
class Crew {
 public:
  explicit Crew(std::size_t threads) {
    if (threads > 1) pool_.emplace(threads - 1, "bench");
  }
  /// Seconds that fn takes over all elements.
  double time(std::size_t count, const std::function<void(std::size_t, std::size_t)>& fn) {
    const Stopwatch watch;
    if (pool_) {
      pool_->parallel_for(0, count, kGrain, fn);
    } else {
      for (std::size_t begin = 0; begin < count; begin += kGrain) {
        fn(begin, std::min(count, begin + kGrain));
      }
    }
    return watch.seconds();
  }

 private:
  std::optional<ThreadPool> pool_;
};

BenchRow measure(const Variant& variant, std::size_t count, std::size_t threads,
                 std::size_t rounds) {
  Crew crew(threads);
  const BandwidthProbe probe(variant.streams);
  std::vector<BandwidthProbe::Style> styles = {{false, false}, {true, false}};
  if (!variant.streams.write.empty()) styles = {{false, true}, {true, true}, {true, false}};
  std::vector<std::vector<double>> probe_times(styles.size());
  std::vector<double> times;
  // A style that lost the first two rounds by a fifth is not the limit, and only costs time.
  std::vector<bool> lost(styles.size(), false);
  crew.time(count, variant.run);  // pages, caches and clocks settle
  for (std::size_t round = 0; round < rounds; ++round) {
    times.push_back(crew.time(count, variant.run));
    for (std::size_t i = 0; i < styles.size(); ++i) {
      if (lost[i]) continue;
      probe_times[i].push_back(crew.time(count, [&](std::size_t begin, std::size_t end) {
        probe.run(begin, end, styles[i], kernels::best_isa());
      }));
    }
    if (round == 1) {
      std::vector<double> best;
      for (const auto& each : probe_times) best.push_back(std::ranges::min(each));
      for (std::size_t i = 0; i < styles.size(); ++i) {
        lost[i] = best[i] > 1.2 * std::ranges::min(best);
      }
    }
  }
  double limit = 0;
  const double giga = static_cast<double>(count) * 1e-9;
  for (const auto& each : probe_times) limit = std::max(limit, giga / median(each));
  return {fmt::format("{}, {} thread{}", variant.name, threads, threads == 1 ? "" : "s"),
          giga / median(times), "G params/s", limit, "same streams, no arithmetic"};
}

void run(const Options& options) {
  PAGODA_REQUIRE(options.rounds > 0, "--rounds must be at least 1");
  PAGODA_REQUIRE(options.params >= kGrain, "--params must be at least {}", kGrain);
  const std::size_t count = options.params / 32 * 32;
  const Isa isa = options.isa.empty() ? kernels::active_isa() : kernels::parse_isa(options.isa);
  const std::size_t all = std::max(1U, std::thread::hardware_concurrency());
  std::vector<std::size_t> thread_counts = {1, all};
  if (options.threads > 0) thread_counts = {options.threads};
  if (all == 1) thread_counts.resize(1);

  const Arrays arrays(count);
  BenchReport report("Optimizer kernels beside the memory they move");
  for (const Variant& variant : variants(arrays, count, isa)) {
    if (variant.name.find(options.only) == std::string::npos) continue;
    for (const std::size_t threads : thread_counts) {
      report.add(measure(variant, count, threads, options.rounds));
    }
  }
  report.note(fmt::format("{} parameters, {}, median of {} rounds", count, kernels::isa_name(isa),
                          options.rounds));
  std::cout << (options.json ? report.json() + "\n" : report.table());
}

}  // namespace

void add_bench_adam(CLI::App& bench) {
  CLI::App* adam =
      bench.add_subcommand("adam", "The optimizer kernels beside the machine's memory bandwidth");
  auto options = std::make_shared<Options>();
  adam->add_option("--params", options->params, "Parameters in the working set")
      ->capture_default_str();
  adam->add_option("--threads", options->threads, "Threads (default: rows for 1 and for all)");
  adam->add_option("--rounds", options->rounds, "Alternations of kernel and limit")
      ->capture_default_str();
  adam->add_option("--isa", options->isa, "scalar, sse4, avx2 or avx512 (default: the best here)");
  adam->add_option("--only", options->only, "Only kernels whose name contains this");
  adam->add_flag("--json", options->json, "One JSON object instead of a table");
  adam->callback([options] { run(*options); });
}

}  // namespace pagoda::cli
