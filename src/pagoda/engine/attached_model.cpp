// SPDX-License-Identifier: Apache-2.0
#include "pagoda/engine/attached_model.h"

#include <algorithm>
#include <utility>

namespace pagoda::engine {
namespace {

using optim::TrainedPage;

bool all_frozen(const TrainedPage& page) {
  return std::all_of(page.parameters.begin(), page.parameters.end(),
                     [](const optim::TrainedParameter& parameter) { return parameter.frozen; });
}

}  // namespace

std::vector<TrainedPage*> AttachedModel::last_first() const {
  std::vector<TrainedPage*> order;
  for (auto page = trained_.rbegin(); page != trained_.rend(); ++page) {
    order.push_back(page->get());
  }
  return order;
}

TrainedPage* AttachedModel::find(const pager::Page& page) const noexcept {
  const auto found = std::find_if(trained_.begin(), trained_.end(),
                                  [&](const auto& trained) { return trained->page == &page; });
  return found == trained_.end() ? frozen_.find(page) : found->get();
}

bool AttachedModel::trains(const pager::Page& page) const noexcept {
  return std::any_of(trained_.begin(), trained_.end(),
                     [&](const auto& one) { return one->page == &page; });
}

void AttachedModel::set_trained(const std::vector<FrozenSpec>& frozen,
                                std::vector<std::unique_ptr<TrainedPage>> pages) {
  std::vector<FrozenParameters::Parameter> parameters;
  for (const FrozenSpec& spec : frozen) {
    FrozenParameters::Parameter& parameter = parameters.emplace_back();
    parameter.in_page = spec.in_page;
    parameter.name = spec.name;
    parameter.obstacle = spec.obstacle;
    if (!spec.obstacle.empty()) continue;
    parameter.page = pages.at(spec.page).get();
  }
  std::vector<std::unique_ptr<TrainedPage>> without;
  for (auto& page : pages) {
    (all_frozen(*page) ? without : trained_).push_back(std::move(page));
  }
  frozen_.reset(std::move(parameters), std::move(without));
}

void AttachedModel::take_joined() {
  auto joined = frozen_.take_joined();
  if (joined.empty()) return;
  for (auto& page : joined) trained_.push_back(std::move(page));
  std::sort(trained_.begin(), trained_.end(),
            [](const auto& a, const auto& b) { return a->number < b->number; });
}

std::vector<std::unique_ptr<TrainedPage>> AttachedModel::take_frozen() {
  std::vector<std::unique_ptr<TrainedPage>> out;
  for (auto& page : trained_) {
    if (all_frozen(*page)) out.push_back(std::move(page));
  }
  std::erase(trained_, nullptr);
  return out;
}

void AttachedModel::clear_trained() {
  trained_.clear();
  frozen_.reset({}, {});
}

}  // namespace pagoda::engine
