// SPDX-License-Identifier: Apache-2.0
#include "pagoda/optim/optimizer.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "pagoda/base/error.h"
#include "pagoda/base/thread_pool.h"

namespace pagoda::optim {
namespace {

template <class... Fns>
struct Overloaded : Fns... {
  using Fns::operator()...;
};
template <class... Fns>
Overloaded(Fns...) -> Overloaded<Fns...>;

void require_at_least_zero(std::string_view constant, double value) {
  PAGODA_REQUIRE(std::isfinite(value) && value >= 0,
                 "{} = {} is not allowed: expected a finite number ≥ 0", constant, value);
}

void require_beta(std::string_view constant, double value) {
  PAGODA_REQUIRE(value >= 0 && value < 1, "{} = {} is not allowed: expected a number ≥ 0 and < 1",
                 constant, value);
}

/// One step over a shard, on this thread, or this and those of a pool.
template <class... Pool>
void apply_on(const Optimizer& optimizer, const kernels::Step& step,
              const kernels::OptimizerShard& shard, Pool&... pool) {
  using kernels::Decay;
  std::visit(
      Overloaded{
          [&](const AdamW& r) {
            kernels::adam_step({r.lr, r.beta1, r.beta2, r.eps, r.weight_decay, Decay::Decoupled},
                               step, shard, pool...);
          },
          [&](const Adam& r) {
            kernels::adam_step({r.lr, r.beta1, r.beta2, r.eps, r.weight_decay, Decay::L2}, step,
                               shard, pool...);
          },
          [&](const Sgd& r) {
            kernels::sgd_step(
                {r.lr, r.momentum, r.dampening, r.weight_decay, Decay::L2, r.nesterov}, step, shard,
                pool...);
          },
          [&](const Lion& r) {
            kernels::lion_step({r.lr, r.beta1, r.beta2, r.weight_decay}, step, shard, pool...);
          }},
      optimizer);
}

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

void require_valid(const Optimizer& optimizer) {
  std::visit(
      [](const auto& rule) {
        require_at_least_zero("lr", rule.lr);
        require_at_least_zero("weight_decay", rule.weight_decay);
        if constexpr (requires { rule.beta1; }) {
          require_beta("beta1", rule.beta1);
          require_beta("beta2", rule.beta2);
        }
        if constexpr (requires { rule.eps; }) require_at_least_zero("eps", rule.eps);
        if constexpr (requires { rule.momentum; }) {
          require_at_least_zero("momentum", rule.momentum);
          PAGODA_REQUIRE(std::isfinite(rule.dampening),
                         "dampening = {} is not allowed: expected a finite number", rule.dampening);
          PAGODA_REQUIRE(!rule.nesterov || (rule.momentum > 0 && rule.dampening == 0),
                         "nesterov needs momentum > 0 and dampening = 0; they are {} and {}",
                         rule.momentum, rule.dampening);
        }
      },
      optimizer);
}

bool has_momentum(const Optimizer& optimizer) noexcept {
  const auto* sgd = std::get_if<Sgd>(&optimizer);
  return sgd == nullptr || sgd->momentum != 0;
}

bool has_variance(const Optimizer& optimizer) noexcept {
  return std::holds_alternative<AdamW>(optimizer) || std::holds_alternative<Adam>(optimizer);
}

void apply(const Optimizer& optimizer, const kernels::Step& step,
           const kernels::OptimizerShard& shard, ThreadPool& pool) {
  apply_on(optimizer, step, shard, pool);
}

void apply(const Optimizer& optimizer, const kernels::Step& step,
           std::span<const kernels::OptimizerShard> shards, ThreadPool& pool) {
  if (shards.size() == 1) return apply(optimizer, step, shards[0], pool);
  // No piece keeps a thread busy for long, and no thread is woken for a little.
  constexpr std::size_t kPiece = 65536;  // elements
  std::vector<kernels::OptimizerShard> pieces;
  std::size_t elements = 0;
  for (const kernels::OptimizerShard& shard : shards) {
    elements += shard.count;
    for (std::size_t at = 0; at < shard.count; at += kPiece) {
      pieces.push_back(shard.part(at, std::min(at + kPiece, shard.count)));
    }
  }
  if (pieces.empty()) return;
  const std::size_t together = std::max<std::size_t>(1, pieces.size() * kPiece / elements);
  pool.parallel_for(0, pieces.size(), together, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) apply_on(optimizer, step, pieces[i]);
  });
}

}  // namespace pagoda::optim
