// SPDX-License-Identifier: Apache-2.0
#include "pagoda/kernels/shard_driver.h"

#include <cmath>

#include "pagoda/base/error.h"

namespace pagoda::kernels {
namespace {

void check_aligned(const char* name, const void* data, std::size_t size) {
  PAGODA_REQUIRE(reinterpret_cast<std::uintptr_t>(data) % size == 0,
                 "{} does not start at a multiple of its element size", name);
}

void check_moment(const char* name, const Elements& moment, bool needed) {
  PAGODA_REQUIRE(bool{moment} == needed, "{} is {}", name,
                 needed ? "missing" : "of no use to this optimizer");
  PAGODA_REQUIRE(moment.type != Dtype::F16, "{} is fp16; moments are fp32 or bf16", name);
  check_aligned(name, moment.data, element_size(moment.type));
}

/// Where the states go, if not to where they come from.
void check_written(const OptimizerShard& shard) {
  const OptimizerShard::Written& to = shard.to;
  const auto check = [](const char* name, const void* to_data, const void* from, std::size_t size) {
    PAGODA_REQUIRE((to_data != nullptr) == (from != nullptr),
                   "states are written elsewhere, all of them or none; {} is {}", name,
                   from != nullptr ? "not" : "not one of them");
    check_aligned(name, to_data, size);
  };
  PAGODA_REQUIRE(!to.param || (shard.rest != nullptr && to.param.type == shard.param.type),
                 "only a parameter that is read can be written elsewhere, in its own type");
  check_aligned("the parameter", to.param.data, element_size(to.param.type));
  check_aligned("the master", to.master, sizeof(float));
  if (!shard.states_elsewhere()) return;
  if (shard.param) check("the master", to.master, shard.master, sizeof(float));
  check("the rest", to.rest, shard.rest, sizeof(std::int16_t));
  check("momentum", to.momentum.data, shard.momentum.data, element_size(shard.momentum.type));
  check("variance", to.variance.data, shard.variance.data, element_size(shard.variance.type));
  PAGODA_REQUIRE((!to.momentum || to.momentum.type == shard.momentum.type) &&
                     (!to.variance || to.variance.type == shard.variance.type),
                 "moments are written elsewhere in another type");
}

}  // namespace

void check_shard(const OptimizerShard& shard, const Step& step, Needs needs, bool may_split) {
  PAGODA_REQUIRE_GE(step.number, 1U, "steps count from 1");
  // As a double: a conversion would leave its mark on the caller's floating-point flags.
  PAGODA_REQUIRE(std::abs(step.grad_scale) <= std::numeric_limits<float>::max(),
                 "the gradient scale is {}, which is not a finite fp32 number", step.grad_scale);
  if (shard.count == 0) return;
  PAGODA_REQUIRE(bool{shard.grad}, "the gradient is missing");
  check_aligned("the gradient", shard.grad.data, element_size(shard.grad.type));
  check_moment("momentum", shard.momentum, needs != Needs::Nothing);
  check_moment("variance", shard.variance, needs == Needs::MomentumAndVariance);
  PAGODA_REQUIRE(!shard.variance || shard.variance.type == shard.momentum.type,
                 "momentum is {} and variance {}", dtype_name(shard.momentum.type),
                 dtype_name(shard.variance.type));
  PAGODA_REQUIRE((shard.master != nullptr) != (shard.rest != nullptr),
                 "a shard has either a whole master or a rest");
  if (shard.rest != nullptr) {
    PAGODA_REQUIRE(may_split, "a split master needs the sign of a second moment: Adam only");
    PAGODA_REQUIRE(shard.param && shard.param.type == Dtype::BF16,
                   "a split master needs its bf16 parameter");
  }
  check_aligned("the master", shard.master, sizeof(float));
  check_aligned("the rest", shard.rest, sizeof(std::int16_t));
  check_aligned("the parameter", shard.param.data, element_size(shard.param.type));
  if (shard.elsewhere()) check_written(shard);
}

void check_range(const char* name, double value, double low, double high) {
  PAGODA_REQUIRE(value >= low && value < high, "{} is {}, not in [{}, {})", name, value, low, high);
}

double power(double base, std::uint64_t exponent) noexcept {
  double result = 1;
  for (; exponent != 0; exponent >>= 1) {
    if ((exponent & 1) != 0) result *= base;
    base *= base;
  }
  return result;
}

}  // namespace pagoda::kernels
