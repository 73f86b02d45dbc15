// SPDX-License-Identifier: Apache-2.0
#include "torch/paged_loop.h"

#include <bit>
#include <cstdlib>
#include <exception>
#include <set>
#include <thread>

#include <ATen/Context.h>
#include <torch/nn/module.h>

#include "pagoda/base/error.h"
#include "pagoda/comm/thread_world.h"
#include "pagoda/torch/cuda_library.h"
#include "pagoda/torch/engine.h"
#include "torch/specimen.h"

namespace zoo {
namespace {

pagoda::Optimizer rule_of(const Training& training) {
  using namespace pagoda;
  if (const auto* a = std::get_if<kernels::AdamConfig>(&training.optimizer)) {
    if (a->decay == kernels::Decay::L2) {
      return Adam{a->lr, a->beta1, a->beta2, a->eps, a->weight_decay};
    }
    return AdamW{a->lr, a->beta1, a->beta2, a->eps, a->weight_decay};
  }
  if (const auto* l = std::get_if<kernels::LionConfig>(&training.optimizer)) {
    return Lion{l->lr, l->beta1, l->beta2, l->weight_decay};
  }
  const auto& s = std::get<kernels::SgdConfig>(training.optimizer);
  return Sgd{s.lr, s.momentum, s.dampening, s.weight_decay, s.nesterov};
}

struct RankResult {
  std::vector<std::vector<std::uint32_t>> losses;  // [step][micro-batch]
  std::vector<double> norms;
  std::vector<Bits> parameters;
  pagoda::engine::Stats stats;
  double scale = 1;
  int skipped = 0;
};

RankResult run_rank(const Options& options, const Training& training, pagoda::Config config,
                    const std::shared_ptr<pagoda::comm::World>& world, Backward how) {
  use_one_torch_thread();
  config.accumulation = static_cast<unsigned>(training.micro_batches);
  config.clip = training.clip.value_or(0);
  config.moments =
      training.moments == Dtype::BF16 ? pagoda::MomentType::Bf16 : pagoda::MomentType::Fp32;
  if (training.accumulation == Dtype::F32) config.gradient_dtype = pagoda::GradientType::Fp32;
  config.seed = training.update_seed;
  if (training.loss_scale) {
    config.loss_scale.kind = pagoda::LossScale::Kind::Dynamic;
    config.loss_scale_initial = training.loss_scale->initial;
    config.loss_scale_window = static_cast<unsigned>(training.loss_scale->growth_window);
  }
  RankResult out;
  pagoda::Engine engine(config, world);
  const auto model = engine.build([&] { return make(options); });
  engine.attach(*model, rule_of(training));
  for (int step = 0; step < training.steps; ++step) {
    auto& losses = out.losses.emplace_back();
    for (int micro = 0; micro < training.micro_batches; ++micro) {
      const at::Tensor value =
          loss(*model, batch_seed(training.data_seed, world->rank(), step, micro));
      losses.push_back(std::bit_cast<std::uint32_t>(value.item<float>()));
      if (how == Backward::Engine) {
        engine.backward(value);
      } else {
        value.backward();
      }
    }
    const pagoda::StepReport report = engine.step();
    if (training.clip) out.norms.push_back(report.norm);
    out.skipped += report.skipped ? 1 : 0;
    out.scale = report.loss_scale;
  }
  engine.finish();
  out.parameters = parameter_bits(*model);
  out.stats = engine.stats();
  return out;
}

}  // namespace

PagedTrained paged_loop(const Options& options, const Training& training,
                        const pagoda::Config& config,
                        const std::vector<std::shared_ptr<pagoda::comm::World>>& worlds,
                        Backward backward) {
  std::vector<RankResult> results(worlds.size());
  std::vector<std::exception_ptr> errors(worlds.size());
  {
    std::vector<std::jthread> threads;
    for (std::size_t r = 0; r < worlds.size(); ++r) {
      threads.emplace_back([&, r] {
        try {
          results[r] = run_rank(options, training, config, worlds[r], backward);
        } catch (...) {
          errors[r] = std::current_exception();
        }
      });
    }
  }
  for (const std::exception_ptr& error : errors) {
    if (error != nullptr) std::rethrow_exception(error);
  }
  PagedTrained out;
  for (int step = 0; step < training.steps; ++step) {
    auto& losses = out.losses.emplace_back();
    for (int micro = 0; micro < training.micro_batches; ++micro) {
      for (const RankResult& rank : results) {
        losses.push_back(
            rank.losses[static_cast<std::size_t>(step)][static_cast<std::size_t>(micro)]);
      }
    }
  }
  for (const RankResult& rank : results) {
    if (rank.parameters != results[0].parameters) {
      throw pagoda::EngineError("ranks ended with different parameters");
    }
  }
  out.parameters = std::move(results[0].parameters);
  out.norms = std::move(results[0].norms);
  out.skipped = results[0].skipped;
  out.final_scale = results[0].scale;
  out.stats = std::move(results[0].stats);
  return out;
}

PagedTrained paged_loop(const Options& options, const Training& training,
                        const pagoda::Config& config, Backward backward) {
  return paged_loop(options, training, config, pagoda::comm::make_thread_worlds(training.ranks),
                    backward);
}

void use_cuda() {
  pagoda::torch::load_cuda();
  // cuBLAS may split sums differently from call to call without a workspace of fixed size.
  setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", 1);
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
  // The fused kernels of attention add up in any order.
  at::globalContext().setDeterministicCuDNN(true);
  at::globalContext().setSDPUseFlash(false);
  at::globalContext().setSDPUseMemEfficient(false);
  at::globalContext().setSDPUseCuDNN(false);
}

ModelBytes model_bytes(const Options& options) {
  ModelBytes out;
  std::set<const void*> seen;
  const auto model = make(options);
  for (const auto& [name, parameter] : parameters_once(*model)) {
    if (!seen.insert(parameter.storage().unsafeGetStorageImpl()).second) continue;
    out.all += parameter.storage().nbytes();
    out.largest = std::max<pagoda::Bytes>(out.largest, parameter.storage().nbytes());
  }
  return out;
}

}  // namespace zoo
