// SPDX-License-Identifier: Apache-2.0
// Parameters that are frozen at attach() and thawed later: docs/notes/thaw.md.
#include <algorithm>
#include <utility>

#include "pagoda/base/error.h"
#include "pagoda/torch/engine_impl.h"
#include "pagoda/torch/pageable.h"

namespace pagoda {
namespace {

/// Adds segments in ascending order; false where elements would be in two.
bool add_apart(std::vector<optim::Segment>& to, const std::vector<optim::Segment>& more) {
  std::vector<optim::Segment> all = to;
  all.insert(all.end(), more.begin(), more.end());
  std::sort(all.begin(), all.end(),
            [](const auto& a, const auto& b) { return a.range.begin < b.range.begin; });
  for (std::size_t i = 1; i < all.size(); ++i) {
    if (all[i].range.begin < all[i - 1].range.end) return false;
  }
  to = std::move(all);
  return true;
}

}  // namespace

/// Puts the parameters together that share a page, in the order of the model, whether they are
/// frozen or not. What is wrong with one that is trained is an error; with one that is frozen, an
/// obstacle to its thaw.
std::vector<engine::TrainedSpec> Engine::Impl::specs_of(std::vector<Given>& given,
                                                        const std::vector<ParameterGroup>& groups) {
  struct Draft {
    std::optional<kernels::Dtype> dtype;
    std::size_t rule = 0;
    std::vector<optim::Segment> segments;
  };
  std::unordered_map<const pager::Page*, Draft> drafts;
  const auto rule_of = [&](const Given& one) { return groups[one.group].optimizer.index(); };
  const auto put = [&](const Given& one) -> std::string {
    Draft& draft = drafts[one.storage->page()];
    const kernels::Dtype dtype = torch::require_trainable(one.tensor, one.name);
    if (draft.dtype && *draft.dtype != dtype) return "parameters of another type share its storage";
    if (draft.dtype && draft.rule != rule_of(one)) {
      return "parameters with another kind of optimizer share its storage";
    }
    if (!add_apart(draft.segments, segments_of(one.tensor, 0))) {
      return "parameters share elements of its storage: tie them by using one parameter twice";
    }
    draft.dtype = dtype;
    draft.rule = rule_of(one);
    return {};
  };
  for (const Given& one : given) {  // first, for what is frozen must fit to them
    if (one.frozen()) continue;
    const std::string wrong = put(one);
    PAGODA_REQUIRE(wrong.empty(), "parameter '{}' cannot be trained: {}", one.name, wrong);
  }
  for (Given& one : given) {
    if (!one.frozen()) continue;
    try {
      one.obstacle = put(one);
    } catch (const UserError& error) {
      one.obstacle = error.message();
    }
  }
  std::vector<engine::TrainedSpec> specs;
  std::unordered_map<const pager::Page*, std::size_t> spec_of;
  for (Given& one : given) {
    if (!one.obstacle.empty()) continue;
    const auto [at, fresh] = spec_of.emplace(one.storage->page(), specs.size());
    if (fresh) specs.push_back({one.storage->page(), *drafts[one.storage->page()].dtype, {}, {}});
    engine::TrainedSpec& spec = specs[at->second];
    one.spec = at->second;
    one.in_page = spec.parameters.size();
    add_apart(spec.segments, segments_of(one.tensor, one.in_page));
    optim::TrainedParameter& parameter = spec.parameters.emplace_back();
    parameter.index = one.index;
    parameter.group = one.group;
  }
  return specs;
}

/// Tells the runtime which frozen parameters require a gradient now. Holds gradient_mutex_.
void Engine::Impl::look_for_thawed() {
  if (frozen_.empty()) return;
  engine::FrozenSet now;
  for (const std::size_t index : frozen_) {
    Parameter& parameter = parameters_[index];
    const auto alive = parameter.tensor.lock();
    parameter.thawed = alive != nullptr && (alive->requires_grad() || parameter.late);
    if (parameter.thawed) now.insert(*parameter.frozen);
  }
  runtime_->set_thawed(now);
}

void Engine::Impl::push_late() {
  std::vector<std::size_t> late;
  {
    const std::lock_guard lock(gradient_mutex_);
    for (const std::size_t index : frozen_) {
      if (parameters_[index].late) late.push_back(index);
    }
    if (late.empty()) return;
    look_for_thawed();
  }
  for (const std::size_t index : late) {
    Parameter& parameter = parameters_[index];
    {
      const std::lock_guard lock(gradient_mutex_);
      parameter.late = false;
    }
    auto alive = parameter.tensor.lock();
    if (alive == nullptr) continue;
    const at::Tensor tensor(std::move(alive));
    if (!tensor.grad().defined()) continue;
    if (parameter.page == nullptr) {
      tensor.mutable_grad() = at::Tensor();
    } else {
      take_gradient(index, tensor, true);
    }
  }
  auto partial = take_partial();
  for (auto& [page, gathered] : partial) push(*page, std::move(gathered), true);
}

/// After a step: what it has agreed to train is looked at no more.
void Engine::Impl::forget_thawed() {
  const std::lock_guard lock(gradient_mutex_);
  std::erase_if(frozen_, [&](std::size_t index) {
    Parameter& parameter = parameters_[index];
    if (!runtime_->is_trained(*parameter.frozen)) return false;
    parameter.frozen.reset();
    parameter.thawed = false;
    return true;
  });
}

/// Whether all gradients of the page that can come in this pass have come. Holds gradient_mutex_;
/// `seen` keeps what it has looked at, for its last reference may be Python's by then.
bool Engine::Impl::is_complete(const Partial& partial, const optim::TrainedPage& page,
                               std::vector<c10::intrusive_ptr<c10::TensorImpl>>& seen) {
  for (const std::size_t index : of_page_.at(page.page)) {
    const Parameter& parameter = parameters_[index];
    if (parameter.page == nullptr || partial.present[parameter.in_page]) continue;
    const auto& alive = seen.emplace_back(parameter.tensor.lock());
    if (alive != nullptr && alive->requires_grad()) return false;
  }
  return true;
}

}  // namespace pagoda
