// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/optimizer_constants.h"

#include <variant>

#include "pagoda/base/error.h"

namespace pagoda::torch {
namespace {

/// Takes what it knows from `constants` and complains about the rest.
class ConstantReader {
 public:
  explicit ConstantReader(const Constants& constants) : rest_(constants.copy()) {}
  void take(const char* name, double& to) {
    if (!rest_.contains(name)) return;
    to = rest_.at(name);
    (void)rest_.erase(name);
  }
  void finish(const std::string& kind) const {
    for (const auto& entry : rest_) {
      throw UserError(fmt::format("optimizer '{}' has no '{}'", kind, entry.key()));
    }
  }

 private:
  Constants rest_;
};

}  // namespace

Optimizer rule_of(const std::string& kind, const Constants& constants) {
  ConstantReader reader(constants);
  const auto adam = [&](auto rule) {
    reader.take("lr", rule.lr);
    reader.take("beta1", rule.beta1);
    reader.take("beta2", rule.beta2);
    reader.take("weight_decay", rule.weight_decay);
    return rule;
  };
  const auto with_eps = [&](auto rule) {
    reader.take("eps", rule.eps);
    return rule;
  };
  Optimizer out;
  if (kind == "adamw") {
    out = with_eps(adam(AdamW{}));
  } else if (kind == "adam") {
    out = with_eps(adam(Adam{}));
  } else if (kind == "lion") {
    out = adam(Lion{});
  } else if (kind == "sgd") {
    Sgd rule;
    double nesterov = 0;
    reader.take("lr", rule.lr);
    reader.take("momentum", rule.momentum);
    reader.take("dampening", rule.dampening);
    reader.take("weight_decay", rule.weight_decay);
    reader.take("nesterov", nesterov);
    rule.nesterov = nesterov != 0;
    out = rule;
  } else {
    throw UserError(fmt::format("there is no optimizer '{}'; use adamw, adam, sgd or lion", kind));
  }
  reader.finish(kind);
  return out;
}

Constants constants_of(const std::string& kind) {
  Constants out;
  const auto adam = [&](const auto& rule) {
    out.insert("lr", rule.lr);
    out.insert("beta1", rule.beta1);
    out.insert("beta2", rule.beta2);
    out.insert("weight_decay", rule.weight_decay);
    if constexpr (requires { rule.eps; }) out.insert("eps", rule.eps);
  };
  const Optimizer rule = rule_of(kind, Constants());
  if (const auto* sgd = std::get_if<Sgd>(&rule)) {
    out.insert("lr", sgd->lr);
    out.insert("momentum", sgd->momentum);
    out.insert("dampening", sgd->dampening);
    out.insert("weight_decay", sgd->weight_decay);
    out.insert("nesterov", sgd->nesterov ? 1 : 0);
  }
  if (const auto* adamw = std::get_if<AdamW>(&rule)) adam(*adamw);
  if (const auto* plain = std::get_if<Adam>(&rule)) adam(*plain);
  if (const auto* lion = std::get_if<Lion>(&rule)) adam(*lion);
  return out;
}

}  // namespace pagoda::torch
