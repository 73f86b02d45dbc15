// SPDX-License-Identifier: Apache-2.0
#include "pagoda/optim/optimizer.h"

namespace pagoda::optim {
namespace {

template <class... Fns>
struct Overloaded : Fns... {
  using Fns::operator()...;
};
template <class... Fns>
Overloaded(Fns...) -> Overloaded<Fns...>;

}  // namespace

std::string_view name(const Optimizer& optimizer) noexcept {
  return std::visit(
      Overloaded{[](const AdamW&) { return "adamw"; }, [](const Adam&) { return "adam"; },
                 [](const Sgd&) { return "sgd"; }, [](const Lion&) { return "lion"; }},
      optimizer);
}

double learning_rate(const Optimizer& optimizer) noexcept {
  return std::visit([](const auto& rule) { return rule.lr; }, optimizer);
}

void set_learning_rate(Optimizer& optimizer, double lr) noexcept {
  std::visit([&](auto& rule) { rule.lr = lr; }, optimizer);
}

bool has_momentum(const Optimizer& optimizer) noexcept {
  const auto* sgd = std::get_if<Sgd>(&optimizer);
  return sgd == nullptr || sgd->momentum != 0;
}

bool has_variance(const Optimizer& optimizer) noexcept {
  return std::holds_alternative<AdamW>(optimizer) || std::holds_alternative<Adam>(optimizer);
}

void apply(const Optimizer& optimizer, const kernels::Step& step,
           const kernels::OptimizerSlice& slice, ThreadPool& pool) {
  using kernels::Decay;
  std::visit(
      Overloaded{[&](const AdamW& r) {
                   kernels::adam_step(
                       {r.lr, r.beta1, r.beta2, r.eps, r.weight_decay, Decay::Decoupled}, step,
                       slice, pool);
                 },
                 [&](const Adam& r) {
                   kernels::adam_step({r.lr, r.beta1, r.beta2, r.eps, r.weight_decay, Decay::L2},
                                      step, slice, pool);
                 },
                 [&](const Sgd& r) {
                   kernels::sgd_step(
                       {r.lr, r.momentum, r.dampening, r.weight_decay, Decay::L2, r.nesterov}, step,
                       slice, pool);
                 },
                 [&](const Lion& r) {
                   kernels::lion_step({r.lr, r.beta1, r.beta2, r.weight_decay}, step, slice, pool);
                 }},
      optimizer);
}

}  // namespace pagoda::optim
