// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/custom_functions.h"

#include <algorithm>
#include <functional>
#include <mutex>
#include <utility>

namespace pagoda::torch {
namespace {

struct Running {
  CustomFunctions::Key key;
  CustomFunctions::Pages pages;  // as they are used, some of them more than once
};

thread_local std::vector<Running> stack;

}  // namespace

thread_local std::size_t CustomFunctions::running = 0;

CustomFunctions& CustomFunctions::instance() {
  static auto* const kept = new CustomFunctions;  // threads may outlive static objects
  return *kept;
}

void CustomFunctions::begins(Key key) {
  stack.push_back({key, {}});
  ++running;
}

void CustomFunctions::note(const pager::Page& page) {
  Pages& pages = stack.back().pages;
  if (pages.empty() || pages.back() != &page) pages.push_back(&page);
}

void CustomFunctions::ends() {
  Running ended = std::move(stack.back());
  stack.pop_back();
  --running;
  std::sort(ended.pages.begin(), ended.pages.end(), std::less<>());
  ended.pages.erase(std::unique(ended.pages.begin(), ended.pages.end()), ended.pages.end());
  if (!stack.empty()) {
    Pages& around = stack.back().pages;
    around.insert(around.end(), ended.pages.begin(), ended.pages.end());
  }
  auto pages = std::make_shared<const Pages>(std::move(ended.pages));
  const std::lock_guard lock(mutex_);
  pages_ += pages->size();
  auto& known = used_[ended.key];
  if (known == nullptr) {
    oldest_.push_back(ended.key);
  } else {
    pages_ -= known->size();
  }
  known = std::move(pages);
  while (oldest_.size() > kMost || (pages_ > kMostPages && oldest_.size() > 1)) {
    const auto oldest = used_.find(oldest_.front());
    pages_ -= oldest->second->size();
    used_.erase(oldest);
    oldest_.pop_front();
  }
}

void CustomFunctions::before_fork() {
  mutex_.lock();
}

void CustomFunctions::after_fork(bool in_child) {
  if (in_child) {
    used_.clear();
    oldest_.clear();
    pages_ = running = 0;
    stack.clear();
  }
  mutex_.unlock();
}

std::shared_ptr<const CustomFunctions::Pages> CustomFunctions::used_by(Key key) const {
  const std::lock_guard lock(mutex_);
  const auto found = used_.find(key);
  return found == used_.end() ? nullptr : found->second;
}

}  // namespace pagoda::torch
