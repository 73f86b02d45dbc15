// SPDX-License-Identifier: Apache-2.0
#include "pagoda/engine/rules.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "pagoda/base/error.h"
#include "pagoda/engine/agreement.h"

namespace pagoda::engine {

void Rules::assign(std::vector<Optimizer> groups) {
  for (const Optimizer& rule : groups) optim::require_valid(rule);
  now_ = at_attach_ = std::move(groups);
  changed();
}

void Rules::set(std::size_t group, const Optimizer& to) {
  now_[group] = to;
  changed();
}

void Rules::changed() {
  hash_.store(hash_of(now_), std::memory_order_relaxed);
}

void Rules::agree(std::span<const Collective> ranks, comm::Group& group) {
  auto first = std::find_if(ranks.begin(), ranks.end(),
                            [](const Collective& one) { return one.call != Call::Join; });
  if (first == ranks.end()) first = ranks.begin();
  const auto other = [&](const Collective& one) { return one.rules != first->rules; };
  if (std::none_of(ranks.begin(), ranks.end(), other)) return;
  static_assert(std::is_trivially_copyable_v<Optimizer>);
  std::vector<Optimizer> theirs = now_;
  group.broadcast(std::as_writable_bytes(std::span(theirs)),
                  static_cast<int>(first - ranks.begin()));
  if (ranks[static_cast<std::size_t>(group.rank())].call == Call::Join) {
    now_ = std::move(theirs);
    changed();
  }
  if (std::none_of(ranks.begin(), ranks.end(),
                   [&](const Collective& one) { return one.call != Call::Join && other(one); })) {
    return;
  }
  Settings settings;
  for (std::size_t i = 0; i < now_.size(); ++i) {
    settings.add(fmt::format("the optimizer of group {}", i), text_of(now_[i]));
  }
  settings.require_equal(group);
}

}  // namespace pagoda::engine
