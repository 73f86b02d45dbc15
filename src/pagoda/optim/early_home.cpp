// SPDX-License-Identifier: Apache-2.0
#include "pagoda/optim/early_home.h"

namespace pagoda::optim {

pager::Home* early_home(TrainedPage& page, bool reversible, pager::Pager& pager) {
  if (page.updated.empty()) return &page.gradient;  // nothing is this rank's to write
  const bool over_gradient =
      !reversible && page.gradient_dtype == page.dtype && page.gradient_range == page.updated;
  pager::Home& next = page.next || !over_gradient ? page.next : page.gradient;
  if (!next || (reversible && !page.spare)) return nullptr;
  return exchanges_home(page, next, pager) || pager.tiers().in_place(next) ? &next : nullptr;
}

bool exchanges_home(const TrainedPage& page, const pager::Home& next, pager::Pager& pager) {
  const pager::Home& home = page.home();
  return !pager.look(*page.page).fixed && page.home_range() == page.updated &&
         home.tier() == next.tier() && home.size() == next.size();
}

}  // namespace pagoda::optim
