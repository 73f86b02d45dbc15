// SPDX-License-Identifier: Apache-2.0
#include "pagoda/io/fault/fault_plan.h"

#include <algorithm>
#include <utility>

namespace pagoda::io {
namespace {

/// SplitMix64: spreads neighbouring inputs over all 64 bits.
std::uint64_t mix(std::uint64_t value) noexcept {
  value += 0x9e3779b97f4a7c15ULL;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
  return value ^ (value >> 31);
}

}  // namespace

void FaultPlan::add(const FaultRule& rule) {
  const std::lock_guard lock(mutex_);
  rules_.push_back(rule);
}

void FaultPlan::set_lottery(FaultLottery lottery) {
  const std::lock_guard lock(mutex_);
  lottery_ = std::move(lottery);
  met_.clear();
}

void FaultPlan::set_pace(double bytes_per_second) {
  const std::lock_guard lock(mutex_);
  pace_ = bytes_per_second;
}

void FaultPlan::clear() {
  const std::lock_guard lock(mutex_);
  rules_.clear();
  lottery_ = {};
  pace_ = 0;
}

std::optional<Fault> FaultPlan::decide(const Request& request) {
  const std::lock_guard lock(mutex_);
  const std::optional<Fault> fault = strike(request, lock);
  if (fault) ++injected_[static_cast<std::size_t>(fault->kind)];
  if (fault || pace_ <= 0) return fault;
  const auto service = static_cast<Nanos>(static_cast<double>(request.length) / pace_ * 1e9);
  paced_until_ = std::max(paced_until_, now_ns()) + service;
  return Fault{.kind = FaultKind::Delay, .until = paced_until_};
}

std::optional<Fault> FaultPlan::strike(const Request& request,
                                       const RankedGuard<LockRank::FaultPlan>&) {
  for (FaultRule& rule : rules_) {
    const bool meets = (!rule.op || *rule.op == request.op) && request.offset < rule.end &&
                       rule.begin < request.offset + request.length;
    if (!meets || rule.times == 0) continue;
    if (rule.skip > 0) {
      --rule.skip;
      continue;
    }
    --rule.times;
    return rule.fault;
  }
  if (lottery_.faults.empty()) return std::nullopt;
  const std::uint64_t nth = met_[{request.op, request.offset, request.length}]++;
  std::uint64_t draw = mix(lottery_.seed);
  for (const std::uint64_t input :
       {static_cast<std::uint64_t>(request.op), request.offset, request.length, nth}) {
    draw = mix(draw ^ input);
  }
  const double unit = static_cast<double>(draw >> 11) * 0x1.0p-53;
  if (unit >= lottery_.probability) return std::nullopt;
  Fault fault = lottery_.faults[mix(draw) % lottery_.faults.size()];
  fault.position = mix(draw ^ 1);
  return fault;
}

std::uint64_t FaultPlan::injected(FaultKind kind) const {
  const std::lock_guard lock(mutex_);
  return injected_[static_cast<std::size_t>(kind)];
}

}  // namespace pagoda::io
